"""Leases: long jobs keep theirs, future jobs have none, and no more is claimed than there are slots."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from relata_celery.domain.job import JobState, NewJob
from tests.celery.apps_recovery import Stage
from tests.waiting import wait_until

#: As short as a lease can be on a machine that does other things too.
SHORT = {"RELATA_LEASE_DURATION": "1.6", "RELATA_HEARTBEAT_PERIOD": "0.3", "RELATA_REAP_PERIOD": "0.3"}
LEASE_S = 1.6


@pytest.fixture
def stage(database_uri: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(database_uri, tmp_path) as stage:
        yield stage


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_job_five_times_as_long_as_the_lease_runs_once(stage: Stage, pool: str) -> None:
    stage.worker("-c", "2", "-P", pool, env=SHORT)
    job_id = stage.send("hold", "gate")
    begun = stage.wait_line("begin", job_id)
    assert len(begun) == 1

    def renewed_for_five_leases() -> bool:
        job = stage.job(job_id)
        assert job.attempts == 1
        assert job.lease is not None
        assert job.started_at is not None
        return job.lease.until - job.started_at > timedelta(seconds=6 * LEASE_S)

    wait_until(renewed_for_five_leases, 60, "the lease was renewed for five times its length")
    stage.open_gate("gate")
    job = stage.wait_state(job_id, JobState.SUCCEEDED)
    assert job.attempts == 1
    assert stage.outcomes(job_id) == ["succeeded"]
    assert len(stage.journal("begin")) == 1


def test_a_job_that_keeps_the_interpreter_to_itself_for_three_leases_runs_once(stage: Stage) -> None:
    stage.worker("-c", "2", env=SHORT)
    job_id = stage.send("hold_interpreter", 3 * LEASE_S)
    stage.wait_state(job_id, JobState.SUCCEEDED, 60)
    assert stage.outcomes(job_id) == ["succeeded"]
    assert len(stage.journal("begin")) == 1


def test_a_future_job_occupies_nothing_in_a_worker_and_survives_its_restart(stage: Stage) -> None:
    future = stage.send("work", countdown=3600)
    for name in ("w1", "w2"):
        worker = stage.worker("-c", "2", name=name)
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)  # so it has looked at the queue
        inspect = stage.app.control.inspect(timeout=10, limit=1)
        assert [
            list(answer.values()) for answer in (inspect.reserved(), inspect.scheduled(), inspect.active())
        ] == [[[]]] * 3
        assert worker.terminate() == 0

    job = stage.job(future)
    assert (job.state, job.attempts, job.lease, job.fence) == (JobState.QUEUED, 0, None, 0)
    assert job.run_at - job.created_at > timedelta(seconds=3500)
    assert not stage.journal("begin", future)


def test_ten_thousand_future_jobs_do_not_keep_a_due_one_waiting(stage: Stage) -> None:
    message = stage.job(stage.send("work", countdown=3600)).message
    stage.store.jobs.enqueue(
        [
            NewJob(
                id=f"future-{number}",
                type="recovery.work",
                queue="celery",
                message={**message, "headers": {**message["headers"], "id": f"future-{number}"}},
                delay_s=3600,
                priority=9,
            )
            for number in range(10_000)
        ]
    )
    stage.worker("-c", "2")
    ids = stage.send_many(20, "work")
    stage.wait_all(ids, 30)
    assert {line.job for line in stage.journal("begin")} == set(ids)
    assert stage.count(JobState.QUEUED) == 10_001


def test_no_more_slow_jobs_are_claimed_than_there_are_slots(stage: Stage) -> None:
    ids = stage.send_many(20, "work", 1.0)
    stage.worker("-c", "2")
    seen: list[int] = []

    def done() -> bool:
        seen.append(stage.count(JobState.RUNNING))
        return stage.count(JobState.SUCCEEDED) == len(ids)

    wait_until(done, 60, "the slow jobs are done")
    assert max(seen) == 2
    assert all(job.attempts == 1 for job in stage.jobs(ids))
