"""Publishing: one id is one job, one unique key is one unfinished job."""

from __future__ import annotations

from typing import Any

import pytest

from relata_celery.domain.errors import DuplicateJob, InvalidJob, StoreError
from relata_celery.domain.job import AttemptOutcome, ErrorClass, JobState, NewJob
from relata_celery.domain.outcome import ErrorInfo, never_run
from relata_celery.store.client import Database, connect
from relata_celery.store.jobs import Jobs
from tests.store.builders import (
    another_try,
    claim_one,
    document,
    edit,
    failure,
    new_job,
    settlement,
    success,
)


def test_an_empty_batch_of_anything_asks_no_server() -> None:
    jobs = Jobs(connect("mongodb://127.0.0.1:1/"))
    assert jobs.enqueue([]) == []
    assert jobs.claim([], 5, "w", 60.0) == []
    assert jobs.claim(["default"], 0, "w", 60.0) == []
    assert jobs.renew([], 60.0) == []
    assert jobs.settle([]) == []
    assert jobs.cancel([]) == {}
    assert jobs.retry([]) == {}
    assert jobs.delete([]) == 0
    assert jobs.publish([]) == []
    jobs.clear_followups([])
    assert jobs.next_due_in([]) is None


def test_publishing_an_id_again_is_the_same_job_whatever_became_of_it(jobs: Jobs) -> None:
    assert jobs.enqueue([new_job("a"), new_job("b")]) == [True, True]
    assert jobs.enqueue([new_job("b"), new_job("c"), new_job("c")]) == [False, True, False]
    job = claim_one(jobs)
    jobs.settle([success(job)])
    assert jobs.enqueue([new_job(job.claim.id, type="other")]) == [False]
    read = jobs.get(job.claim.id)
    assert read is not None
    assert (read.type, read.state) == ("t", JobState.SUCCEEDED)


def test_a_unique_key_is_held_until_the_job_is_finished(jobs: Jobs) -> None:
    jobs.enqueue([new_job("a", unique_key="k")])
    assert jobs.enqueue([new_job("a", unique_key="k")]) == [False]
    with pytest.raises(DuplicateJob) as caught:
        jobs.enqueue([new_job("b", unique_key="k"), new_job("c")])
    assert (caught.value.unique_key, caught.value.job_id) == ("k", "a")
    assert jobs.get("b") is None
    assert jobs.get("c") is not None
    jobs.delete("c")
    jobs.settle([another_try(claim_one(jobs))])
    with pytest.raises(DuplicateJob):
        jobs.enqueue([new_job("b", unique_key="k")])
    jobs.settle([failure(claim_one(jobs))])
    assert jobs.enqueue([new_job("b", unique_key="k")]) == [True]
    assert jobs.retry(["a"])["a"].reason == "another unfinished job holds its unique_key"
    jobs.cancel(["b"])
    assert jobs.retry(["a"])["a"].changed
    with pytest.raises(DuplicateJob):
        jobs.enqueue([new_job("d", unique_key="k")])


def test_followups_are_published_once_and_cleared(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job("first")])
    jobs.settle([success(claim_one(jobs), followups=({"id": "next"},))])
    assert document(store, "first")["followups"] == [{"id": "next"}]
    assert jobs.stuck_followups(10) == []
    store.collection("relata_jobs").update_one(
        {"_id": "first"}, [{"$set": {"finished_at": {"$subtract": ["$$NOW", 11_000]}}}]
    )
    assert jobs.stuck_followups(10) == [("first", ({"id": "next"},))]
    for _ in range(2):
        jobs.publish([new_job("next")])
        jobs.clear_followups(["first"])
    assert "followups" not in document(store, "first")
    assert jobs.stuck_followups(10) == []
    assert jobs.count(states=[JobState.QUEUED]) == 1


@pytest.mark.parametrize("kept", [None, False, 5, "x", {"a": 1}, [1, None]])
def test_followups_edited_by_hand_are_read_as_they_are_and_cleared(jobs: Jobs, store: Database, kept: Any) -> None:
    jobs.enqueue([new_job("first")])
    jobs.settle([success(claim_one(jobs))])
    edit(store, "first", followups=kept)
    store.collection("relata_jobs").update_one(
        {"_id": "first"}, [{"$set": {"finished_at": {"$subtract": ["$$NOW", 11_000]}}}]
    )
    assert jobs.stuck_followups(10) == [("first", tuple(kept) if isinstance(kept, list) else (kept,))]
    jobs.clear_followups(["first"])
    assert jobs.stuck_followups(10) == []


