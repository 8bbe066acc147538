"""Several workers on one queue, and pools whose processes come and go: none twice, none lost."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from relata_celery.domain.job import JobState
from tests.celery.apps_recovery import Stage
from tests.waiting import wait_until


@pytest.fixture
def stage(database_uri: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(database_uri, tmp_path) as stage:
        yield stage


def check_each_ran_once(stage: Stage, ids: list[str]) -> None:
    assert Counter(line.job for line in stage.journal("begin")) == Counter(ids)
    for job in stage.jobs(ids):
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)
        assert [str(entry.outcome) for entry in job.history] == ["succeeded"]


def test_two_workers_of_one_name_share_a_queue_and_run_no_job_twice(stage: Stage) -> None:
    workers = [stage.start("-c", "2", "-n", "same@here", name=name) for name in ("w1", "w2")]
    for worker in workers:
        worker.wait_ready(60)
    ids = stage.send_many(200, "work", 0.01)
    stage.wait_all(ids)
    check_each_ran_once(stage, ids)
    owners = {entry.worker for job in stage.jobs(ids) for entry in job.history}
    assert len(owners) == 2


def test_processes_replaced_after_every_five_jobs_lose_none(stage: Stage) -> None:
    stage.worker("-c", "2", "--max-tasks-per-child", "5")
    ids = stage.send_many(60, "work")
    stage.wait_all(ids)
    check_each_ran_once(stage, ids)
    per_process = Counter(line.pid for line in stage.journal("begin"))
    assert max(per_process.values()) <= 5


def test_processes_forked_while_threads_write_the_log_run_their_jobs(stage: Stage) -> None:
    stage.worker("-c", "2", "--max-tasks-per-child", "1", "-I", "tests.celery.apps_chatter")
    ids = stage.send_many(12, "work")
    stage.wait_all(ids)
    check_each_ran_once(stage, ids)


def test_processes_that_start_slowly_keep_no_job_from_running(stage: Stage) -> None:
    times = {"RELATA_LEASE_DURATION": "1.5", "RELATA_HEARTBEAT_PERIOD": "0.5"}
    worker = stage.worker("-c", "1", "--max-tasks-per-child", "2", "-I", "tests.celery.apps_slow_start", env=times)
    ids = stage.send_many(6, "work")
    stage.wait_all(ids)
    check_each_ran_once(stage, ids)
    assert "was given back: reserved" in worker.log
    assert "SoftTimeLimitExceeded" not in worker.log


def test_a_plain_tasks_soft_limit_holds_before_and_after_a_job_of_the_same_process(stage: Stage) -> None:
    stage.worker("-c", "1")
    for _ in range(2):
        result = stage.app.tasks["recovery.plain_sleep"].apply_async((20,), soft_time_limit=1)
        assert result.get(timeout=30) == "soft limit"
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_the_workers_own_signals_stay_celerys(stage: Stage, pool: str) -> None:
    worker = stage.worker("-P", pool, "-c", "1")
    for _ in range(2):
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)
        before = worker.log.count("MainThread")
        worker.signal(signal.SIGUSR1)  # Celery's: the stacks of all threads, into the log
        wait_until(lambda: worker.log.count("MainThread") > before, 20, "the stacks are shown")  # noqa: B023
    assert worker.terminate() == 0


def test_an_autoscaled_pool_grows_with_the_jobs_that_wait(stage: Stage) -> None:
    worker = stage.worker("--autoscale", "4,1")
    assert len(worker.children()) == 1
    ids = stage.send_many(40, "work", 0.3)
    wait_until(lambda: len(worker.children()) >= 3, 30, "the pool has grown")
    stage.wait_all(ids)
    check_each_ran_once(stage, ids)
    assert len({line.pid for line in stage.journal("begin")}) >= 3
