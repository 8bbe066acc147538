"""Notices a background part that ended, or that does not come round any more.

A worker whose claim thread has died looks healthy from outside: it answers, and does nothing. Its thread
cannot say so itself, so another looks at it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from .background import Background

logger = logging.getLogger("relata_celery")

PERIOD_S = 5.0
#: Longer than any single call to MongoDB may take, in seconds.
LATE_S = 60.0


class Pulse(Background):
    """Logs an error, once, for each part that is not alive or is later than ``late_s``; and when it is back."""

    name = "pulse"

    def __init__(
        self,
        parts: Sequence[Background],
        random: Callable[[], float],
        *,
        period_s: float = PERIOD_S,
        late_s: float = LATE_S,
    ) -> None:
        super().__init__(random=random)
        self._parts = parts
        self._period_s = period_s
        self._late_s = late_s
        self._told: set[str] = set()

    def first_wait_s(self) -> float:
        return self._period_s

    def step(self) -> float | None:
        for part in self._parts:
            trouble = self._trouble(part)
            if trouble and part.name not in self._told:
                self._told.add(part.name)
                logger.error("the worker's %s %s: restart the worker if that lasts", part.name, trouble)
            elif not trouble and part.name in self._told:
                self._told.discard(part.name)
                logger.warning("the worker's %s works again", part.name)
        return self._period_s

    def _trouble(self, part: Background) -> str | None:
        vitals = part.vitals()
        if part.stopping:
            return None
        if not vitals.alive:
            return "has ended"
        return f"has not come round for {vitals.late_s:.0f} s" if vitals.late_s > self._late_s else None
