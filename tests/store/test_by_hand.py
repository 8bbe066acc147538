"""What a person does: look, cancel, retry, remove, count."""

from __future__ import annotations

from datetime import timedelta

import pytest

from relata_celery.domain.job import AttemptOutcome, ErrorClass, JobState
from relata_celery.store.client import Database
from relata_celery.store.jobs import Jobs
from relata_celery.store.stats import Stats
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
    success,
)


def test_cancelling_ends_queued_and_running_jobs_and_leaves_finished_ones(
    jobs: Jobs, store: Database
) -> None:
    running, finished = claimed(jobs), claimed(jobs)
    jobs.settle([success(finished)])
    jobs.enqueue([new_job("queued", unique_key="k")])
    changes = jobs.cancel(["queued", running.claim.id, finished.claim.id, "nobody"], 60.0, reason="$no")
    assert changes["queued"].before is JobState.QUEUED
    assert changes[running.claim.id].before is JobState.RUNNING
    assert changes[running.claim.id].changed
    assert not changes[finished.claim.id].changed
    assert changes[finished.claim.id].reason == "job is succeeded"
    assert (changes["nobody"].before, changes["nobody"].changed) == (None, False)
    stopped = jobs.get(running.claim.id)
    assert stopped is not None
    assert (stopped.state, stopped.error, stopped.error_class) == (
        JobState.CANCELLED,
        "$no",
        ErrorClass.CANCELLED,
    )
    (entry,) = stopped.history
    assert (entry.outcome, entry.worker, entry.fence, entry.error) == (
        AttemptOutcome.CANCELLED,
        "w1",
        1,
        "$no",
    )
    assert stopped.lease is None
    queued = document(store, "queued")
    assert "history" not in queued
    assert "unique_live" not in queued
    assert (queued["expire_at"] - queued["finished_at"]).total_seconds() == 60.0


def test_cancelled_jobs_are_kept_as_long_as_failed_ones_unless_said_otherwise(
    jobs: Jobs, store: Database
) -> None:
    jobs.enqueue([new_job("a")])
    assert jobs.cancel("a")["a"].changed
    found = document(store, "a")
    assert found["expire_at"] - found["finished_at"] == timedelta(hours=1)


@pytest.mark.parametrize("ending", ["retried", "released", "expired"])
def test_a_running_job_that_is_revoked_does_not_wait_again(ending: str, jobs: Jobs, store: Database) -> None:
    job = claimed(jobs, unique_key="k")
    jobs.revoke(job.claim.id)
    assert document(store, job.claim.id)["state"] == "running"
    if ending == "expired":
        expire_lease(store, job.claim.id)
        jobs.reap(10, 3600.0)
    else:
        assert jobs.settle([release(job) if ending == "released" else another_try(job)])[0].accepted
    found = document(store, job.claim.id)
    assert found["state"] == "cancelled"
    assert "unique_live" not in found
    assert found["expire_at"] - found["finished_at"] == timedelta(hours=1)
    assert jobs.retry(job.claim.id)[job.claim.id].changed
    jobs.settle([another_try(claim_one(jobs))])
    assert document(store, job.claim.id)["state"] == "queued"


def test_a_running_job_that_is_revoked_may_end(jobs: Jobs) -> None:
    job = claimed(jobs)
    jobs.revoke([job.claim.id, "nobody"])
    assert jobs.settle([success(job)])[0].accepted
    found = jobs.get(job.claim.id)
    assert found is not None
    assert found.state is JobState.SUCCEEDED


def test_retrying_queues_failed_and_cancelled_jobs_anew_under_the_old_fence(jobs: Jobs) -> None:
    job = claimed(jobs, max_attempts=1)
    jobs.settle([failure(job, retention_s=10.0)])
    jobs.enqueue([new_job("cancelled"), new_job("queued", queue="other")])
    jobs.cancel("cancelled")
    changes = jobs.retry([job.claim.id, "cancelled", "queued", "nobody"])
    assert {name: change.changed for name, change in changes.items()} == {
        job.claim.id: True,
        "cancelled": True,
        "queued": False,
        "nobody": False,
    }
    again = jobs.get(job.claim.id)
    assert again is not None
    assert (again.state, again.attempts, again.fence) == (JobState.QUEUED, 0, 1)
    assert (again.error, again.error_class, again.finished_at, again.expire_at) == (None, None, None, None)
    assert len(again.history) == 1
    assert again.extra == {}
    assert jobs.settle([success(job)])[0].accepted is False
    fences = {taken.claim.id: taken.claim.fence for taken in jobs.claim(["default"], 5, "w2", LEASE_S)}
    assert fences == {job.claim.id: 2, "cancelled": 1}


