"""Every error of the package, under one base.

RelataError
  JobError                    raised by handlers, on purpose; ``error_class`` says what follows
    TransientError            retried while attempts are left
      RateLimited             put back for ``retry_after`` seconds without spending an attempt
        LimitTimeout          ... because no slot of a limit was free in time
    PermanentError            not retried
    InvalidOutputError        a model's structurally wrong answer; not retried
    JobCancelled              the job was cancelled while it ran
    LeaseLost                 another may run this job now: stop, nothing you do is kept
    JobTimeout                the job's own time ran out
  EnqueueError                a job could not be published; nothing was written
    InvalidJob                ... because of what it is (arguments, size, priority, options)
    DuplicateJob              ... because an unfinished job holds its unique key
  ConfigurationError          a setting or option is wrong; the worker does not start
  StoreError                  MongoDB refused or failed
    StoreUnavailable          ... because it cannot be reached now; the same call may work later
    ServerTooOld              ... because its version lacks what the queue needs
  JobNotFound                 no job has this id
  MissingKey                  something is encrypted with a key that is not here; nothing is lost
"""

from __future__ import annotations

from .job import ErrorClass


class RelataError(Exception):
    """Base of all errors of this package."""


class JobError(RelataError):
    """A failure that a handler reports on purpose: its text is kept and shown.

    Raise a subclass, or this with ``error_class``, to say what kind of failure it is.
    """

    error_class: ErrorClass = ErrorClass.TRANSIENT

    def __init__(self, message: str = "", *, error_class: ErrorClass | str | None = None) -> None:
        super().__init__(message)
        if error_class is not None:
            self.error_class = ErrorClass(error_class)


class TransientError(JobError):
    """Something that a later attempt may not meet: the job is retried while attempts are left."""

    error_class = ErrorClass.TRANSIENT


class RateLimited(TransientError):
    """The provider asks to wait: the job is put back for ``retry_after`` seconds, no attempt is spent."""

    def __init__(self, message: str = "rate limited", *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LimitTimeout(RateLimited):
    """No slot of a limit was free in time: the job is put back, and no attempt is spent on having waited."""

    def __init__(self, message: str = "no slot of a limit was free in time", *, retry_after: float = 5.0) -> None:
        super().__init__(message, retry_after=retry_after)


class PermanentError(JobError):
    """Something that no later attempt can mend: the job fails now."""

    error_class = ErrorClass.PERMANENT


class InvalidOutputError(JobError):
    """A model answered with the wrong structure: the job fails now, as ``invalid``."""

    error_class = ErrorClass.INVALID


class JobCancelled(JobError):
    """The job was cancelled while this attempt ran."""

    error_class = ErrorClass.CANCELLED


class LeaseLost(JobError):
    """The lease moved on: another worker may run the job now, and this attempt's outcome is not kept."""

    error_class = ErrorClass.CANCELLED


class JobTimeout(JobError):
    """The job's own time ran out."""

    error_class = ErrorClass.TIMEOUT


class EnqueueError(RelataError):
    """A job could not be published; nothing was written."""


class InvalidJob(EnqueueError, ValueError):
    """A job that the queue cannot take: the message names its type, what was seen and what is allowed."""


class DuplicateJob(EnqueueError):
    """An unfinished job already holds this unique key; ``job_id`` names it."""

    def __init__(self, unique_key: str, job_id: str | None) -> None:
        super().__init__(
            f"an unfinished job ({job_id or 'unknown id'}) already has unique_key {unique_key!r}"
        )
        self.unique_key = unique_key
        self.job_id = job_id


class ConfigurationError(RelataError):
    """A setting or a task option is wrong; the message says which, what it was, and what is allowed."""


class StoreError(RelataError):
    """MongoDB refused or failed an operation. Never holds credentials."""


class StoreUnavailable(StoreError):
    """MongoDB cannot be reached, or has no primary, now. Whether the last write happened is unknown."""


class ServerTooOld(StoreError):
    """The server's version lacks what the queue needs (MongoDB 5.0 or newer)."""


class JobNotFound(RelataError):
    """No job has this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}")
        self.job_id = job_id


class MissingKey(RelataError):
    """A key for encryption is not here. What is encrypted with it stays as it is; the text names the key."""
