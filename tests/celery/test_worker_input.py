"""Messages that something is wrong with, in the worker's parent: each ends its job, none costs a slot."""

from __future__ import annotations

from pathlib import Path

import pytest

from relata_celery.domain.job import ErrorClass, JobState
from relata_celery.store.client import connect
from tests.celery.apps_recovery import Stage
from tests.waiting import wait_until

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


def edit(stage: Stage, job_id: str, **fields: object) -> None:
    changed = connect(stage.uri).collection("relata_jobs").update_one({"_id": job_id}, {"$set": fields})
    assert changed.modified_count == 1


def test_arguments_that_are_nested_too_deep_fail_their_job(database_uri: str, tmp_path: Path) -> None:
    with Stage(database_uri, tmp_path) as stage:
        broken = stage.send_many(3, "work")
        for job_id in broken:
            edit(stage, job_id, **{"message.body": "[" * 200_000 + "]" * 200_000})
        stage.worker("-c", "2")
        for job_id in broken:
            job = stage.wait_state(job_id, JobState.FAILED)
            assert (job.error_class, job.attempts) == (ErrorClass.PERMANENT, 1)
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)


@pytest.mark.parametrize("compression", ["nope", "zlib", 5], ids=str)
def test_a_body_that_cannot_be_unpacked_fails_its_job(
    database_uri: str, tmp_path: Path, compression: object
) -> None:
    with Stage(database_uri, tmp_path) as stage:
        broken = stage.send("work")
        edit(stage, broken, **{"message.headers.compression": compression})
        stage.worker("-c", "1")
        job = stage.wait_state(broken, JobState.FAILED)
        assert (job.error_class, job.attempts) == (ErrorClass.PERMANENT, 1)
        assert "cannot be decoded" in str(job.error)
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)


def test_an_id_that_is_an_object_stops_no_worker(database_uri: str, tmp_path: Path) -> None:
    with Stage(database_uri, tmp_path) as stage:
        jobs = connect(stage.uri).collection("relata_jobs")
        made = jobs.find_one({"_id": stage.send("work")})
        assert made is not None
        for odd in ({"a": 1}, 7):
            jobs.insert_one({**made, "_id": odd})
        lost = {"state": "running", "lease": {"owner": "gone", "until": made["run_at"]}, "attempts": 9}
        jobs.insert_one({**made, **lost, "_id": {"b": 1}})
        jobs.insert_one({**made, **lost, "_id": "lost", "attempts": 1})
        stage.worker("-c", "1")
        for job_id in ("lost", made["_id"]):
            stage.wait_state(job_id, JobState.SUCCEEDED)
        wait_until(lambda: jobs.count_documents({"state": "failed"}) == 3, 30, "the odd ones have failed")
