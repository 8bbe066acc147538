"""The job and its parts, as every floor above the database sees them.

A job is one document; these classes are that document read. They are frozen: a job is changed
by the store's conditional updates only, never by assigning to an attribute.

Vocabulary: *Job* is the document, *Attempt* one execution of it, *Lease* the time-limited right
to execute it, *Claim* the proof of holding that right (job, fence and owner), *Outcome* what an
attempt came to (see :mod:`relata_celery.domain.outcome`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

#: Priorities run from 0 to 9 and 9 is served first, as in AMQP and in Celery's own documentation.
MIN_PRIORITY = 0
MAX_PRIORITY = 9

#: The schema number written into every document; readers keep fields they do not know.
SCHEMA_VERSION = 1


class JobState(str, Enum):
    """Where a job stands. The last three are terminal: only a retry by hand leaves them."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    def __str__(self) -> str:
        return self.value

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class ErrorClass(str, Enum):
    """What kind of failure an attempt met; the class alone decides whether it is retried."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    INVALID = "invalid"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    def __str__(self) -> str:
        return self.value


class AttemptOutcome(str, Enum):
    """How an attempt ended, as the job's history records it."""

    SUCCEEDED = "succeeded"
    RETRIED = "retried"
    FAILED = "failed"
    SNOOZED = "snoozed"
    LEASE_EXPIRED = "lease_expired"
    WORKER_LOST = "worker_lost"
    CANCELLED = "cancelled"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may execute the job, and until when (aware UTC, the server's clock)."""

    owner: str
    until: datetime


@dataclass(frozen=True, slots=True)
class Attempt:
    """One entry of a job's history. Times are aware UTC by the server's clock."""

    number: int
    fence: int
    started_at: datetime | None
    ended_at: datetime
    duration_ms: int
    worker: str
    outcome: AttemptOutcome
    error_class: ErrorClass | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a running job says it is: ``fraction`` from 0 to 1, a short note, and when it said so."""

    fraction: float | None
    note: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class Job:
    """A job document, read. See the table in ``docs/document.md`` for the fields' meaning.

    ``message`` is the kombu message (body, headers, properties, content-type, content-encoding).
    ``history`` holds the first and the newest attempts; ``history_skipped`` counts those dropped
    between them. ``result`` is the decoded return value. ``extra`` keeps fields this version
    does not know.
    """

    id: str
    type: str
    queue: str
    state: JobState
    priority: int
    run_at: datetime
    attempts: int
    max_attempts: int
    fence: int
    created_at: datetime
    message: Mapping[str, Any]
    lease: Lease | None = None
    item_id: str | None = None
    tags: tuple[str, ...] = ()
    unique_key: str | None = None
    expires_at: datetime | None = None
    history: tuple[Attempt, ...] = ()
    history_skipped: int = 0
    snoozes: int = 0
    result: Any = None
    error: str | None = None
    error_class: ErrorClass | None = None
    progress: Progress | None = None
    cancel_requested: bool = False
    followups: tuple[Mapping[str, Any], ...] = ()
    started_at: datetime | None = None
    finished_at: datetime | None = None
    expire_at: datetime | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a publisher hands to the store: everything of a job that it does not fill in itself.

    ``run_at`` is an absolute time chosen by the publisher (Celery's ``eta``); ``delay_s`` counts
    from the server's now and wins over it. With neither, the job is due at once. ``failure``
    (:func:`relata_celery.domain.outcome.never_run`) says why it is recorded as failed instead of being run.
    """

    id: str
    type: str
    queue: str
    message: Mapping[str, Any]
    priority: int = 0
    run_at: datetime | None = None
    delay_s: float | None = None
    expires_at: datetime | None = None
    max_attempts: int | None = None
    item_id: str | None = None
    tags: tuple[str, ...] = ()
    unique_key: str | None = None
    root_id: str | None = None
    parent_id: str | None = None
    group_id: str | None = None
    failure: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to one attempt: names the job, the fence it was given, and the owner of the lease.

    Every write that assumes ownership carries a claim. A filter on it that matches nothing means
    that the lease is lost: the job was reaped, cancelled, or claimed by another.
    """

    id: str
    fence: int
    owner: str


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A claim and what its executor needs of the document, in the shape it was stored.

    ``attempt`` counts from 1 and includes this one. ``expired`` says that the job's ``expires``
    had passed, by the server's clock, when it was claimed: it must be settled unexecuted.
    ``claimed_at`` is the server's time of the claim. ``snoozed_s``: for how long in all it was put off
    without spending an attempt.
    """

    claim: Claim
    type: str
    queue: str
    priority: int
    message: Mapping[str, Any]
    attempt: int
    max_attempts: int
    claimed_at: datetime
    item_id: str | None = None
    snoozes: int = 0
    snoozed_s: float = 0.0
    expired: bool = False


class ClaimedJobs(list[ClaimedJob]):
    """The jobs of one claim. ``more``: at least as many were due as were asked for, whoever has got them."""

    def __init__(self, jobs: Iterable[ClaimedJob] = (), more: bool = False) -> None:
        super().__init__(jobs)
        self.more = more
