"""The decision at the end of an attempt: which state follows, when, and what is recorded.

This is the whole retry policy. It is pure: chance, settings and the job are handed in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from .backoff import backoff_s, lost_delay_s
from .job import AttemptOutcome, ClaimedJob, ErrorClass, JobState
from .outcome import (
    Cancelled,
    ErrorInfo,
    Failed,
    LeaseForfeited,
    Outcome,
    Released,
    Replaced,
    RetryRequested,
    Settlement,
    Snoozed,
    Succeeded,
    WorkerLost,
)
from .redact import clean

_ERRORS = "relata_celery.domain.errors"


def decide(
    outcome: Outcome,
    job: ClaimedJob,
    *,
    random_fraction: float,
    retention_succeeded_s: float | None,
    retention_failed_s: float | None,
) -> Settlement:
    """What is to be written for ``outcome`` of this attempt of ``job``.

    Follow-ups are kept for a success and for a final failure only. A lease that was lost has no
    settlement: ``LeaseForfeited`` raises ValueError, for nothing may be written.
    """
    if isinstance(outcome, Succeeded):
        return _settlement(
            job,
            outcome,
            JobState.SUCCEEDED,
            AttemptOutcome.SUCCEEDED,
            result=outcome.result,
            followups=outcome.followups,
            ignored=outcome.ignored,
            placeholder=outcome.replaced,
            retention_s=retention_succeeded_s,
        )
    if isinstance(outcome, Failed):
        if _is_retried(outcome, job):
            return _retried(job, outcome, backoff_s(job.attempt, random_fraction), outcome.error)
        return _failed(job, outcome, outcome.error, outcome.followups, retention_failed_s)
    if isinstance(outcome, RetryRequested):
        granted = max(job.max_attempts, outcome.max_attempts or 0)
        if job.attempt < granted:
            return _retried(job, outcome, outcome.delay_s, outcome.error, outcome.message, granted)
        error = outcome.error or _no_attempts_left(job)
        return _failed(job, outcome, error, outcome.followups, retention_failed_s)
    if isinstance(outcome, WorkerLost):
        return _worker_lost(outcome, job, random_fraction, retention_failed_s)
    if isinstance(outcome, Snoozed):
        return _settlement(
            job,
            outcome,
            JobState.QUEUED,
            AttemptOutcome.SNOOZED,
            delay_s=_delay(outcome.delay_s),
            counted=False,
            error=ErrorInfo(ErrorClass.TRANSIENT, clean(outcome.reason), outcome.exception, _ERRORS),
        )
    if isinstance(outcome, Replaced):
        return _settlement(
            job,
            outcome,
            JobState.QUEUED,
            AttemptOutcome.SUCCEEDED,
            restart=True,
            message=outcome.message,
            type=_task_name(outcome.message),
        )
    if isinstance(outcome, Released):
        return _settlement(job, outcome, JobState.QUEUED, None, counted=False)
    if isinstance(outcome, Cancelled):
        return _settlement(
            job,
            outcome,
            JobState.CANCELLED,
            AttemptOutcome.CANCELLED,
            error=ErrorInfo(ErrorClass.CANCELLED, clean(outcome.reason), "JobCancelled", _ERRORS),
            retention_s=retention_failed_s,
        )
    if isinstance(outcome, LeaseForfeited):
        raise ValueError(
            f"job {job.claim.id}: its lease is lost, so nothing may be written ({outcome.reason})"
        )
    _never(outcome)


def _attempts_left(job: ClaimedJob) -> bool:
    return job.attempt < job.max_attempts


def _is_retried(outcome: Failed, job: ClaimedJob) -> bool:
    if outcome.final or not _attempts_left(job):
        return False
    if outcome.error.error_class is ErrorClass.TIMEOUT:
        return outcome.retry_on_timeout
    return outcome.error.error_class is ErrorClass.TRANSIENT


def _retried(
    job: ClaimedJob,
    outcome: Failed | RetryRequested,
    delay_s: float,
    error: ErrorInfo | None,
    message: Mapping[str, Any] | None = None,
    max_attempts: int = 0,
) -> Settlement:
    return _settlement(
        job,
        outcome,
        JobState.QUEUED,
        AttemptOutcome.RETRIED,
        max_attempts=max_attempts if max_attempts > job.max_attempts else None,
        delay_s=_delay(delay_s),
        error=error,
        message=message,
    )


def _failed(
    job: ClaimedJob,
    outcome: Failed | RetryRequested,
    error: ErrorInfo,
    followups: tuple[Mapping[str, Any], ...],
    retention_s: float | None,
) -> Settlement:
    return _settlement(
        job,
        outcome,
        JobState.FAILED,
        AttemptOutcome.FAILED,
        error=error,
        followups=followups,
        retention_s=retention_s,
    )


def _worker_lost(
    outcome: WorkerLost, job: ClaimedJob, random_fraction: float, retention_s: float | None
) -> Settlement:
    error = ErrorInfo(
        ErrorClass.TRANSIENT,
        clean(f"worker lost: {outcome.reason}"),
        "WorkerLostError",
        "billiard.exceptions",
    )
    if _attempts_left(job):
        delay_s = lost_delay_s(job.attempt, random_fraction)
        return _settlement(
            job, outcome, JobState.QUEUED, AttemptOutcome.WORKER_LOST, delay_s=delay_s, error=error
        )
    return _settlement(
        job,
        outcome,
        JobState.FAILED,
        AttemptOutcome.WORKER_LOST,
        error=error,
        followups=outcome.followups,
        retention_s=retention_s,
    )


def _no_attempts_left(job: ClaimedJob) -> ErrorInfo:
    text = f"no attempts left: the handler asked to be run again after attempt {job.attempt} of {job.max_attempts}"
    return ErrorInfo(
        ErrorClass.TRANSIENT,
        text,
        "MaxRetriesExceededError",
        "celery.exceptions",
        args_json=json.dumps([text]),
    )


def _task_name(message: Mapping[str, Any]) -> str | None:
    """The task that a message names, None when it names none (the job's type is then kept)."""
    headers = message.get("headers")
    name = headers.get("task") if isinstance(headers, Mapping) else None
    return name if isinstance(name, str) and name else None


def _delay(delay_s: float) -> float:
    return delay_s if math.isfinite(delay_s) and delay_s > 0 else 0.0


def _settlement(
    job: ClaimedJob, outcome: Outcome, state: JobState, recorded: AttemptOutcome | None, **fields: Any
) -> Settlement:
    return Settlement(
        claim=job.claim,
        state=state,
        recorded=recorded,
        attempt=job.attempt,
        duration_ms=outcome.duration_ms,
        **fields,
    )


def _never(outcome: NoReturn) -> NoReturn:
    """For the type checker: every outcome was handled above."""
    raise AssertionError(f"{type(outcome).__name__} is no outcome of an attempt")