def waiting_step(job_id: str) -> NewJob:
    """A step that is on record as failed, because one before it failed."""
    error = ErrorInfo(ErrorClass.PERMANENT, "not run")
    return new_job(job_id, failure=never_run(error, None, replaceable=True))


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def test_each_job_of_a_batch_is_judged_by_itself(jobs: Jobs) -> None:
    jobs.enqueue([new_job("holder", unique_key="k"), waiting_step("kept"), waiting_step("refused"), new_job("known")])
    batch = [
        new_job("a", unique_key="k"),
        new_job("b", max_attempts=0),
        new_job("c", delay_s=1e30),
        new_job("d", message=nested(200)),
        new_job("refused", unique_key="k"),
        new_job("kept"),
        new_job("known"),
        new_job("fine"),
    ]
    *refused, kept, known, fine = jobs.publish(batch)
    assert [type(answer) for answer in refused] == [DuplicateJob, InvalidJob, InvalidJob, StoreError, DuplicateJob]
    assert {answer.job_id for answer in refused if isinstance(answer, DuplicateJob)} == {"holder"}
    assert (kept, known, fine) == (True, False, True)
    assert {job.id for job in jobs.find(states=[JobState.QUEUED])} == {"holder", "kept", "known", "fine"}
    assert jobs.publish(batch)[-3:] == [False, False, False]


def test_a_held_unique_key_keeps_no_other_of_its_batch_from_taking_its_place(jobs: Jobs) -> None:
    jobs.enqueue([new_job("holder", unique_key="k"), waiting_step("kept")])
    with pytest.raises(DuplicateJob):
        jobs.enqueue([new_job("a", unique_key="k"), new_job("kept")])
    assert jobs.count(states=[JobState.QUEUED]) == 2


def test_a_job_on_record_as_refused_keeps_what_follows_and_no_key_and_is_not_replaced(
    jobs: Jobs, store: Database
) -> None:
    error = ErrorInfo(ErrorClass.PERMANENT, "not published")
    failure = never_run(error, 60.0, replaceable=False, followups=[{"a": 1}])
    assert jobs.publish([waiting_step("x")]) == [True]
    assert jobs.publish([new_job("x", unique_key="k", failure=failure)]) == [True]
    assert jobs.publish([new_job("x", unique_key="k", failure=failure), new_job("x")]) == [False, False]
    read = jobs.get("x")
    assert read is not None
    assert (read.state, read.error, read.followups) == (JobState.FAILED, "not published", ({"a": 1},))
    assert read.expire_at is not None
    assert document(store, "x")["unique_key"] == "k"
    assert jobs.publish([new_job("y", unique_key="k")]) == [True]


def test_seconds_until_the_next_job_is_due(jobs: Jobs) -> None:
    assert jobs.next_due_in(["default"]) is None
    jobs.enqueue([new_job(delay_s=1000.0, priority=9), new_job(delay_s=500.0), new_job(queue="other")])
    wait_s = jobs.next_due_in([f"q{n}" for n in range(45)] + ["default"])
    assert wait_s is not None
    assert 400 < wait_s <= 500
    assert jobs.next_due_in(["other", "default"]) == 0.0


def test_a_plain_task_leaves_no_document(jobs: Jobs) -> None:
    jobs.enqueue([new_job("a")])
    (a,) = jobs.claim(["default"], 1, "w1", 60.0)
    gone = settlement(a, JobState.SUCCEEDED, AttemptOutcome.SUCCEEDED, delete=True)
    assert jobs.settle([gone])[0].accepted
    assert jobs.settle([gone])[0].accepted
    assert jobs.count() == 0


def test_a_field_of_another_version_is_kept(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job("a")])
    edit(store, "a", future={"x": 1})
    jobs.settle([success(claim_one(jobs))])
    read = jobs.get("a")
    assert read is not None
    assert read.extra == {"future": {"x": 1}}
