"""Shutdown: no more claims; running jobs may end; what does not is given back at once.

From the moment draining begins no claim is sent, and one in flight is handed back. Reserved jobs
that never began are released uncounted. Running ones go on, their leases renewed, until
``drain_timeout``; what is left then is told to stop, released uncounted, and its process killed,
so that it starts elsewhere now and nobody waits for the lease. The drain has a hard end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from relata_celery.domain.outcome import Released

from .claiming import Claimer
from .held import Held, HeldJob, Phase, StopReason
from .settling import Settler

logger = logging.getLogger("relata_celery")


class Drain:
    def __init__(
        self,
        held: Held,
        claimer: Claimer,
        settler: Settler,
        timeout_s: float,
        on_overrun: Callable[[], None],
    ) -> None:
        self._held = held
        self._claimer = claimer
        self._settler = settler
        self._timeout_s = timeout_s
        self._on_overrun = on_overrun
        self._finished = threading.Event()
        self._begun = False

    def begin(self) -> None:
        """Stop claiming, give back what never began, and start the clock. Returns at once."""
        if self._begun:
            return
        self._begun = True
        self._claimer.stop_claiming()
        for held in self._held.snapshot(lambda held: held.phase is Phase.RESERVED):
            self._give_back(held, "the worker is shutting down; the job had not begun")
        threading.Thread(target=self._overrun, name="relata-drain", daemon=True).start()

    def now(self) -> None:
        """Do not wait for running jobs: give them back, and kill their processes where there are any."""
        self.begin()
        self._release_running()

    def finish(self, flush_s: float) -> bool:
        """The pool has stopped: give back what is left, and wait for the last writes."""
        self._finished.set()
        for held in self._held.snapshot(lambda held: held.phase is not Phase.SETTLING):
            self._give_back(held, "the worker stopped before the job ended")
        return self._settler.flush(flush_s)

    def _overrun(self) -> None:
        if self._finished.wait(self._timeout_s):
            return
        left = self._held.snapshot(lambda held: held.phase is not Phase.SETTLING)
        if left:
            logger.warning(
                "drain_timeout (%.1f s) is over: %d running jobs are released and start elsewhere",
                self._timeout_s,
                len(left),
            )
        self._release_running()
        if not self._finished.wait(2.0):
            self._on_overrun()

    def _release_running(self) -> None:
        left = self._held.snapshot(lambda held: held.phase is not Phase.SETTLING)
        for held in left:
            self._give_back(held, "the worker was draining and the job did not end in time")
        self._settler.flush(5.0)
        for held in left:
            if held.control is not None:
                held.control.kill()

    def _give_back(self, held: HeldJob, reason: str) -> None:
        if held.control is not None:
            held.control.interrupt(StopReason.DRAINED)
        self._settler.settle(held, Released(reason))
