"""Workers and their processes killed without a word: what they had is run again, once, and it shows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from relata_celery.domain.job import AttemptOutcome, ErrorClass, JobState
from tests.celery.apps_recovery import Stage
from tests.waiting import wait_until

LEASE_S, REAP_S = 3, 1


@pytest.fixture
def stage(database_uri: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(database_uri, tmp_path) as stage:
        yield stage


def test_of_500_jobs_whose_worker_is_killed_half_way_each_succeeds_once(stage: Stage) -> None:
    ids = stage.send_many(500, "work", 0.02)
    first = stage.worker("-c", "2")
    wait_until(lambda: stage.count(JobState.SUCCEEDED) >= 200, 60, "nearly half of the jobs are done")
    first.kill_group()
    killed_at = datetime.now(timezone.utc)
    assert stage.count(JobState.SUCCEEDED) < 500
    assert stage.count(JobState.RUNNING) >= 1, "nothing was interrupted"

    stage.worker("-c", "2", name="w2")
    ready_at = datetime.now(timezone.utc)
    stage.wait_all(ids)

    jobs = stage.jobs(ids)
    accepted = [[entry for entry in job.history if entry.outcome is AttemptOutcome.SUCCEEDED] for job in jobs]
    assert [len(entries) for entries in accepted] == [1] * 500
    assert {line.job for line in stage.journal("end")} == set(ids)
    interrupted = [job for job in jobs if job.attempts > 1]
    assert interrupted
    for job in interrupted:
        lost, done = job.history
        assert (lost.number, lost.outcome, lost.error) == (1, AttemptOutcome.LEASE_EXPIRED, "lease expired")
        assert lost.error_class is ErrorClass.TRANSIENT
        assert (done.number, done.outcome) == (2, AttemptOutcome.SUCCEEDED)
        assert lost.worker != done.worker
        free_at = max(killed_at + timedelta(seconds=LEASE_S), ready_at) + timedelta(seconds=REAP_S)
        assert lost.ended_at < free_at + timedelta(seconds=3)
    assert all(len(stage.journal("end", job.id)) == 1 for job in jobs if job.attempts == 1)


def test_a_job_whose_process_is_killed_runs_again_at_once_and_not_after_the_lease(stage: Stage) -> None:
    stage.worker("-c", "2", env={"RELATA_LEASE_DURATION": "60", "RELATA_HEARTBEAT_PERIOD": "1"})
    job_id = stage.send("hold", "gate")
    (begun,) = stage.wait_line("begin", job_id)
    os.kill(begun.pid, signal.SIGKILL)

    _, again = stage.wait_line("begin", job_id, count=2, timeout=4)
    assert again.pid != begun.pid
    job = stage.wait_state(job_id, JobState.RUNNING)
    assert job.attempts == 2
    (lost,) = job.history
    assert (lost.number, lost.outcome, lost.error_class) == (
        1,
        AttemptOutcome.WORKER_LOST,
        ErrorClass.TRANSIENT,
    )
    assert lost.error is not None
    assert lost.error.startswith("worker lost")

    stage.open_gate("gate")
    stage.wait_state(job_id, JobState.SUCCEEDED)
    assert stage.outcomes(job_id) == ["worker_lost", "succeeded"]


def test_processes_killed_amid_a_stream_of_quick_jobs_lose_none(stage: Stage) -> None:
    worker = stage.worker("-c", "2", env={"RELATA_LEASE_DURATION": "60", "RELATA_HEARTBEAT_PERIOD": "1"})
    ids = stage.send_many(300, "work", 0.005)
    for kill in range(1, 6):
        done = min(40 * kill, 250)
        wait_until(lambda done=done: stage.count(JobState.SUCCEEDED) >= done, 60, f"{done} jobs are done")
        for pid in worker.children()[:1]:
            os.kill(pid, signal.SIGKILL)
    stage.wait_all(ids, 45)
    for job in stage.jobs(ids):
        assert [entry.number for entry in job.history] == list(range(1, job.attempts + 1))
        *lost, end = [str(entry.outcome) for entry in job.history]
        assert end == "succeeded"
        assert set(lost) <= {"worker_lost"}


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_slept_past_its_lease_does_not_overwrite_its_replacement(
    stage: Stage, pool: str
) -> None:
    zombie = stage.worker("-c", "1", "-P", pool)
    job_id = stage.send("hold", "gate")
    stage.wait_line("begin", job_id)
    zombie.signal_group(signal.SIGSTOP)
    replacement = stage.worker("-c", "1", "-P", pool, name="w2")
    stage.wait_line("begin", job_id, count=2)

    stage.open_gate("gate-1")
    zombie.signal_group(signal.SIGCONT)
    wait_until(
        lambda: stage.journal("end", job_id, 1) or stage.journal("stopped", job_id, 1),
        20,
        "the zombie's attempt ends",
    )
    wait_until(lambda: "outcome not kept" in zombie.log, 20, "the zombie says that its outcome was not kept")
    assert stage.job(job_id).state is JobState.RUNNING
    assert stage.outcomes(job_id) == ["lease_expired"]

    stage.open_gate("gate-2")
    job = stage.wait_state(job_id, JobState.SUCCEEDED)
    assert stage.outcomes(job_id) == ["lease_expired", "succeeded"]
    assert job.history[0].worker != job.history[1].worker

    replacement.kill_group()
    after = stage.send("work")  # the zombie has its slot back, and goes on
    stage.wait_state(after, JobState.SUCCEEDED)
    for hook in ("task_success", "on_success"):
        assert [line.attempt for line in stage.journal(hook, job_id)] == [2], hook
    assert stage.outcomes(job_id) == ["lease_expired", "succeeded"]


def test_a_job_that_kills_its_process_each_time_fails_after_its_last_attempt(stage: Stage) -> None:
    stage.worker("-c", "1")
    poison = stage.send("kill_child", max_attempts=3)
    job = stage.wait_state(poison, JobState.FAILED)
    assert [str(entry.outcome) for entry in job.history] == ["worker_lost"] * 3
    assert [entry.number for entry in job.history] == [1, 2, 3]
    assert len(stage.journal("begin", poison)) == 3
    assert job.error is not None
    assert job.error.startswith("worker lost")

    stage.wait_state(stage.send("work"), JobState.SUCCEEDED)


def test_a_job_that_kills_its_worker_each_time_fails_with_its_lease_expired(stage: Stage) -> None:
    poison = stage.send("kill_parent", max_attempts=2)
    for attempt in (1, 2):
        worker = stage.start("-c", "1", name=f"w{attempt}")
        stage.wait_line("begin", poison, count=attempt, timeout=60)
        worker.process.wait(20)
        worker.kill_group()
    stage.worker("-c", "1", name="w3")
    job = stage.wait_state(poison, JobState.FAILED)
    assert (job.error, job.error_class) == ("lease expired", ErrorClass.TRANSIENT)
    assert stage.outcomes(poison) == ["lease_expired"] * 2

    stage.wait_state(stage.send("work"), JobState.SUCCEEDED)
    assert len(stage.journal("begin", poison)) == 2
