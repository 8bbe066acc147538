"""The contract of every background part: one daemon thread, one loop, one way to stop.

``start()`` returns at once. ``stop()`` may be called twice, or before ``start()``. The loop catches
at its top, reports, backs off with jitter, and goes on: nothing a database does may end it
(a worker whose claim loop died silently is the field's oldest complaint).
No thread is started at import or construction, so nothing exists before a fork.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import monotonic

from relata_celery.domain.errors import StoreUnavailable

logger = logging.getLogger("relata_celery")

#: Longest pause between two tries while the store is away, in seconds.
MAX_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a part fares. ``late_s``: for how long a step has lasted without an answer, or the next is overdue.

    ``answered_s_ago`` is None when MongoDB has not answered it yet, or it does not ask.
    """

    alive: bool
    late_s: float
    answered_s_ago: float | None


class Background:
    """Runs ``self.step()`` again and again on a thread of its own.

    ``step()`` does one round and returns how long to wait for the next, in seconds
    (None: until woken). ``wake()`` ends the wait early; a wake that comes while a step runs is
    not lost. A step that MongoDB has answered says so with ``answered()``. Safe from any thread.
    """

    name = "background"

    def __init__(self, *, random: Callable[[], float]) -> None:
        self._random = random
        self._condition = threading.Condition()
        self._woken = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._unanswered = 0
        self._answered_at: float | None = None
        self._expected_at = inf

    def step(self) -> float | None:
        raise NotImplementedError

    def first_wait_s(self) -> float:
        """How long to wait before the first step."""
        return 0.0

    def start(self) -> None:
        with self._condition:
            if self._thread is not None or self._stopping:
                return
            self._thread = threading.Thread(target=self._run, name=f"relata-{self.name}", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def answered(self) -> None:
        """MongoDB has answered: said by the step that asked."""
        if self._unanswered:
            logger.info("%s: MongoDB is back after %d failed tries", self.name, self._unanswered)
        self._unanswered = 0
        self._answered_at = self._expected_at = monotonic()

    def vitals(self) -> Vitals:
        """How it fares at this moment. A part that was stopped, or not started, is not alive."""
        now, answered_at = monotonic(), self._answered_at
        ago_s = None if answered_at is None else now - answered_at
        return Vitals(self.alive, max(now - self._expected_at, 0.0), ago_s)

    def _run(self) -> None:
        self._wait(self.first_wait_s())
        while not self._stopping:
            self._expected_at = monotonic()
            try:
                pause = self.step()
            except StoreUnavailable as exc:
                self._unanswered += 1
                pause = self._after_failure(f"{self.name}: MongoDB cannot be reached: {exc}", unexpected=False)
            except Exception:
                pause = self._after_failure(f"{self.name}: unexpected error", unexpected=True)
            else:
                self._failures = 0
            self._wait(pause)

    def _after_failure(self, text: str, *, unexpected: bool) -> float:
        if self._stopping:  # its client may be closed by now: nothing to tell, nothing to try again
            return 0.0
        self._failures += 1
        longest_s = min(0.1 * 2.0 ** min(self._failures, 6), MAX_BACKOFF_S)
        pause = longest_s * (0.5 + self._random() / 2)
        if unexpected:
            logger.exception("%s; trying again in %.1f s", text, pause)
        elif self._unanswered == 1 or self._unanswered % 20 == 0:
            logger.warning("%s; trying again in %.1f s", text, pause)
        return pause

    def _wait(self, pause_s: float | None) -> None:
        self._expected_at = inf if pause_s is None else monotonic() + pause_s
        with self._condition:
            self._condition.wait_for(lambda: self._woken or self._stopping, pause_s)
            self._woken = False
