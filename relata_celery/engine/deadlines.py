"""Every attempt has a hard end, in every pool.

At its soft deadline (the job's timeout, or Celery's soft limit) the handler is interrupted; at its
hard deadline (the timeout plus a grace) the process is killed where there is one, and the attempt
is settled as a time-out whether or not its code still runs. A lease whose local deadline passed
without an accepted renewal ends its attempt too: another worker may have the job by now.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from relata_celery.domain.job import ErrorClass
from relata_celery.domain.outcome import ErrorInfo, Failed

from .background import Background
from .held import AttemptControl, Held, HeldJob, Phase, StopReason
from .settling import Settler

#: How often deadlines are looked at while anything is held, in seconds.
TICK_S = 0.2


class Deadlines(Background):
    name = "deadlines"

    def __init__(
        self,
        held: Held,
        settler: Settler,
        on_lost: Callable[[HeldJob, StopReason, str], None],
        grace_s: float,
        on_tick: Callable[[], None],
        random: Callable[[], float],
    ) -> None:
        super().__init__(random=random)
        self._held = held
        self._settler = settler
        self._on_lost = on_lost
        self._grace_s = grace_s
        self._on_tick = on_tick
        self._doomed_lock = threading.Lock()
        self._dormant = True
        self._doomed: list[tuple[float, AttemptControl]] = []

    def step(self) -> float | None:
        self._on_tick()
        now = monotonic()
        for held in self._held.snapshot(lambda held: held.phase is not Phase.SETTLING):
            if now >= held.lease_deadline:
                self._on_lost(held, StopReason.LEASE_LOST, "no renewal was accepted before the lease's local deadline")
            elif held.hard_deadline is not None and now >= held.hard_deadline:
                self._end(held, now)
            elif held.soft_deadline is not None and now >= held.soft_deadline[0]:
                self._interrupt(held, held.soft_deadline[1])
        self._kill_the_stubborn(now)
        self._dormant = not len(self._held) and not self._doomed
        return 1.0 if self._dormant else TICK_S

    def _interrupt(self, held: HeldJob, reason: StopReason) -> None:
        if held.interrupted is None:
            held.interrupted = reason
            held.control.interrupt(reason)

    def _end(self, held: HeldJob, now: float) -> None:
        ran_s = now - held.started_at if held.started_at is not None else 0.0
        error = ErrorInfo(
            ErrorClass.TIMEOUT,
            f"the job's time ran out: it was still running after {ran_s:.1f} s and did not stop when told",
            "JobTimeout",
            "relata_celery.domain.errors",
        )
        self._interrupt(held, StopReason.TIMEOUT)  # of use where nothing can be killed: it may still listen
        control = held.control
        followups = control.failure_followups(error)
        control.kill()
        self._settler.settle(
            held,
            Failed(error, followups, retry_on_timeout=held.retry_on_timeout, duration_ms=int(ran_s * 1000)),
        )

    def wake_if_idle(self) -> None:
        """Something began: resume ticking if nothing was held before (cheap when it ticks already)."""
        if self._dormant:
            self.wake()

    def doom(self, control: AttemptControl) -> None:
        """Kill this attempt's process after the grace, unless it has ended by then.

        For attempts that were told to stop because their lease is lost: nothing is written for
        them any more, but their slot must come back.
        """
        with self._doomed_lock:
            self._doomed.append((monotonic() + self._grace_s, control))

    def _kill_the_stubborn(self, now: float) -> None:
        with self._doomed_lock:
            due = [control for kill_at, control in self._doomed if kill_at <= now]
            self._doomed = [entry for entry in self._doomed if entry[0] > now]
        for control in due:
            control.kill()
