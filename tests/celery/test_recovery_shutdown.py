"""SIGTERM: what runs may end, what does not is given back uncounted and starts elsewhere at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from relata_celery.domain.job import JobState
from tests.celery.apps_recovery import Stage
from tests.waiting import wait_until
from tests.workers import Worker

#: So long that nobody can have waited for it.
LONG_LEASE = {"RELATA_LEASE_DURATION": "120", "RELATA_HEARTBEAT_PERIOD": "1"}
IMPATIENT = {**LONG_LEASE, "RELATA_DRAIN_TIMEOUT": "1"}
PATIENT = {**LONG_LEASE, "RELATA_DRAIN_TIMEOUT": "60"}


@pytest.fixture
def stage(database_uri: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(database_uri, tmp_path) as stage:
        yield stage


def wait_shutdown(worker: Worker) -> None:
    wait_until(lambda: "Warm shutdown" in worker.log, 20, "the worker has seen the signal")


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_running_jobs_may_end_and_waiting_ones_are_not_begun(stage: Stage, pool: str) -> None:
    worker = stage.worker("-c", "1", "-P", pool, env=PATIENT)
    running = stage.send("hold", "gate")
    stage.wait_line("begin", running)
    worker.signal(signal.SIGTERM)
    wait_shutdown(worker)
    waiting = stage.send("work")
    stage.open_gate("gate")

    assert worker.process.wait(30) == 0
    job = stage.job(running)
    assert (job.state, job.attempts, job.result) == (JobState.SUCCEEDED, 1, 0)
    assert stage.outcomes(running) == ["succeeded"]
    job = stage.job(waiting)
    assert (job.state, job.attempts, job.lease) == (JobState.QUEUED, 0, None)
    assert not stage.journal("begin", waiting)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_job_that_does_not_end_in_time_is_given_back_uncounted_and_starts_elsewhere(
    stage: Stage, pool: str
) -> None:
    first = stage.worker("-c", "1", "-P", pool, env=IMPATIENT)
    job_id = stage.send("hold", "gate")
    stage.wait_line("begin", job_id)
    stage.worker("-c", "1", "-P", pool, name="w2", env=LONG_LEASE)
    first.signal(signal.SIGTERM)

    stage.wait_line("begin", job_id, count=2)
    job = stage.wait_state(job_id, JobState.RUNNING)
    assert (job.attempts, job.history) == (1, ())
    assert first.process.wait(30) == 0
    stage.open_gate("gate")
    job = stage.wait_state(job_id, JobState.SUCCEEDED)
    assert job.attempts == 1
    assert [(entry.number, str(entry.outcome)) for entry in job.history] == [(1, "succeeded")]
    first_end, *more = stage.journal("end", job_id)
    assert not more
    assert first_end.pid != stage.journal("begin", job_id)[0].pid


def test_a_signal_to_the_whole_process_group_kills_no_running_job(stage: Stage) -> None:
    worker = stage.worker("-c", "2", env=PATIENT)
    running = stage.send("hold", "gate")
    stage.wait_line("begin", running)
    worker.signal_group(signal.SIGTERM)
    wait_shutdown(worker)
    worker.signal_group(signal.SIGTERM)  # supervisors repeat themselves
    stage.open_gate("gate")

    assert worker.process.wait(30) == 0
    assert stage.outcomes(running) == ["succeeded"]
    assert len(stage.journal("begin", running)) == 1


def test_what_a_signal_to_the_whole_group_interrupts_is_given_back_uncounted(stage: Stage) -> None:
    worker = stage.worker("-c", "2", env=IMPATIENT)
    job_id = stage.send("hold", "gate")
    stage.wait_line("begin", job_id)
    worker.signal_group(signal.SIGTERM)
    assert worker.process.wait(30) == 0
    job = stage.job(job_id)
    assert (job.state, job.attempts, job.lease, job.history) == (JobState.QUEUED, 0, None, ())


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_cold_shutdown_gives_running_jobs_back_at_once(stage: Stage, pool: str) -> None:
    worker = stage.worker("-c", "1", "-P", pool, env=PATIENT)
    job_id = stage.send("hold", "gate")
    stage.wait_line("begin", job_id)
    worker.signal(signal.SIGQUIT)
    worker.process.wait(30)
    job = stage.job(job_id)
    assert (job.state, job.attempts, job.lease, job.history) == (JobState.QUEUED, 0, None, ())
