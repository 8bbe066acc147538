"""Jobs and settlements with everything filled in that a test does not care about."""

from __future__ import annotations

import itertools
from typing import Any

from relata_celery.domain.job import AttemptOutcome, ClaimedJob, ErrorClass, JobState, NewJob
from relata_celery.domain.outcome import Encoded, ErrorInfo, Settlement
from relata_celery.store.client import Database
from relata_celery.store.codec import COLLECTION
from relata_celery.store.jobs import Jobs

LEASE_S = 60.0
_numbers = itertools.count()


def new_job(job_id: str | None = None, **fields: Any) -> NewJob:
    message = {"body": "[[], {}, {}]", "headers": {"task": "t"}, "content-type": "application/json"}
    defaults: dict[str, Any] = {"type": "t", "queue": "default", "message": message}
    return NewJob(id=job_id or f"job-{next(_numbers)}", **{**defaults, **fields})


def settlement(
    job: ClaimedJob, state: JobState, recorded: AttemptOutcome | None, **fields: Any
) -> Settlement:
    return Settlement(claim=job.claim, state=state, recorded=recorded, attempt=job.attempt, **fields)


def success(job: ClaimedJob, body: str = "1", **fields: Any) -> Settlement:
    result = Encoded("application/json", "utf-8", body)
    return settlement(job, JobState.SUCCEEDED, AttemptOutcome.SUCCEEDED, result=result, **fields)


def failure(job: ClaimedJob, text: str = "boom", **fields: Any) -> Settlement:
    error = ErrorInfo(ErrorClass.PERMANENT, text, "ValueError")
    return settlement(job, JobState.FAILED, AttemptOutcome.FAILED, error=error, **fields)


def another_try(job: ClaimedJob, text: str = "not yet", **fields: Any) -> Settlement:
    error = ErrorInfo(ErrorClass.TRANSIENT, text, "ConnectionError")
    return settlement(job, JobState.QUEUED, AttemptOutcome.RETRIED, error=error, **fields)


def release(job: ClaimedJob) -> Settlement:
    return settlement(job, JobState.QUEUED, None, counted=False)


def snooze(job: ClaimedJob, delay_s: float = 0.0) -> Settlement:
    return settlement(job, JobState.QUEUED, AttemptOutcome.SNOOZED, counted=False, delay_s=delay_s)


def claim_one(jobs: Jobs, owner: str = "w1", queue: str = "default") -> ClaimedJob:
    (job,) = jobs.claim([queue], 1, owner, LEASE_S)
    return job


def claimed(jobs: Jobs, owner: str = "w1", **fields: Any) -> ClaimedJob:
    """A job freshly published and claimed."""
    jobs.enqueue([new_job(**fields)])
    return claim_one(jobs, owner, fields.get("queue", "default"))


def document(store: Database, job_id: str) -> dict[str, Any]:
    found = store.collection(COLLECTION).find_one({"_id": job_id})
    assert found is not None
    return found


def edit(store: Database, job_id: str, **fields: Any) -> None:
    """Change a document by hand, past all rules."""
    store.collection(COLLECTION).update_one({"_id": job_id}, {"$set": fields})


def expire_lease(store: Database, job_id: str) -> None:
    past = [{"$set": {"lease.until": {"$subtract": ["$$NOW", 1000]}}}]
    store.collection(COLLECTION).update_one({"_id": job_id, "state": "running"}, past)
