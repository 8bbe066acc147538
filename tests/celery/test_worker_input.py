"""Messages that something is wrong with, in the worker's parent: each ends its job, none costs a slot."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from relata_celery.domain.job import ErrorClass, JobState
from tests.celery.apps_recovery import Stage

POOLS = {"prefork": ("-c", "2"), "threads": ("-P", "threads", "-c", "2"), "solo": ("-P", "solo")}


@pytest.mark.parametrize("pool", list(POOLS))
def test_stamps_that_are_none_fail_their_job_and_cost_no_slot(database_uri: str, tmp_path: Path, pool: str) -> None:
    with Stage(database_uri, tmp_path) as stage:
        worker = stage.worker(*POOLS[pool])
        broken = stage.send_many(5, "work", headers={"stamped_headers": 5})
        for job_id in broken:
            job = stage.wait_state(job_id, JobState.FAILED)
            assert (job.error_class, job.attempts) == (ErrorClass.PERMANENT, 1)
            assert "TypeError" in str(job.error)
        for job_id in stage.send_many(4, "work"):
            stage.wait_state(job_id, JobState.SUCCEEDED)
        inspect = stage.app.control.inspect(timeout=10, limit=1)
        assert list((inspect.reserved() or {}).values()) == [[]]
        assert list((inspect.active() or {}).values()) == [[]]
        assert worker.terminate() == 0


def nested(depth: int) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(depth), 1)


def test_arguments_that_are_nested_too_deep_fail_their_job(database_uri: str, tmp_path: Path) -> None:
    with Stage(database_uri, tmp_path) as stage:
        stage.worker("-c", "2")
        for job_id in [stage.send("work", nested(900)) for _ in range(3)]:
            job = stage.wait_state(job_id, JobState.FAILED)
            assert (job.error_class, job.attempts) == (ErrorClass.PERMANENT, 1)
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)
