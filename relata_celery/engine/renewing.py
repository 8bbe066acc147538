"""Leases are renewed by the parent, on a thread of its own, in one update for all of them.

A renewal that fails is *unknown*, not lost: an attempt is told to stop only when the server says
that its fence moved on, or when its local deadline passes. That deadline counts from the moment
the last accepted renewal was *sent*, on the monotonic clock, so it can only be early, never late.
(One failed heartbeat that killed all tasks is a reported defect elsewhere.)

A live parent does not prove a live job: an attempt past its own hard deadline is not renewed. One whose
outcome is on its way to MongoDB is, for as long as that takes. A job that lies reserved for longer than
a lease has been forgotten by whoever was to run it, and is given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from relata_celery.domain.errors import StoreUnavailable
from relata_celery.domain.events import Event, LeasesRenewed

from .background import Background
from .held import Held, HeldJob, Phase, StopReason
from .limiting import Gate
from .ports import JobQueue

logger = logging.getLogger("relata_celery")


class Renewer(Background):
    name = "renewer"

    def __init__(
        self,
        queue: JobQueue,
        held: Held,
        lease_s: float,
        period_s: float,
        on_lost: Callable[[HeldJob, StopReason, str], None],
        give_back: Callable[[HeldJob, str], bool],
        emit: Callable[[Event], None],
        random: Callable[[], float],
        gate: Gate | None = None,
    ) -> None:
        super().__init__(random=random)
        self._gate = gate
        self._queue = queue
        self._held = held
        self._lease_s = lease_s
        self._period_s = period_s
        self._on_lost = on_lost
        self._give_back = give_back
        self._emit = emit

    def first_wait_s(self) -> float:
        return self._period_s * (0.5 + self._random() / 2)

    def step(self) -> float | None:
        now = monotonic()
        self._give_back_forgotten(now)
        renewable = self._held.snapshot(
            lambda held: held.phase is Phase.SETTLING or held.hard_deadline is None or now < held.hard_deadline
        )
        if renewable:
            sent_at = monotonic()
            try:
                lost = self._queue.renew([held.claim for held in renewable], self._lease_s)
            except StoreUnavailable as exc:
                logger.warning("renewal of %d leases failed, their state is unknown: %s", len(renewable), exc)
                return min(self._period_s, 1.0) * (0.5 + self._random() / 2)
            self.answered()
            losses = {loss.claim: loss for loss in lost}
            gone = 0  # what was settled while the renewal was under way is no loss
            for held in renewable:
                loss = losses.get(held.claim)
                if loss is None:
                    held.lease_deadline = sent_at + self._lease_s
                    held.control.lease_extended(held.lease_deadline)
                elif held.phase is not Phase.SETTLING:
                    gone += 1
                    reason = StopReason.CANCELLED if loss.cancelled else StopReason.LEASE_LOST
                    self._on_lost(held, reason, loss.reason)
            self._emit(LeasesRenewed(len(renewable) - len(lost), gone))
            if self._gate is not None:
                self._gate.renew()
        return self._period_s

    def _give_back_forgotten(self, now: float) -> None:
        for held in self._held.snapshot(lambda held: held.phase is Phase.RESERVED):
            reserved_s = now - held.reserved_at
            if not held.adopted or reserved_s <= self._lease_s * held.control.patience():
                continue
            if self._give_back(held, "it lay in the worker for longer than a lease and did not begin"):
                logger.warning("job %s was given back: reserved for %.0f s and not begun", held.claim.id, reserved_s)
