"""Cancelled by hand: a queued job never runs, a running one is stopped, and its slot serves the next job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relata_celery.domain.job import JobState
from tests.celery.apps_recovery import Stage


@pytest.fixture
def stage(database_uri: str, tmp_path: Path) -> Iterator[Stage]:
    with Stage(database_uri, tmp_path) as stage:
        yield stage


def test_a_job_cancelled_while_queued_never_runs_whichever_worker_starts(stage: Stage) -> None:
    cancelled = stage.send("work")
    assert stage.store.cancel(cancelled)[cancelled].changed
    for name in ("w1", "w2"):
        worker = stage.worker("-c", "1", name=name)
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)
        worker.kill_group()
    assert stage.job(cancelled).state is JobState.CANCELLED
    assert not stage.journal("begin", cancelled)


def test_a_job_cancelled_behind_a_running_one_never_runs(stage: Stage) -> None:
    stage.worker("-c", "1")
    running = stage.send("hold", "gate")
    stage.wait_line("begin", running)
    cancelled, next_one = stage.send("work"), stage.send("work")
    assert stage.store.cancel(cancelled)[cancelled].changed
    stage.open_gate("gate")
    stage.wait_state(next_one, JobState.SUCCEEDED)
    assert stage.job(cancelled).state is JobState.CANCELLED
    assert not stage.journal("begin", cancelled)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_running_job_that_is_cancelled_is_stopped_and_the_worker_goes_on(stage: Stage, pool: str) -> None:
    stage.worker("-c", "1", "-P", pool)
    cancelled = stage.send("hold", "never")
    stage.wait_line("begin", cancelled)
    next_one = stage.send("work")
    assert stage.store.cancel(cancelled)[cancelled].changed

    stage.wait_state(next_one, JobState.SUCCEEDED, 20)  # the only slot is free again
    (stopped,) = stage.journal("stopped", cancelled)
    assert stopped.what == "stopped:JobCancelled"
    assert stage.job(cancelled).state is JobState.CANCELLED
    assert stage.outcomes(cancelled) == ["cancelled"]
    assert not stage.journal("end", cancelled)
    assert not stage.journal("on_success", cancelled)


def test_a_running_job_that_does_not_listen_is_killed_after_its_grace(stage: Stage) -> None:
    stage.worker("-c", "1")
    deaf = stage.send("turn_a_deaf_ear")
    (begun,) = stage.wait_line("begin", deaf)
    next_one = stage.send("work")
    assert stage.store.cancel(deaf)[deaf].changed

    stage.wait_state(next_one, JobState.SUCCEEDED, 20)
    (other,) = stage.journal("begin", next_one)
    assert other.pid != begun.pid
    assert len(stage.journal("swallowed", deaf)) == 1
    assert stage.job(deaf).state is JobState.CANCELLED
    assert stage.outcomes(deaf) == ["cancelled"]


def test_terminating_a_job_that_is_about_to_end_never_hits_the_next_one_of_its_process(stage: Stage) -> None:
    stage.worker("-c", "1")
    for turn in range(20):
        victim, neighbour = stage.send("work", 0.05), stage.send("work", 0.05)
        stage.wait_line("begin", victim)
        time.sleep(0.005 * turn)  # from its middle to well into the next one
        stage.app.control.revoke(victim, terminate=True, signal="SIGKILL")
        stage.wait_state(neighbour, JobState.SUCCEEDED)
        assert (stage.job(neighbour).attempts, len(stage.journal("begin", neighbour))) == (1, 1)
        assert stage.job(victim).state in (JobState.SUCCEEDED, JobState.CANCELLED)
