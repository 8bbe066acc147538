"""The worker's consumer loses its connection and makes a new one: Celery forgets all that had not begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from relata_celery.domain.job import JobState
from tests.celery.apps_recovery import Stage
from tests.waiting import wait_until
from tests.workers import Worker

POOLS = {"prefork": ("-c", "2", "--without-mingle"), "threads": ("-P", "threads", "-c", "2", "--without-mingle")}
RECONNECTS = 50


def reconnects(worker: Worker) -> int:
    return worker.log.count("Connection to broker lost")


def lose_connection(stage: Stage, worker: Worker) -> None:
    """Once; said again when a worker that was just reconnecting did not hear it."""
    before = reconnects(worker)
    while reconnects(worker) == before:
        assert worker.process.poll() is None, worker.log
        stage.app.control.broadcast("lose_connection")
        try:
            wait_until(lambda: reconnects(worker) > before, 0.5, "the connection was lost")
        except AssertionError:
            continue


@pytest.mark.parametrize("pool", list(POOLS))
def test_no_job_is_lost_or_run_twice_over_many_reconnects(database_uri: str, tmp_path: Path, pool: str) -> None:
    with Stage(database_uri, tmp_path) as stage:
        # A long lease: what comes back here has been given back, not waited for.
        worker = stage.worker(*POOLS[pool], env={"RELATA_LEASE_DURATION": "600", "RELATA_HEARTBEAT_PERIOD": "1"})
        ids: list[str] = []
        for _ in range(RECONNECTS):
            ids += stage.send_many(40, "work", 0.01)
            lose_connection(stage, worker)
        stage.wait_all(ids, 120)

        jobs = stage.jobs(ids)
        assert {(job.state, job.attempts) for job in jobs} == {(JobState.SUCCEEDED, 1)}
        assert {tuple(str(entry.outcome) for entry in job.history) for job in jobs} == {("succeeded",)}
        assert worker.terminate() == 0


def test_jobs_that_wait_for_a_slot_are_given_back_when_the_connection_is_lost(
    database_uri: str, tmp_path: Path
) -> None:
    with Stage(database_uri, tmp_path) as stage:
        lease = {"RELATA_LEASE_DURATION": "600", "RELATA_HEARTBEAT_PERIOD": "1", "RELATA_CLAIM_AHEAD": "60"}
        worker = stage.worker("-c", "1", env=lease)
        for job_id in stage.send_many(3, "work"):  # quick ones: now it claims ahead
            stage.wait_state(job_id, JobState.SUCCEEDED)
        ids = [stage.send("hold", "gate") for _ in range(10)]
        wait_until(lambda: stage.count(JobState.RUNNING) == 10, 30, "all ten are claimed")
        (running,) = stage.wait_line("begin", ids[0])
        lose_connection(stage, worker)
        stage.open_gate("gate")
        for job_id in ids:
            stage.wait_state(job_id, JobState.SUCCEEDED, 60)
        assert {job.attempts for job in stage.jobs(ids)} == {1}
        assert stage.journal("begin", running.job) == [running]  # what ran was left alone
