"""What an attempt came to, and what is written because of it.

An *Outcome* is made where the code ran (a pool process, a thread) or by whoever noticed that it
cannot end there (the parent of a dead child, the keeper of a lost deadline). It holds nothing
but plain values, so it crosses a process border whatever the job's own objects were.

A *Settlement* is the decision made from it, and the only thing the store writes at the end of an
attempt. :func:`relata_celery.domain.settle.decide` is the one place where one becomes the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from .job import AttemptOutcome, Claim, ErrorClass, JobState


class _Plain:
    """Made anew from its fields in another process, which takes half the time that dataclasses take for it."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class ErrorInfo(_Plain):
    """A failure in plain values, already capped and redacted.

    ``text`` is what may be shown and stored. ``exception`` and ``module`` name the exception's type;
    ``args_json`` its arguments as JSON when they could be encoded and may be shown, so that a
    caller's ``AsyncResult.get()`` can raise it again. ``traceback`` holds places, never values.
    """

    error_class: ErrorClass
    text: str
    exception: str = "Exception"
    module: str = "builtins"
    args_json: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Encoded(_Plain):
    """A return value as it is stored: ``body`` is text (JSON by default) or bytes."""

    content_type: str
    content_encoding: str
    body: str | bytes


@dataclass(frozen=True, slots=True)
class Succeeded(_Plain):
    """The handler returned. ``ignored`` when it raised Celery's ``Ignore``: done, no result to keep.

    ``replaced`` when it put a workflow in its place, of which the last step will be published under the
    job's own id.
    """

    result: Encoded | None = None
    followups: tuple[Mapping[str, Any], ...] = ()
    duration_ms: int | None = None
    ignored: bool = False
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Failed(_Plain):
    """The attempt failed with ``error``; its class and the attempts left decide what follows.

    ``followups`` are published only if the failure is final. ``retry_on_timeout`` says whether this
    job's type wants a timeout retried.
    """

    error: ErrorInfo
    followups: tuple[Mapping[str, Any], ...] = ()
    duration_ms: int | None = None
    retry_on_timeout: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class RetryRequested(_Plain):
    """The handler asked to be run again (Celery's ``self.retry``), after ``delay_s`` seconds.

    ``message`` replaces the stored one when the handler changed arguments or headers.
    ``followups`` are published only if no attempt is left, so that the job fails.
    ``max_attempts`` is the limit that the handler named in asking (``retry(max_retries=...)``); it may
    grant more attempts than the job has, never fewer.
    """

    delay_s: float
    error: ErrorInfo | None = None
    message: Mapping[str, Any] | None = None
    duration_ms: int | None = None
    followups: tuple[Mapping[str, Any], ...] = ()
    max_attempts: int | None = None


@dataclass(frozen=True, slots=True)
class Snoozed(_Plain):
    """The job is put back for ``delay_s`` seconds without spending an attempt (rate limits, a missing key)."""

    delay_s: float
    reason: str
    duration_ms: int | None = None
    exception: str = "RateLimited"


@dataclass(frozen=True, slots=True)
class Replaced(_Plain):
    """The handler put another task in its place under the same id (Celery's ``self.replace``)."""

    message: Mapping[str, Any]
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerLost(_Plain):
    """The process that ran the attempt died. Transient; the first loss is rerun at once."""

    reason: str
    followups: tuple[Mapping[str, Any], ...] = ()
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Released(_Plain):
    """The attempt is given back uncounted: it never began, or a draining worker could not end it."""

    reason: str
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Cancelled(_Plain):
    """Stopped by a person (revoke, expiry) while this worker held it."""

    reason: str
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseForfeited(_Plain):
    """The attempt stopped because its lease was lost: nothing may be written for it."""

    reason: str
    duration_ms: int | None = None


Outcome = Union[
    Succeeded,
    Failed,
    RetryRequested,
    Snoozed,
    Replaced,
    WorkerLost,
    Released,
    Cancelled,
    LeaseForfeited,
]


@dataclass(frozen=True, slots=True)
class Settlement:
    """One conditional write: the end of an attempt, applied only if the claim still holds.

    ``state`` is the state to enter. For ``QUEUED``, ``run_at`` becomes the server's now plus
    ``delay_s``. ``counted`` false gives the attempt back (``attempts`` is lowered by one).
    ``recorded`` is the outcome that the history entry gets; None writes no entry.
    ``message`` replaces the stored message, ``restart`` starts counting attempts anew.
    For a terminal state ``expire_at`` becomes the server's now plus ``retention_s``
    (None: kept for ever). ``delete`` removes the document instead (plain Celery tasks).
    ``placeholder`` has the next job that is published under this id take the document's place.
    """

    claim: Claim
    state: JobState
    recorded: AttemptOutcome | None
    attempt: int
    delay_s: float = 0.0
    counted: bool = True
    restart: bool = False
    result: Encoded | None = None
    error: ErrorInfo | None = None
    message: Mapping[str, Any] | None = None
    type: str | None = None
    max_attempts: int | None = None
    followups: tuple[Mapping[str, Any], ...] = ()
    duration_ms: int | None = None
    retention_s: float | None = None
    ignored: bool = False
    placeholder: bool = False
    delete: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The store's answer to one settlement.

    ``accepted`` is true when the document shows this claim's end, also when an earlier try of the
    same write had already put it there. When false, ``reason`` says what the document showed
    instead (who holds it now and since when), for the log. ``unstorable`` when nothing was written
    because the settlement itself cannot be (``reason`` says why); the claim may still hold.
    """

    claim: Claim
    accepted: bool
    reason: str | None = None
    unstorable: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """A claim that a renewal found gone. ``cancelled`` when a person cancelled the job."""

    claim: Claim
    cancelled: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """A job whose lease had run out, the state it was moved to, and the follow-ups written with it.

    ``dropped`` counts those that its failure called for and that could not be stored.
    """

    id: str
    type: str
    queue: str
    fence: int
    attempt: int
    state: JobState
    owner: str
    message: Mapping[str, Any] | None = None
    followups: tuple[Mapping[str, Any], ...] = ()
    dropped: int = 0


def never_run(
    error: ErrorInfo,
    retention_s: float | None,
    *,
    replaceable: bool,
    followups: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Why a job is published as failed already (:attr:`NewJob.failure`), in plain values.

    ``replaceable`` when a later job of the same id takes its place: a step that waited for one that failed,
    and may be retried. ``followups`` are what its failure calls for.
    """
    return {
        "error": error.text,
        "error_class": error.error_class.value,
        "exception": {"type": error.exception, "module": error.module, "args_json": error.args_json},
        "retention_s": retention_s,
        "replaceable": replaceable,
        "followups": [dict(followup) for followup in followups],
    }
