"""What the engine tells its listeners (the log, metrics, Celery's events) about jobs and leases.

Events are facts, told after they happened; a listener that fails changes nothing. ``line()`` is the
event on one line of a log: no value in it can end the line or forge another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .job import AttemptOutcome, ErrorClass, JobState
from .redact import one_line


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. ``level`` is the name of the log level it deserves."""

    base_level: ClassVar[str] = "info"

    @property
    def level(self) -> str:
        return self.base_level

    def line(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class JobEnqueued(Event):
    """A job was inserted (not: its id already existed)."""

    base_level: ClassVar[str] = "debug"
    job_id: str
    type: str
    queue: str

    def line(self) -> str:
        return f"{_job(self.type, self.job_id)} enqueued on {one_line(self.queue, 200)}"


@dataclass(frozen=True, slots=True)
class JobClaimed(Event):
    """A claim brought ``count`` jobs to this worker."""

    base_level: ClassVar[str] = "debug"
    count: int

    def line(self) -> str:
        return f"{_count(self.count, 'job')} claimed"


@dataclass(frozen=True, slots=True)
class JobSettled(Event):
    """An attempt's end was accepted. ``outcome`` is what the history got, ``state`` where the job is now."""

    job_id: str
    type: str
    queue: str
    attempt: int
    item_id: str | None
    outcome: AttemptOutcome | None
    state: JobState
    error_class: ErrorClass | None
    error: str | None
    duration_ms: int | None
    worker: str

    @property
    def level(self) -> str:
        if self.state is JobState.FAILED:
            return "error"
        lost = self.outcome in (AttemptOutcome.WORKER_LOST, AttemptOutcome.LEASE_EXPIRED)
        return "warning" if lost or self.outcome is AttemptOutcome.RETRIED else "info"

    def line(self) -> str:
        parts = [f"{_job(self.type, self.job_id)} attempt {self.attempt} {self.outcome or 'released'}"]
        if self.duration_ms is not None:
            parts.append(f" in {self.duration_ms / 1000:.3f} s")
        if str(self.state) != str(self.outcome):
            parts.append(f", now {self.state}")
        if self.item_id is not None:
            parts.append(f", item {one_line(self.item_id, 200)}")
        if self.error_class is not None or self.error is not None:
            parts.append(f": {self.error_class or 'error'}: {one_line(self.error or '', 500)}")
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class JobRefused(Event):
    """An attempt's end was thrown away, because its lease had been lost."""

    base_level: ClassVar[str] = "warning"
    job_id: str
    type: str
    queue: str
    attempt: int
    reason: str

    def line(self) -> str:
        job = _job(self.type, self.job_id)
        return f"{job} attempt {self.attempt}: outcome not kept, lease lost: {one_line(self.reason, 500)}"


@dataclass(frozen=True, slots=True)
class JobReaped(Event):
    """A job whose lease ran out was moved on to ``state``; ``owner`` is the worker that had it."""

    base_level: ClassVar[str] = "warning"
    job_id: str
    type: str
    queue: str
    attempt: int
    state: JobState
    owner: str

    def line(self) -> str:
        job = _job(self.type, self.job_id)
        return f"{job} attempt {self.attempt}: lease of {one_line(self.owner, 200)} ran out, now {self.state}"


@dataclass(frozen=True, slots=True)
class LeasesRenewed(Event):
    """One renewal: how many leases it pushed on, and how many it found lost."""

    base_level: ClassVar[str] = "debug"
    renewed: int
    lost: int = 0

    @property
    def level(self) -> str:
        return "warning" if self.lost else self.base_level

    def line(self) -> str:
        return f"{_count(self.renewed, 'lease')} renewed, {self.lost} lost"


@dataclass(frozen=True, slots=True)
class StoreTrouble(Event):
    """MongoDB refused or could not be reached while ``what`` was done."""

    base_level: ClassVar[str] = "warning"
    what: str
    text: str

    def line(self) -> str:
        return f"{one_line(self.what, 200)}: MongoDB trouble: {one_line(self.text, 500)}"


def _job(job_type: str, job_id: str) -> str:
    return f"{one_line(job_type, 200)}[{one_line(job_id, 200)}]"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
