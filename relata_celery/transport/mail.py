"""Reads a worker's mailboxes on a thread of its own, apart from the jobs.

Remote control and events never share a query, a wake-up or a thread with claims: a flood of
events cannot slow a job, and a wake-up for a job never costs a look at a mailbox.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from relata_celery.engine.background import Background
from relata_celery.store.pauses import HINT_QUEUE
from relata_celery.store.watch import Change, Watch

if TYPE_CHECKING:
    from .transport import Transport

#: Between two looks with a healthy change stream, and without one, in seconds.
WATCHED_POLL_S, POLL_S = 5.0, 0.2


class MailReader(Background):
    name = "mail"

    def __init__(self, transport: Transport, random: Callable[[], float]) -> None:
        super().__init__(random=random)
        self._transport = transport
        self._watch: Watch | None = None
        self._resting = False

    def step(self) -> float | None:
        if not self._transport.listening:
            return None
        if self._watch is None:
            self._watch = self._transport.stores.watch_mailboxes(
                lambda: set(self._transport.listening), self._on_change
            )
            self._watch.rest(self._resting)
            self._watch.start()
        messages = self._transport.take_mail()
        self.answered()
        if messages:
            self._transport.deliver_mail(messages)
            return 0.0
        return WATCHED_POLL_S if self.watched else POLL_S

    @property
    def watched(self) -> bool:
        """Whether a change stream tells what comes at this moment."""
        return self._watch is not None and self._watch.healthy

    def _on_change(self, change: Change) -> None:
        if change.queue in (None, HINT_QUEUE):
            self._transport.pauses_changed()
        if change.queue != HINT_QUEUE:
            self.wake()

    def listening_changed(self) -> None:
        """A mailbox was added: have the change stream follow it, and look now."""
        self.start()
        if self._watch is not None:
            self._watch.refresh()
        self.wake()

    def rest(self, resting: bool) -> None:
        """Have the change stream rest, and poll; or open it again."""
        self._resting = resting
        if self._watch is not None:
            self._watch.rest(resting)
        self.wake()

    def stop(self, timeout_s: float = 2.0) -> None:
        if self._watch is not None:
            self._watch.stop()
        super().stop(timeout_s)
