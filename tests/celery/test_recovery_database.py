"""MongoDB away: at a worker's start, in the middle of a job, at enqueue; and a server without a replica set."""

from __future__ import annotations

import secrets
import signal
from pathlib import Path
from time import monotonic

import pytest
from kombu.exceptions import OperationalError

from relata_celery.domain.job import JobState
from tests.celery.apps_recovery import Stage, make_app
from tests.mongo import Mongod, ReplicaSet, free_port, with_database
from tests.waiting import wait_until


def test_a_worker_started_before_mongodb_says_so_and_starts_when_it_is_there(
    private_set: ReplicaSet, tmp_path: Path
) -> None:
    server = Mongod(tmp_path / "server", port=free_port())
    uri = with_database(server.direct_uri, "relata_test_late")
    with Stage(uri, tmp_path) as stage:
        worker = stage.start("-c", "1")
        wait_until(
            lambda: "MongoDB cannot be reached" in worker.log, 30, "the worker says that MongoDB is away"
        )
        assert worker.process.poll() is None
        server.start()
        stage.callback(server.kill)
        worker.wait_ready(60)
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)


@pytest.mark.parametrize("away", ["silent", "killed"])
def test_a_job_goes_on_while_mongodb_is_away_and_is_settled_when_it_is_back(
    private_set: ReplicaSet, tmp_path: Path, away: str
) -> None:
    (server,) = private_set.members
    uri = with_database(private_set.uri, f"relata_test_{secrets.token_hex(6)}")
    lease = {"RELATA_LEASE_DURATION": "60", "RELATA_HEARTBEAT_PERIOD": "0.5"}
    with Stage(uri, tmp_path) as stage:
        worker = stage.worker("-c", "2", env=lease)
        job_id = stage.send("hold", "gate")
        stage.wait_line("begin", job_id)
        if away == "silent":
            server.pause()
        else:
            server.kill()
        try:
            stage.open_gate("gate")
            stage.wait_line("end", job_id)
            wait_until(lambda: "state is unknown" in worker.log, 40, "a renewal has failed")
        finally:
            if away == "silent":
                server.resume()
            else:
                server.start()
                private_set.primary()

        job = stage.wait_state(job_id, JobState.SUCCEEDED, 60)
        assert job.attempts == 1
        assert stage.outcomes(job_id) == ["succeeded"]
        after = stage.send("work")
        stage.wait_state(after, JobState.SUCCEEDED, 60)
        assert len(stage.journal("begin", job_id)) == 1
        assert stage.job(job_id) == job


def test_neither_a_shutdown_nor_a_publish_hangs_on_a_silent_mongodb(
    private_set: ReplicaSet, tmp_path: Path
) -> None:
    (server,) = private_set.members
    uri = with_database(private_set.uri, f"relata_test_{secrets.token_hex(6)}")
    with Stage(uri, tmp_path) as stage:
        worker = stage.worker("-c", "2", env={"RELATA_DRAIN_TIMEOUT": "1"})
        job_id = stage.send("hold", "gate")
        stage.wait_line("begin", job_id)
        server.pause()
        try:
            worker.signal(signal.SIGTERM)
            began = monotonic()
            with pytest.raises(OperationalError, match="perhaps not queued"):
                stage.send("work")
            assert monotonic() - began < 20
            assert worker.process.wait(60) == 0
        finally:
            server.resume()
        assert "unexpected error" not in worker.log
        stage.worker("-c", "2", name="w2")  # nothing could be given back: the lease runs out
        stage.wait_line("begin", job_id, count=2)
        stage.open_gate("gate")
        stage.wait_state(job_id, JobState.SUCCEEDED)


def test_a_publish_without_mongodb_fails_within_ten_seconds() -> None:
    app = make_app(f"mongodb://127.0.0.1:{free_port()}/relata_test_away")
    began = monotonic()
    with pytest.raises(OperationalError, match="perhaps not queued"):
        app.tasks["recovery.work"].delay()
    assert monotonic() - began < 10
    app.close()


def test_jobs_and_remote_control_work_on_a_server_without_a_replica_set(
    standalone_uri: str, tmp_path: Path
) -> None:
    with Stage(with_database(standalone_uri, f"relata_test_{secrets.token_hex(6)}"), tmp_path) as stage:
        worker = stage.worker("-c", "2")
        later = stage.send("work", countdown=2)
        ids = stage.send_many(50, "work")
        answers = stage.app.control.inspect(timeout=20, limit=1).ping()
        assert list(answers.values()) == [{"ok": "pong"}]
        stage.wait_all([later, *ids])
        job = stage.job(later)
        assert job.started_at is not None
        assert job.started_at >= job.run_at
        assert len(stage.journal("begin")) == 51
        assert worker.terminate() == 0
