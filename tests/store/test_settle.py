"""Settling: each ending writes what it must, once, and only for who holds the claim."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from relata_celery.domain.job import AttemptOutcome, Claim, ErrorClass, Job, JobState
from relata_celery.domain.outcome import Encoded, ErrorInfo
from relata_celery.store.client import Database
from relata_celery.store.jobs import Jobs
from tests.store.builders import (
    LEASE_S,
    another_try,
    claim_one,
    claimed,
    document,
    edit,
    expire_lease,
    failure,
    new_job,
    release,
    settlement,
    snooze,
    success,
)


def read(jobs: Jobs, job_id: str) -> Job:
    job = jobs.get(job_id)
    assert job is not None
    return job


def test_a_success_keeps_its_result_and_no_error(jobs: Jobs, store: Database) -> None:
    first = claimed(jobs)
    jobs.record_progress(first.claim, 0.5, "half")
    jobs.settle([another_try(first)])
    assert read(jobs, first.claim.id).error == "not yet"
    jobs.settle([success(claim_one(jobs), '"done"', retention_s=60.0, duration_ms=17)])
    job = read(jobs, first.claim.id)
    assert (job.state, job.result, job.attempts) == (JobState.SUCCEEDED, "done", 2)
    assert (job.error, job.error_class, job.lease) == (None, None, None)
    assert "exception" not in job.extra
    assert job.progress is not None
    assert job.finished_at is not None
    assert job.expire_at is not None
    assert (job.expire_at - job.finished_at).total_seconds() == 60.0
    assert [(entry.number, entry.fence, entry.outcome) for entry in job.history] == [
        (1, 1, AttemptOutcome.RETRIED),
        (2, 2, AttemptOutcome.SUCCEEDED),
    ]
    assert job.history[0].error == "not yet"
    assert job.history[1].duration_ms == 17
    assert job.history[1].ended_at == job.finished_at
    assert job.history[0].duration_ms >= 0


def test_a_failure_keeps_error_class_exception_and_followups_and_may_be_kept_for_ever(jobs: Jobs) -> None:
    job = claimed(jobs)
    error = ErrorInfo(ErrorClass.INVALID, "bad shape", "InvalidOutputError", "relata", '["x"]', "m:f:1")
    jobs.settle([settlement(job, JobState.FAILED, AttemptOutcome.FAILED, error=error, followups=({"a": 1},))])
    ended = read(jobs, job.claim.id)
    assert (ended.state, ended.error, ended.error_class) == (JobState.FAILED, "bad shape", ErrorClass.INVALID)
    assert ended.extra["exception"] == {
        "type": "InvalidOutputError",
        "module": "relata",
        "args_json": '["x"]',
        "traceback": "m:f:1",
    }
    assert ended.followups == ({"a": 1},)
    assert ended.expire_at is None
    assert ended.history[0].error_class is ErrorClass.INVALID


def test_a_retry_waits_for_its_delay_by_the_servers_clock(jobs: Jobs) -> None:
    job = claimed(jobs, max_attempts=2)
    jobs.settle([another_try(job, delay_s=100.0)])
    queued = read(jobs, job.claim.id)
    assert (queued.state, queued.attempts, queued.fence, queued.lease) == (JobState.QUEUED, 1, 1, None)
    assert (queued.run_at - queued.history[0].ended_at).total_seconds() == 100.0
    assert queued.expire_at is None


def test_a_snooze_and_a_release_give_the_attempt_back_and_only_the_snooze_is_recorded(jobs: Jobs) -> None:
    job = claimed(jobs)
    jobs.settle([snooze(job)])
    jobs.settle([release(claim_one(jobs))])
    again = claim_one(jobs)
    assert (again.attempt, again.snoozes, again.claim.fence) == (1, 1, 3)
    assert [entry.outcome for entry in read(jobs, job.claim.id).history] == [AttemptOutcome.SNOOZED]


def test_how_long_a_job_was_put_off_adds_up_until_it_is_retried_by_hand(jobs: Jobs) -> None:
    job = claimed(jobs)
    for delay_s in (0.0, 90.0):
        jobs.settle([replace(snooze(job), delay_s=delay_s)])
        edit(jobs.database, job.claim.id, run_at=datetime(2020, 1, 1, tzinfo=timezone.utc))
        job = claim_one(jobs)
    assert job.snoozed_s == 91.0, "a snooze of no time counts as a second"
    jobs.settle([failure(job)])
    assert jobs.retry(job.claim.id)
    assert claim_one(jobs).snoozed_s == 0.0


def test_a_replacement_takes_message_type_and_max_attempts_and_counts_anew(jobs: Jobs) -> None:
    job = claimed(jobs)
    new_message = {"body": "new", "headers": {"$x": 1}}
    jobs.settle(
        [
            settlement(
                job, JobState.QUEUED, None, restart=True, message=new_message, type="other", max_attempts=9
            )
        ]
    )
    again = claim_one(jobs)
    assert (again.message, again.type, again.max_attempts, again.attempt) == (new_message, "other", 9, 1)


def test_an_ignored_success_says_so_and_keeps_no_result(jobs: Jobs) -> None:
    job = claimed(jobs)
    jobs.settle([settlement(job, JobState.SUCCEEDED, AttemptOutcome.SUCCEEDED, ignored=True)])
    ended = read(jobs, job.claim.id)
    assert ended.result is None
    assert ended.extra == {"ignored": True}


def test_bytes_and_text_results_are_kept_apart(jobs: Jobs, store: Database) -> None:
    job = claimed(jobs)
    encoded = Encoded("application/octet-stream", "binary", b"\x00\xff")
    jobs.settle([settlement(job, JobState.SUCCEEDED, AttemptOutcome.SUCCEEDED, result=encoded)])
    assert document(store, job.claim.id)["result"] == {
        "content_type": "application/octet-stream",
        "content_encoding": "binary",
        "body": b"\x00\xff",
    }


def test_a_mixed_batch_gets_each_its_own_values_and_verdicts_in_order(jobs: Jobs) -> None:
    jobs.enqueue([new_job(f"{n}") for n in range(12)])
    taken = jobs.claim(["default"], 12, "w1", LEASE_S)
    batch = [success(job, f'"{job.claim.id}"', duration_ms=n) for n, job in enumerate(taken[:5])]
    batch += [failure(job, f"error {job.claim.id}") for job in taken[5:8]]
    batch += [
        another_try(job, f"later {job.claim.id}", delay_s=float(n)) for n, job in enumerate(taken[8:11])
    ]
    batch += [settlement(taken[11], JobState.SUCCEEDED, AttemptOutcome.SUCCEEDED, delete=True)]
    zombie = Claim(taken[2].claim.id, 7, "w9")
    batch.insert(3, success(taken[2], "9").__class__(zombie, JobState.SUCCEEDED, AttemptOutcome.SUCCEEDED, 1))
    verdicts = jobs.settle(batch)
    assert [verdict.claim for verdict in verdicts] == [one.claim for one in batch]
    assert [verdict.accepted for verdict in verdicts] == [one.claim != zombie for one in batch]
    for n, job in enumerate(taken[:5]):
        assert read(jobs, job.claim.id).result == job.claim.id
        assert read(jobs, job.claim.id).history[0].duration_ms == n
    assert [read(jobs, job.claim.id).error for job in taken[5:8]] == [
        f"error {job.claim.id}" for job in taken[5:8]
    ]
    for n, job in enumerate(taken[8:11]):
        queued = read(jobs, job.claim.id)
        assert (queued.run_at - queued.history[0].ended_at).total_seconds() == n
    assert jobs.get(taken[11].claim.id) is None


# ---------------------------------------------------------------- fences


def test_a_settle_repeated_after_a_lost_answer_is_accepted_and_written_once(jobs: Jobs) -> None:
    jobs.enqueue([new_job(f"{n}") for n in range(5)])
    makers: list[Any] = [success, failure, another_try, snooze, release]
    taken = jobs.claim(["default"], 5, "w1", LEASE_S)
    batch = [make(job) for make, job in zip(makers, taken, strict=True)]
    first = jobs.settle(batch)
    before = {job.id: job for job in jobs.find()}
    assert jobs.settle(batch) == first
    assert all(verdict.accepted for verdict in first)
    assert {job.id: job for job in jobs.find()} == before


def test_a_repeated_settle_is_accepted_also_after_the_job_went_on(jobs: Jobs) -> None:
    job = claimed(jobs)
    jobs.settle([another_try(job)])
    claim_one(jobs, "w2")
    assert jobs.settle([another_try(job)])[0].accepted
    assert not jobs.settle([success(job)])[0].accepted


def test_a_zombie_is_told_who_holds_the_job_and_writes_nothing(jobs: Jobs, store: Database) -> None:
    zombie = claimed(jobs)
    expire_lease(store, zombie.claim.id)
    jobs.reap(1, None)
    (verdict,) = jobs.settle([success(zombie)])
    assert (verdict.accepted, verdict.reason) == (
        False,
        "job was reaped: its lease had expired (now queued, fence 1)",
    )
    claim_one(jobs, "w2")
    before = document(store, zombie.claim.id)
    (verdict,) = jobs.settle([success(zombie)])
    assert not verdict.accepted
    assert verdict.reason is not None
    assert verdict.reason.startswith("job is held by w2 since 20")
    assert verdict.reason.endswith("(fence 2)")
    assert document(store, zombie.claim.id) == before


@pytest.mark.parametrize(
    ("end", "reason"),
    [("cancel", "job was cancelled"), ("delete", "job was removed"), ("settle", "job is failed (fence 1)")],
)
def test_what_ended_without_the_zombie_is_named(jobs: Jobs, end: str, reason: str) -> None:
    job = claimed(jobs)
    if end == "settle":
        jobs.settle([failure(job)])
    else:
        getattr(jobs, end)([job.claim.id])
    assert jobs.settle([success(job)])[0].reason == reason


def test_two_ends_of_one_attempt_in_one_batch_leave_one_accepted(jobs: Jobs) -> None:
    job = claimed(jobs)
    verdicts = jobs.settle([success(job), failure(job)])
    assert sorted(verdict.accepted for verdict in verdicts) == [False, True]
    assert len(read(jobs, job.claim.id).history) == 1


def test_an_old_and_a_new_claim_of_one_job_in_one_batch_are_told_apart(jobs: Jobs, store: Database) -> None:
    old = claimed(jobs)
    expire_lease(store, old.claim.id)
    jobs.reap(1, None)
    new = claim_one(jobs)
    verdicts = jobs.settle([success(old, '"old"'), success(new, '"new"')])
    assert [verdict.accepted for verdict in verdicts] == [False, True]
    assert read(jobs, old.claim.id).result == "new"


# ---------------------------------------------------------------- what cannot be stored


@pytest.mark.parametrize("body", ["\ud800", "x" * 17_000_000], ids=["surrogate", "17 MB"])
def test_an_outcome_that_cannot_be_stored_is_said_to_be_so_and_the_others_are_written(jobs: Jobs, body: str) -> None:
    jobs.enqueue([new_job("bad", priority=9), new_job("good")])
    bad, good = jobs.claim(["default"], 2, "w1", LEASE_S)
    refused, accepted = jobs.settle([success(bad, body), success(good)])
    assert accepted.accepted
    assert (refused.accepted, refused.unstorable, accepted.unstorable) == (False, True, False)
    assert "the outcome cannot be stored" in (refused.reason or "")
    assert (read(jobs, "bad").state, read(jobs, "bad").history) == (JobState.RUNNING, ())
    assert jobs.settle([failure(bad)])[0].accepted


def test_an_outcome_too_large_beside_its_message_is_said_to_be_so_and_the_others_are_written(jobs: Jobs) -> None:
    jobs.enqueue([new_job("bad", priority=9, message={"body": "x" * 9_000_000}), new_job("good")])
    bad, good = jobs.claim(["default"], 2, "w1", LEASE_S)
    refused, accepted = jobs.settle([success(bad, "y" * 9_000_000), success(good)])
    assert (refused.accepted, refused.unstorable, accepted.accepted) == (False, True, True)
    assert read(jobs, "bad").state is JobState.RUNNING


def test_large_results_of_one_batch_are_all_stored(jobs: Jobs) -> None:
    jobs.enqueue([new_job(f"{n}") for n in range(6)])
    taken = jobs.claim(["default"], 6, "w1", LEASE_S)
    assert all(
        verdict.accepted
        for verdict in jobs.settle([success(job, '"' + "x" * 3_500_000 + '"') for job in taken])
    )


def test_a_running_job_edited_into_nonsense_can_still_be_settled(jobs: Jobs, store: Database) -> None:
    job = claimed(jobs)
    edit(store, job.claim.id, history="x", history_skipped="y", attempts=None, started_at=3, snoozes=[])
    assert jobs.settle([snooze(job)])[0].accepted
    found = document(store, job.claim.id)
    assert (found["snoozes"], found["attempts"], found["history"][0]["duration_ms"]) == (1, 0, 0)


# ---------------------------------------------------------------- history


def test_history_keeps_the_first_five_and_the_newest_45_and_counts_the_rest(jobs: Jobs) -> None:
    jobs.enqueue([new_job("a")])
    for _ in range(53):
        jobs.settle([snooze(claim_one(jobs))])
    job = read(jobs, "a")
    assert [entry.fence for entry in job.history] == [1, 2, 3, 4, 5, *range(9, 54)]
    assert (job.history_skipped, job.snoozes, job.attempts) == (3, 53, 0)
    jobs.cancel(["a"])
    assert len(read(jobs, "a").history) == 50


def test_a_longer_history_made_by_hand_is_cut_and_counted(jobs: Jobs, store: Database) -> None:
    job = claimed(jobs)
    edit(store, job.claim.id, history=[{"number": n} for n in range(70)])
    jobs.settle([another_try(job)])
    found = document(store, job.claim.id)
    assert len(found["history"]) == 50
    assert found["history_skipped"] == 21
