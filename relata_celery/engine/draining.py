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

from .claiming import Claimer
from .held import Held, Phase
from .settling import Settler

logger = logging.getLogger("relata_celery")

#: How long what is given back may take to be written before processes are killed, in seconds.
FLUSH_S = 5.0
#: How long a pool may take to stop once nothing runs in it any more, in seconds.
OVERRUN_S = 2.0


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
        self._over = threading.Event()  # running jobs have no more time
        self._given_back = threading.Event()
        self._finished = threading.Event()
        self._begun = False

    def begin(self) -> None:
        """Stop claiming, give back what never began, and start the clock. Returns at once."""
        if self._begun:
            return
        self._begun = True
        self._claimer.stop_claiming()
        for held in self._held.snapshot(lambda held: held.phase is Phase.RESERVED):
            self._settler.give_back(held, "the worker is shutting down; the job had not begun", only=Phase.RESERVED)
        threading.Thread(target=self._run, name="relata-drain", daemon=True).start()

    def now(self) -> None:
        """Do not wait for running jobs: give them back, and kill their processes where there are any.

        Returns when that is done, so that a pool that is stopped afterwards finds nothing to wait for.
        """
        self.begin()
        self._over.set()
        self._given_back.wait(FLUSH_S + 1.0)

    def finish(self, flush_s: float) -> bool:
        """The pool has stopped: give back what is left, and wait for the last writes."""
        self._finished.set()
        self._over.set()
        for held in self._held.snapshot(lambda held: held.phase is not Phase.SETTLING):
            self._settler.give_back(held, "the worker stopped before the job ended")
        return self._settler.flush(flush_s)

    def _run(self) -> None:
        told = self._over.wait(self._timeout_s)
        if not self._finished.is_set():
            self._release_running("cold shutdown" if told else f"drain_timeout ({self._timeout_s:.1f} s) is over")
        self._given_back.set()
        if not self._finished.wait(OVERRUN_S):
            self._on_overrun()

    def _release_running(self, why: str) -> None:
        left = self._held.snapshot(lambda held: held.phase is not Phase.SETTLING)
        if left:
            logger.warning("%s: %d running jobs are released and start elsewhere", why, len(left))
        for held in left:
            self._settler.give_back(held, "the worker was draining and the job did not end in time")
        self._settler.flush(FLUSH_S)
        for held in left:
            held.control.kill()
