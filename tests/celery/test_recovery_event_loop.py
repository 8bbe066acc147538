"""The worker's event loop does not wait for MongoDB: signals and pool results are handled while it is away."""

from __future__ import annotations

import secrets
import signal
from pathlib import Path

import pytest

from relata_celery.domain.job import JobState
from tests.celery.apps_recovery import Stage
from tests.mongo import ReplicaSet, with_database
from tests.waiting import wait_until


@pytest.fixture
def uri(private_set: ReplicaSet) -> str:
    return with_database(private_set.uri, f"relata_test_{secrets.token_hex(6)}")


def test_a_worker_obeys_sigterm_while_mongodb_is_away(private_set: ReplicaSet, uri: str, tmp_path: Path) -> None:
    (server,) = private_set.members
    with Stage(uri, tmp_path) as stage:
        worker = stage.worker("-c", "2", "-E", env={"RELATA_DRAIN_TIMEOUT": "5"})
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)
        server.kill()
        try:
            wait_until(lambda: "outbox: MongoDB cannot be reached" in worker.log, 60, "a heartbeat is not written")
            worker.signal(signal.SIGTERM)
            assert worker.process.wait(40) == 0  # kombu by itself would try the heartbeat again for ever
        finally:
            server.start()
            private_set.primary()


def test_pool_results_are_handled_and_events_wait_while_mongodb_is_away(
    private_set: ReplicaSet, uri: str, tmp_path: Path
) -> None:
    (server,) = private_set.members
    with Stage(uri, tmp_path) as stage:
        lease = {"RELATA_LEASE_DURATION": "120", "RELATA_HEARTBEAT_PERIOD": "1"}
        worker = stage.worker("-c", "2", "-E", env=lease)
        job_id = stage.send("hold", "gate")
        stage.wait_line("begin", job_id)
        server.kill()
        try:
            wait_until(lambda: "outbox: MongoDB cannot be reached" in worker.log, 60, "a heartbeat is not written")
            stage.open_gate("gate")
            stage.wait_line("end", job_id)
            wait_until(lambda: "settler: MongoDB cannot be reached" in worker.log, 60, "the result reached the engine")
        finally:
            server.start()
            private_set.primary()
        assert stage.wait_state(job_id, JobState.SUCCEEDED, 60).attempts == 1
        assert wait_until(lambda: stage.app.control.inspect(timeout=5, limit=1).ping(), 60, "it answers again")
        assert "Connection to broker lost" not in worker.log
        assert worker.terminate() == 0
