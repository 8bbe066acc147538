"""Publishes made inside an attempt that must not happen yet.

What a job publishes *because it ended* (the next step of a chain, a link, an errback) is part of
its outcome and is written with it, so it is collected here instead of being inserted. The same
holds for a job that publishes its own id again (Celery's ``Task.retry`` and ``Task.replace``):
that is a transition of the one job, not a second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any

from relata_celery.domain.job import NewJob
from relata_celery.store.codec import encode_new

current: ContextVar[Capture | None] = ContextVar("relata_capture", default=None)


class Capture:
    """Collects the publishes of one attempt; in force between entering and leaving :meth:`active`."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.republished: dict[str, Any] | None = None
        self.followups: list[dict[str, Any]] = []
        #: Whether what the attempt publishes and returns must be encrypted.
        self.encrypted = False
        self._collecting = False

    @contextmanager
    def active(self) -> Iterator[None]:
        token = current.set(self)
        try:
            yield
        finally:
            current.reset(token)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While inside, every publish becomes a follow-up."""
        token = current.set(self)
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            current.reset(token)

    def takes(self, job: NewJob, message: Mapping[str, Any]) -> bool:
        """Keep this publish instead of having it inserted; False if it is none of ours.

        Raises InvalidJob for a follow-up that the queue would refuse for what it is.
        """
        publish = {"queue": job.queue, "message": dict(message)}
        if job.id == self.job_id:
            self.republished = publish
            return True
        if self._collecting:
            encode_new(job, datetime.now(timezone.utc), 1)
            self.followups.append(publish)
            return True
        return False
