"""Calls to language models, held to a limit of the whole fleet.

``with acquire_ai():`` around a call waits until a slot of the limit is free, and holds it meanwhile. The slot is
leased: this process renews it from a thread of its own at a third of the lease, as long as the job's own
lease holds, and gives it back at the end of the block, at the latest when the handler has ended. If the process
dies, the slot comes back when its lease (``relata_lease_duration``) runs out.

Within one job a slot is taken once. A job of the ``ai`` queue got its own when it was claimed, and an inner
``acquire_ai()`` runs on that; so does one inside another. Each such further call still counts against the
*rate*, but the first one of an admitted job, whose permit was paid when it was claimed. A thread that a
handler starts by itself is not the job: it takes a slot of its own.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from random import random
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from . import bootstrap
from .attempt import Attempt
from .current import attempt_here
from .domain.errors import StoreError
from .domain.limits import AI, LimitSpec
from .engine.limiting import LimitStore, new_slot_id, wait_for_slot

logger = logging.getLogger("relata_celery")

#: How long a mere permit stays in the document, so that one asked for twice is charged once.
PERMIT_S = 5.0


@dataclass(frozen=True)
class _Asker:
    """On whose behalf, and under which terms, slots of one limit are asked for."""

    store: LimitStore
    name: str
    spec: LimitSpec
    owner: str
    job_id: str | None
    lease_s: float
    check: Callable[[], None]
    lease_holds: Callable[[], bool]


class _Place:
    """A slot of this process: asked for, renewed and given back under one id."""

    def __init__(self, asker: _Asker) -> None:
        self.asker = asker
        self.id = new_slot_id()
        self._released = threading.Event()
        # A renewal on its way must not arrive after the return, and take the slot again. Reentrant, as the
        # other lock is: a slot that was forgotten is released by the garbage collector, in any line.
        self._writing = threading.RLock()

    def acquire(self, timeout_s: float | None) -> bool:
        """Wait for the slot and keep it; whether the limit has a rate."""
        rated = self._wait(weight=1, lease_s=self.asker.lease_s, timeout_s=timeout_s)
        threading.Thread(target=self._keep, name="relata-slot", daemon=True).start()
        return rated

    def permit(self, timeout_s: float | None) -> bool:
        """Wait for a permit of the rate only; whether the limit has a rate."""
        return self._wait(weight=0, lease_s=PERMIT_S, timeout_s=timeout_s)

    def _wait(self, *, weight: int, lease_s: float, timeout_s: float | None) -> bool:
        asker = self.asker
        answer = wait_for_slot(
            asker.store,
            asker.name,
            asker.spec,
            slot_id=self.id,
            owner=asker.owner,
            job_id=asker.job_id,
            weight=weight,
            lease_s=lease_s,
            timeout_s=timeout_s,
            check=asker.check,
            sleep=sleep,
            random=random,
        )
        return answer.limit.rate is not None

    def _keep(self) -> None:
        asker = self.asker
        while not self._released.wait(asker.lease_s / 3):
            if not asker.lease_holds():
                return
            with self._writing:
                if self._released.is_set():
                    return
                try:
                    lost = asker.store.renew(
                        asker.name, [self.id], owner=asker.owner, job_id=asker.job_id, lease_s=asker.lease_s
                    )
                except StoreError as exc:
                    logger.warning("limit %s: a slot was not renewed, trying again: %s", asker.name, exc)
                    continue
            if lost:
                logger.warning("limit %s: the slot had run out and was taken again", asker.name)

    def release(self) -> None:
        """Give the slot back. Never raises; again does nothing."""
        with self._writing:
            if self._released.is_set():
                return
            self._released.set()
            try:
                self.asker.store.give_back(self.asker.name, [self.id])
            except StoreError as exc:
                logger.warning("limit %s: a slot comes back when its lease runs out: %s", self.asker.name, exc)


@dataclass
class _Use:
    """What one job has of one limit."""

    admitted: bool
    prepaid: bool
    place: _Place | None = None
    users: int = 0
    rated: bool = True
    lock: Any = field(default_factory=threading.RLock)

    def enter(self, asker: _Asker, timeout_s: float | None, attempt: Attempt) -> None:
        with self.lock:
            if self.admitted or self.place is not None:
                if self.prepaid:
                    self.prepaid = False
                elif self.rated:
                    self.rated = _Place(asker).permit(timeout_s)
            else:
                place = _Place(asker)
                attempt.at_end.append(place.release)
                self.rated = place.acquire(timeout_s)
                self.place = place
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0 and self.place is not None:
                place, self.place = self.place, None
                place.release()


class AiSlot:
    """A slot of a limit, held until the end of the ``with`` block or :meth:`release`."""

    def __init__(self, name: str, tokens: int | None, waited_s: float, free: Callable[[], None]) -> None:
        self.name = name
        self.tokens = tokens
        #: Seconds that passed before the slot was free.
        self.waited_s = waited_s
        # Also when a caller forgets it: it would be renewed, and held, until the process ends.
        self._free = weakref.finalize(self, free)

    def __repr__(self) -> str:
        return f"<AiSlot of limit {self.name!r}, {'held' if self.held else 'released'}>"

    @property
    def held(self) -> bool:
        """Whether it was not released yet."""
        return self._free.alive

    def release(self) -> None:
        """Give the slot back now; again does nothing. Never raises."""
        self._free()

    def __enter__(self) -> AiSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def acquire_ai(
    name: str = AI, *, tokens: int | None = None, timeout: float | None = 30.0, app: Any = None
) -> AiSlot:
    """Wait for a slot of the fleet-wide limit ``name``; use it as ``with acquire_ai() as slot:``.

    A limit allows ``relata_ai_concurrency`` slots at once and ``relata_ai_rate`` starts, each name for itself,
    unless somebody set that limit by hand. Who came earlier goes first. ``tokens`` is the number of model
    tokens that the call may use; it is kept on the slot. ``app`` is the Celery app, outside of jobs the current one.

    Raises :class:`LimitTimeout` after ``timeout`` seconds (None: no end of its own): a job that does not catch it
    is put back without spending an attempt. Inside a job also what ``current_job().check()`` raises: LeaseLost,
    JobCancelled, JobTimeout. While MongoDB is away it waits; StoreUnavailable at the end.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of a limit is a text, not {name!r}")
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout must be seconds from 0, or None, not {timeout!r}")
    if tokens is not None and (not isinstance(tokens, int) or tokens < 0):
        raise ValueError(f"tokens must be a whole number from 0, or None, not {tokens!r}")
    began = monotonic()
    attempt = attempt_here()
    asker = _asker(app, name, attempt)
    if attempt is None:
        place = _Place(asker)
        place.acquire(timeout)
        return AiSlot(name, tokens, monotonic() - began, place.release)
    admitted = name in attempt.ticket.limits
    use: _Use = attempt.limits.setdefault(name, _Use(admitted=admitted, prepaid=admitted))
    use.enter(asker, timeout, attempt)
    return AiSlot(name, tokens, monotonic() - began, use.leave)


def _asker(app: Any, name: str, attempt: Attempt | None) -> _Asker:
    if app is None:
        from celery import current_app

        app = current_app._get_current_object()
    settings = bootstrap.settings_of(app)
    store, spec = bootstrap.stores_of(app).limits, bootstrap.limit_spec(settings)
    lease_s = settings.lease_duration
    if attempt is None:
        return _Asker(store, name, spec, bootstrap.owner_id(), None, lease_s, _no_check, lambda: True)
    return _Asker(
        store,
        name,
        spec,
        owner=attempt.ticket.owner or bootstrap.owner_id(),
        job_id=attempt.ticket.job_id,
        lease_s=lease_s,
        check=attempt.check,
        lease_holds=lambda: monotonic() < attempt.signal.lease_deadline(),
    )


def _no_check() -> None:
    """Outside of a job nothing can be lost but time."""


__all__ = ["AiSlot", "acquire_ai"]
