"""Knows what is paused, so that a claim need not ask.

The document of what is paused is read by a thread of its own, apart from the claims. While a stream tells of
changes (``heard``) it is read rarely; without one, twice a second. So a pause is seen within a second, an idle
worker asks for next to nothing, and a claim costs no round trip more. Nothing is claimed before the first answer.

Jobs of a paused type are put on a shelf by whoever pauses, and by workers that meet one later. A worker that has
not heard of a resume yet may put one there after it: so each tidies the shelf a while after it saw a change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from math import inf
from time import monotonic
from typing import Protocol

from relata_celery.domain.errors import StoreError, StoreUnavailable
from relata_celery.domain.pauses import Paused

from .background import Background

logger = logging.getLogger("relata_celery")

#: Between two readings without and with a stream that tells of changes, in seconds.
PERIOD_S, HEARD_PERIOD_S = 0.5, 10.0
#: How long after a change the shelf is tidied, in seconds: by then all workers know of it.
TIDY_AFTER_S = 2.0


class PauseStore(Protocol):
    """What the store knows of pauses."""

    def paused(self) -> Paused:
        """What is paused now."""

    def bring_back(self, queues: Collection[str], paused_types: Collection[str]) -> int:
        """Take some jobs of types that are not paused off the shelf; how many (0: none is left there)."""


class Pausing(Background):
    name = "pauses"

    def __init__(
        self,
        store: PauseStore,
        consumed: Callable[[], Collection[str]],
        on_change: Callable[[], None],
        random: Callable[[], float],
    ) -> None:
        super().__init__(random=random)
        #: Whether changes are told at this moment: then :meth:`wake` is called for each.
        self.heard: Callable[[], bool] = lambda: False
        self._store = store
        self._consumed = consumed
        self._on_change = on_change
        self._paused: Paused | None = None
        self._asked = False
        self._read_at = -inf
        self._tidy_at = inf

    @property
    def known(self) -> Paused | None:
        """What is paused as far as is known; None before the first answer."""
        return self._paused

    def wake(self) -> None:
        """Read the document now."""
        self._asked = True
        super().wake()

    def step(self) -> float | None:
        asked, self._asked = self._asked, False
        now = monotonic()
        if asked or not self.heard() or now - self._read_at >= HEARD_PERIOD_S:
            self._read_at = now
            self.look()
        if now >= self._tidy_at:
            self._tidy()
        return PERIOD_S

    def look(self) -> Paused:
        """Read the document; raises StoreUnavailable. One that may not be read pauses nothing."""
        try:
            paused = self._store.paused()
            self.answered()
        except StoreUnavailable:
            raise
        except StoreError as exc:
            if self._paused is None:
                logger.error("what is paused cannot be read, so nothing is: %s", exc)
            paused = self._paused or Paused()
        before, self._paused = self._paused, paused
        if before is None or not paused.same_names(before):
            self._tidy_at = monotonic() + TIDY_AFTER_S
            if before is not None or paused.queues or paused.types:
                logger.info("paused queues: %s; paused types: %s", _named(paused.queues), _named(paused.types))
            self._on_change()
        return paused

    def _tidy(self) -> None:
        self._tidy_at = inf
        while not self.stopping and self._paused is not None:
            if not self._store.bring_back(self._consumed(), self._paused.types):
                return
            self._on_change()


def _named(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
