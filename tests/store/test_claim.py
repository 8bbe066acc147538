"""Claiming, renewing and reaping: who may run a job, until when, and what becomes of it when they do not."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import bson
import pytest

from relata_celery.domain.backoff import backoff_s
from relata_celery.domain.job import AttemptOutcome, Claim, ErrorClass, JobState
from relata_celery.domain.outcome import Reaped
from relata_celery.store.client import Database
from relata_celery.store.codec import MAX_DOCUMENT_BYTES
from relata_celery.store.jobs import Jobs
from tests.store.builders import (
    LEASE_S,
    another_try,
    claim_one,
    claimed,
    document,
    edit,
    expire_lease,
    new_job,
    success,
)


def test_jobs_come_by_priority_then_by_due_time_over_all_queues(jobs: Jobs, store: Database) -> None:
    jobs.enqueue(
        [
            new_job("low"),
            new_job("high", priority=9, queue="ai"),
            new_job("older"),
            new_job("elsewhere", queue="x"),
        ]
    )
    store.collection("relata_jobs").update_one(
        {"_id": "older"}, [{"$set": {"run_at": {"$subtract": ["$$NOW", 5000]}}}]
    )
    taken = jobs.claim(["default", "ai"], 10, "w1", LEASE_S)
    assert [job.claim.id for job in taken] == ["high", "older", "low"]
    assert taken[0].claim == Claim("high", 1, "w1")
    assert (taken[0].attempt, taken[0].max_attempts, taken[0].queue) == (1, 5, "ai")


def test_a_job_is_not_claimed_before_it_is_due(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job("a", delay_s=3600.0)])
    assert jobs.claim(["default"], 1, "w1", LEASE_S) == []
    assert jobs.claim_by_id("a", ["default"], "w1", LEASE_S) is None
    store.collection("relata_jobs").update_one({"_id": "a"}, [{"$set": {"run_at": "$$NOW"}}])
    assert claim_one(jobs).claim.id == "a"


def test_a_job_can_be_claimed_by_its_id_once(jobs: Jobs) -> None:
    jobs.enqueue([new_job("a"), new_job("b")])
    job = jobs.claim_by_id("b", ["default"], "w1", LEASE_S)
    assert job is not None
    assert job.claim == Claim("b", 1, "w1")
    assert jobs.claim_by_id("b", ["default"], "w2", LEASE_S) is None
    assert jobs.claim_by_id("nobody", ["default"], "w2", LEASE_S) is None
    assert jobs.claim_by_id("a", ["elsewhere"], "w2", LEASE_S) is None


def test_a_claim_by_id_leaves_a_document_that_is_no_job_to_the_claim_that_says_so(jobs: Jobs, store: Database) -> None:
    for field, value in [("fence", "7"), ("attempts", None), ("max_attempts", 2.5), ("type", 3), ("message", "x")]:
        jobs.enqueue([new_job(field)])
        edit(store, field, **{field: value})
        assert jobs.claim_by_id(field, ["default"], "w1", LEASE_S) is None
    assert jobs.claim(["default"], 10, "w1", LEASE_S) == []
    assert jobs.count(states=[JobState.FAILED]) == 5


def test_a_claim_writes_lease_fence_and_attempt_by_the_servers_clock(jobs: Jobs, store: Database) -> None:
    job = claimed(jobs)
    found = document(store, job.claim.id)
    assert (found["state"], found["fence"], found["attempts"]) == ("running", 1, 1)
    assert found["lease"]["owner"] == "w1"
    assert (found["lease"]["until"] - found["started_at"]).total_seconds() == LEASE_S
    assert job.claimed_at <= found["started_at"]


def test_a_job_whose_time_to_start_has_passed_is_claimed_as_expired(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job("late"), new_job("early")])
    for job_id, offset_ms in (("late", -1), ("early", 60_000)):
        moment = [{"$set": {"expires_at": {"$add": ["$$NOW", offset_ms]}}}]
        store.collection("relata_jobs").update_one({"_id": job_id}, moment)
    assert {job.claim.id: job.expired for job in jobs.claim(["default"], 2, "w1", LEASE_S)} == {
        "late": True,
        "early": False,
    }


def test_jobs_under_different_fences_are_claimed_together(jobs: Jobs) -> None:
    jobs.enqueue([new_job(f"{n}") for n in range(4)])
    for _ in range(3):
        jobs.settle([another_try(job) for job in jobs.claim(["default"], 2, "w1", LEASE_S)])
    taken = jobs.claim(["default"], 10, "w1", LEASE_S)
    assert len(taken) == 4
    assert len({job.claim.fence for job in taken}) > 1
    assert jobs.renew([job.claim for job in taken], LEASE_S) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"message": None},
        {"message": "text"},
        {"attempts": "two"},
        {"attempts": 1.5},
        {"fence": "x"},
        {"max_attempts": []},
        {"type": 5},
    ],
)
def test_a_job_that_cannot_be_read_is_failed_and_the_rest_is_claimed(
    jobs: Jobs, store: Database, fields: dict[str, Any]
) -> None:
    jobs.enqueue([new_job("bad", priority=9), new_job("good")])
    edit(store, "bad", **fields)
    assert [job.claim.id for job in jobs.claim(["default"], 5, "w1", LEASE_S)] == ["good"]
    bad = document(store, "bad")
    assert (bad["state"], bad["error_class"]) == ("failed", "permanent")
    assert bad["error"].startswith(f"job document cannot be read: {next(iter(fields))} is ")
    assert bad["expire_at"] > bad["finished_at"]


def test_a_job_under_an_id_of_another_type_is_failed(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job("good")])
    odd = document(store, "good") | {"_id": 5, "priority": 9, "rank": 0}
    store.collection("relata_jobs").insert_one(odd)
    assert [job.claim.id for job in jobs.claim(["default"], 5, "w1", LEASE_S)] == ["good"]
    found = store.collection("relata_jobs").find_one({"_id": 5})
    assert found is not None
    assert found["state"] == "failed"


def test_a_job_too_large_to_be_claimed_is_failed_and_the_rest_is_claimed(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job("one"), new_job("full"), new_job("two")])
    edit(store, "full", message={"body": ""})
    room = MAX_DOCUMENT_BYTES - len(bson.encode(document(store, "full")))
    edit(store, "full", message={"body": "x" * room})
    taken = jobs.claim(["default"], 5, "w1", LEASE_S)
    assert {job.claim.id for job in taken} == {"one", "two"}
    assert all(verdict.accepted for verdict in jobs.settle([success(job) for job in taken]))
    assert document(store, "full")["state"] == "failed"


def test_a_finished_job_queued_by_a_bare_edit_is_not_pruned_while_it_runs(
    jobs: Jobs, store: Database
) -> None:
    job = claimed(jobs)
    jobs.settle([success(job, retention_s=1000.0)])
    edit(store, job.claim.id, state="queued")
    claim_one(jobs)
    assert "expire_at" not in document(store, job.claim.id)


# ---------------------------------------------------------------- renew


def test_a_renewal_pushes_all_leases_and_names_each_lost_one(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job(name) for name in ("kept", "cancelled", "asked", "removed", "moved")])
    taken = {job.claim.id: job.claim for job in jobs.claim(["default"], 5, "w1", LEASE_S)}
    before = document(store, "kept")["lease"]["until"]
    jobs.cancel(["cancelled"])
    edit(store, "asked", cancel_requested=True)
    jobs.delete(["removed"])
    expire_lease(store, "moved")
    jobs.reap(10, None)
    jobs.claim_by_id("moved", ["default"], "w2", LEASE_S)
    losses = {loss.claim.id: loss for loss in jobs.renew(list(taken.values()), 2 * LEASE_S)}
    assert document(store, "kept")["lease"]["until"] > before
    assert set(losses) == {"cancelled", "asked", "removed", "moved"}
    assert {name for name, loss in losses.items() if loss.cancelled} == {"cancelled", "asked"}
    assert losses["cancelled"].reason == "job was cancelled"
    assert losses["removed"].reason == "job was removed"
    assert losses["moved"].reason.startswith("job is held by w2 since 20")
    assert losses["moved"].reason.endswith("(fence 2)")


def test_an_old_claim_of_the_same_worker_does_not_renew_its_new_one(jobs: Jobs, store: Database) -> None:
    old = claimed(jobs)
    jobs.settle([another_try(old)])
    new = claim_one(jobs)
    losses = jobs.renew([old.claim, new.claim], LEASE_S)
    assert [loss.claim for loss in losses] == [old.claim]


def test_a_lease_that_ran_out_but_was_not_reaped_can_be_renewed(jobs: Jobs, store: Database) -> None:
    job = claimed(jobs)
    expire_lease(store, job.claim.id)
    assert jobs.renew([job.claim], LEASE_S) == []
    assert jobs.reap(10, None) == []


def test_progress_is_written_only_by_the_holder(jobs: Jobs, store: Database) -> None:
    job = claimed(jobs)
    assert jobs.record_progress(job.claim, 0.5, None)
    assert not jobs.record_progress(Claim(job.claim.id, job.claim.fence + 1, "w1"), 0.9, "zombie")
    assert not jobs.record_progress(Claim(job.claim.id, job.claim.fence, "w2"), 0.9, "zombie")
    jobs.settle([success(job)])
    assert not jobs.record_progress(job.claim, 0.9, "late")
    assert document(store, job.claim.id)["progress"]["fraction"] == 0.5


# ---------------------------------------------------------------- reap


def test_reaping_requeues_while_attempts_are_left_fails_after_them_and_cancels_when_asked(
    jobs: Jobs, store: Database
) -> None:
    jobs.enqueue([new_job("left"), new_job("none", max_attempts=1), new_job("asked"), new_job("alive")])
    jobs.claim(["default"], 4, "w1", LEASE_S)
    edit(store, "asked", cancel_requested=True)
    for job_id in ("left", "none", "asked"):
        expire_lease(store, job_id)
    reaped = {job.id: job for job in jobs.reap(10, 100.0)}
    assert {name: job.state for name, job in reaped.items()} == {
        "left": JobState.QUEUED,
        "none": JobState.FAILED,
        "asked": JobState.CANCELLED,
    }
    assert (reaped["left"].owner, reaped["left"].fence, reaped["left"].attempt) == ("w1", 1, 1)
    assert reaped["none"].message is not None
    none, left = jobs.get("none"), jobs.get("left")
    assert none is not None
    assert left is not None
    assert (none.error, none.error_class) == ("lease expired", ErrorClass.TRANSIENT)
    assert none.finished_at is not None
    assert none.expire_at is not None
    assert (none.expire_at - none.finished_at).total_seconds() == 100.0
    (entry,) = none.history
    assert (entry.outcome, entry.error, entry.worker) == (AttemptOutcome.LEASE_EXPIRED, "lease expired", "w1")
    assert (left.attempts, left.lease, left.expire_at) == (1, None, None)
    assert document(store, "alive")["state"] == "running"
    assert jobs.reap(10, 100.0) == []


def test_a_running_job_edited_into_nonsense_is_reaped_with_the_others(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job("odd"), new_job("good")])
    jobs.claim(["default"], 2, "w1", LEASE_S)
    expire_lease(store, "good")
    edit(
        store,
        "odd",
        lease="mine",
        history=5,
        attempts="x",
        started_at="y",
        max_attempts=None,
        message=3,
        type=1,
    )
    assert {job.id: job.state for job in jobs.reap(10, None)} == {
        "odd": JobState.FAILED,
        "good": JobState.QUEUED,
    }


def test_a_job_that_loses_its_lease_again_and_again_waits_longer_each_time(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job("a", max_attempts=20)])
    waits = []
    for attempt in range(1, 10):
        edit(store, "a", run_at=datetime(2020, 1, 1, tzinfo=timezone.utc))
        assert jobs.claim(["default"], 1, "w1", LEASE_S)[0].attempt == attempt
        expire_lease(store, "a")
        assert [reaped.state for reaped in jobs.reap(10, None)] == [JobState.QUEUED]
        job = jobs.get("a")
        assert job is not None
        waits.append((job.run_at - job.history[-1].ended_at).total_seconds())
    assert waits[0] == 0
    for attempt, wait_s in enumerate(waits[1:], 2):
        assert backoff_s(attempt - 1, 0.0) <= wait_s <= backoff_s(attempt - 1, 1.0)


def test_reaping_takes_no_more_than_asked_and_the_longest_expired_first(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job(f"{n}") for n in range(3)])
    jobs.claim(["default"], 3, "w1", LEASE_S)
    for n in range(3):
        moment = [{"$set": {"lease.until": {"$subtract": ["$$NOW", 1000 * (n + 1)]}}}]
        store.collection("relata_jobs").update_one({"_id": f"{n}"}, moment)
    assert [job.id for job in jobs.reap(2, None)] == ["2", "1"]


def spent(jobs: Jobs, store: Database, *ids: str) -> None:
    """Jobs whose lease ran out at their last attempt."""
    jobs.enqueue([new_job(job_id, max_attempts=1) for job_id in ids])
    jobs.claim(["default"], len(ids), "w1", LEASE_S)
    for job_id in ids:
        expire_lease(store, job_id)


def test_what_a_failure_calls_for_is_written_with_it_and_asked_of_failing_jobs_only(
    jobs: Jobs, store: Database
) -> None:
    jobs.enqueue([new_job("left"), new_job("asked", max_attempts=1)])
    jobs.claim(["default"], 2, "w1", LEASE_S)
    edit(store, "asked", cancel_requested=True)
    for job_id in ("left", "asked"):
        expire_lease(store, job_id)
    spent(jobs, store, "a", "b", "c")
    asked: list[str] = []

    def called_for(job: Reaped) -> list[dict[str, str]]:
        asked.append(job.id)
        assert job.message is not None
        return [] if job.id == "c" else [{"after": job.id, "$dollar": "$x"}]

    reaped = {job.id: job for job in jobs.reap(10, None, called_for)}
    assert sorted(asked) == ["a", "b", "c"]
    for job_id in ("a", "b"):
        assert document(store, job_id)["followups"] == [{"after": job_id, "$dollar": "$x"}]
        assert reaped[job_id].followups == ({"after": job_id, "$dollar": "$x"},)
    for job_id in ("left", "asked", "c"):
        assert "followups" not in document(store, job_id)
    assert {job_id: job.state for job_id, job in reaped.items()} == {
        "a": JobState.FAILED, "b": JobState.FAILED, "c": JobState.FAILED,
        "left": JobState.QUEUED, "asked": JobState.CANCELLED,
    }  # fmt: skip


def test_a_reaper_that_comes_second_writes_and_reports_nothing(jobs: Jobs, store: Database) -> None:
    spent(jobs, store, "a")
    second: list[Reaped] = []

    def overtaken(job: Reaped) -> list[dict[str, str]]:
        second.extend(jobs.reap(10, None, lambda _job: [{"by": "the other"}]))
        return [{"by": "the first"}]

    assert jobs.reap(10, None, overtaken) == []
    assert [job.id for job in second] == ["a"]
    assert document(store, "a")["followups"] == [{"by": "the other"}]


def test_followups_that_cannot_be_stored_do_not_keep_a_job_from_being_reaped(jobs: Jobs, store: Database) -> None:
    spent(jobs, store, "huge", "odd", "fine")
    more = {"huge": "x" * 16_777_000, "odd": object(), "fine": "x"}
    reaped = {job.id: job for job in jobs.reap(10, None, lambda job: [{"body": more[job.id]}])}
    assert {job_id: (job.state, job.dropped) for job_id, job in reaped.items()} == {
        "huge": (JobState.FAILED, 1), "odd": (JobState.FAILED, 1), "fine": (JobState.FAILED, 0),
    }  # fmt: skip
    assert document(store, "fine")["followups"] == [{"body": "x"}]