def test_jobs_are_found_by_everything_a_person_asks_for(jobs: Jobs) -> None:
    failed = claimed(jobs, job_id="f", type="report", queue="ai", item_id="doc-1", tags=("x", "y"))
    jobs.settle([failure(failed, "no (such) file")])
    jobs.enqueue([new_job("q1"), new_job("q2", tags=("y",))])

    def ids(**where: object) -> list[str]:
        found = [job.id for job in jobs.find(**where)]  # type: ignore[arg-type]
        assert jobs.count(**where) == len(found)  # type: ignore[arg-type]
        return found

    assert set(ids()) == {"f", "q1", "q2"}
    assert ids(states=[JobState.FAILED]) == ["f"]
    assert ids(types=["report"]) == ids(queues=["ai"]) == ids(item_id="doc-1") == ["f"]
    assert ids(error_class=ErrorClass.PERMANENT) == ids(text="(SUCH)") == ids(text="DOC-") == ["f"]
    assert set(ids(tag="y")) == {"f", "q2"}
    first = jobs.get("f")
    assert first is not None
    assert "f" in ids(created_since=first.created_at)
    assert ids(created_until=first.created_at) == []
    assert len(jobs.find(limit=1)) == 1
    assert jobs.find(sort="created_at", skip=2) != jobs.find(sort="created_at", limit=1)
    with pytest.raises(ValueError, match="cannot be sorted by 'body'"):
        jobs.find(sort="body")
    for page in ({"limit": 0}, {"skip": -1}, {"sort": "size"}):
        with pytest.raises(ValueError, match="is 0|is 100 and skip -1|cannot be sorted"):
            jobs.find(**page)


def test_purging_removes_only_what_waits_in_that_queue(jobs: Jobs) -> None:
    running = claimed(jobs)
    jobs.enqueue([new_job(), new_job(delay_s=99.0), new_job("elsewhere", queue="ai")])
    assert jobs.queue_size("default") == 2
    assert jobs.purge("default") == 2
    assert {job.id for job in jobs.find()} == {running.claim.id, "elsewhere"}
    assert jobs.queue_size("default") == 0


def test_forgetting_drops_a_finished_jobs_result_only(jobs: Jobs) -> None:
    job = claimed(jobs)
    assert not jobs.forget(job.claim.id)
    jobs.settle([success(job, '"secret"')])
    assert jobs.forget(job.claim.id)
    read = jobs.get(job.claim.id)
    assert read is not None
    assert (read.result, read.state, read.extra) == (None, JobState.SUCCEEDED, {"forgotten": True})
    assert not jobs.forget("nobody")


def test_a_state_of_the_apps_own_lasts_until_the_attempt_ends(jobs: Jobs) -> None:
    job = claimed(jobs)
    assert jobs.set_custom_state(job.claim.id, "HALF", {"$x": 1})
    running = jobs.get(job.claim.id)
    assert running is not None
    assert running.extra["custom"]["state"] == "HALF"
    jobs.settle([success(job)])
    assert not jobs.set_custom_state(job.claim.id, "LATE", None)
    ended = jobs.get(job.claim.id)
    assert ended is not None
    assert "custom" not in ended.extra


def test_counts_by_queue_state_and_type(jobs: Jobs, store: Database) -> None:
    stats = Stats(store)
    assert stats.depths() == []
    jobs.enqueue([new_job(queue="ai", type="b"), new_job(), new_job(), new_job(delay_s=99.0), new_job("old")])
    moment = [{"$set": {"run_at": {"$subtract": ["$$NOW", 60_000]}}}]
    store.collection("relata_jobs").update_one({"_id": "old"}, moment)
    assert stats.depths()[1].oldest_due_s == pytest.approx(60, abs=30)
    first = claim_one(jobs)
    expire_lease(store, first.claim.id)
    second = claim_one(jobs)
    jobs.settle([success(second, followups=({"id": "x"},))])
    ai, default = stats.depths()
    assert (ai.queue, ai.queued, ai.running) == ("ai", 1, 0)
    assert (default.queue, default.queued, default.running) == ("default", 2, 1)
    totals = stats.totals()
    assert (totals.expired_leases, totals.pending_followups) == (1, 1)
    assert totals.by_state[JobState.QUEUED] == 3
    assert totals.by_state[JobState.SUCCEEDED] == 1
    assert totals.by_state[JobState.FAILED] == 0
    assert stats.by_type()["b"] == {JobState.QUEUED: 1}
    edit(store, "old", type=None)
    assert stats.by_type()


def test_the_oldest_expired_lease_is_told_by_the_servers_clock(jobs: Jobs, store: Database) -> None:
    assert Stats(store).oldest_expired_s() == 0.0
    for days in (1, 91):
        job = claimed(jobs)
        until = store.clock.now() - timedelta(days=days)
        edit(store, job.claim.id, lease={"owner": "gone", "until": until})
    edit(store, claimed(jobs).claim.id, lease={"owner": "gone", "until": 5})  # it sorts first, and says nothing
    assert timedelta(days=91).total_seconds() <= Stats(store).oldest_expired_s() < timedelta(days=92).total_seconds()
    assert len(jobs.reap(10, None)) == 3
    assert Stats(store).oldest_expired_s() == 0.0
