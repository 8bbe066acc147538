"""The job whose handler is running here, as the handler sees it."""

from __future__ import annotations

from contextvars import ContextVar
from datetime import datetime, timedelta, timezone
from time import monotonic
from typing import TYPE_CHECKING

from celery import current_app

from relata_celery.domain.errors import RelataError

from . import bootstrap

if TYPE_CHECKING:
    from .attempt import Attempt

current: ContextVar[Attempt | None] = ContextVar("relata_attempt", default=None)


class CurrentJob:
    """The job whose handler is running here. Get it with :func:`current_job`."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def __repr__(self) -> str:
        return f"<CurrentJob {self.type}[{self.id}] attempt {self.attempt}>"

    @property
    def id(self) -> str:
        return self._attempt.ticket.job_id

    @property
    def type(self) -> str:
        return self._attempt.ticket.type

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._attempt.ticket.attempt

    @property
    def max_attempts(self) -> int:
        return self._attempt.ticket.max_attempts

    @property
    def fence(self) -> int:
        """Rises with every claim of the job: hand it to systems that can refuse older writers."""
        return self._attempt.ticket.fence

    @property
    def item_id(self) -> str | None:
        return self._attempt.ticket.item_id

    @property
    def lease_until(self) -> datetime:
        """Until when the lease holds as far as this process knows (aware UTC); renewals move it."""
        left_s = self._attempt.signal.lease_deadline() - monotonic()
        return datetime.now(timezone.utc) + timedelta(seconds=left_s)

    def check(self) -> None:
        """Return if the attempt may go on; raise otherwise.

        Raises :class:`LeaseLost` (another may run the job: stop), :class:`JobCancelled` or
        :class:`JobTimeout`. Costs no round trip.
        """
        self._attempt.check()

    def progress(self, fraction: float | None = None, note: str | None = None) -> None:
        """Say how far the job is: ``fraction`` from 0 to 1, ``note`` up to 200 characters.

        Written to the job at most once a second (the last call within a second may be dropped,
        ``fraction`` 1 never is); needs this process to open its own connection to MongoDB.
        """
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"fraction must be from 0 to 1, not {fraction!r}")
        now = monotonic()
        if now - self._attempt.progressed_at < 1 and fraction != 1:
            return
        self._attempt.progressed_at = now
        bootstrap.record_progress(current_app._get_current_object(), self._attempt, fraction, note)


def attempt_here() -> Attempt | None:
    """The attempt whose handler is running here, if any."""
    return current.get()


def current_job() -> CurrentJob:
    """The job that is running here.

    Raises :class:`RelataError` outside a handler of a leased task.
    """
    attempt = current.get()
    if attempt is None:
        raise RelataError("no job is running here: current_job() works inside the handler of a leased task")
    return CurrentJob(attempt)
