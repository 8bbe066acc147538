"""Wakes whoever waits for a task's end, by one change stream for all waiters of the process.

Authority: none, as with every :mod:`.watch`. Whoever is woken looks, and looks now and then without being
woken; where there are no change streams (a standalone server) waiters are never woken, and ``streaming`` says
so. The stream is opened for the first waiter and closed when for half a minute there was none, so
between two waits of a loop it stays open. A forked child has waiters and a stream of its own.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from time import monotonic

from .client import Database
from .watch import Change, Watch

#: How long the stream stays open when nobody waits, in seconds.
LINGER_S = 30.0


class Waiter:
    """One who waits for the ends of some tasks. For one thread."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._heard: set[str] = set()
        self._all = False

    @property
    def streaming(self) -> bool:
        """Whether the change stream is open now: until it closes, what ends is heard of."""
        return self._ends.streaming

    def wait(self, timeout_s: float) -> Collection[str] | None:
        """Wait until one of the tasks has ended, or until the time is up; the ids heard of, None for "look at all".

        Opens the stream, if it is not open.
        """
        self._ends.open()
        self._event.wait(timeout_s)
        with self._lock:
            self._event.clear()
            heard, everything = self._heard, self._all
            self._heard, self._all = set(), False
        return None if everything or not heard else heard

    def tell(self, task_id: str | None) -> None:
        with self._lock:
            if task_id is None:
                self._all = True
            else:
                self._heard.add(task_id)
        self._event.set()


class Ends:
    """The waiters of this process on one database. Safe from any thread."""

    def __init__(self, database: Database) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Waiter]] = defaultdict(list)
        self._deserted_at: float | None = None
        self._watch = Watch.ends(database, self._asked, self._on_change)

    @property
    def streaming(self) -> bool:
        return self._watch.healthy

    @contextmanager
    def waiting_for(self, task_ids: Collection[str]) -> Iterator[Waiter]:
        """A waiter that hears, while the block lasts, of the ends of these tasks, and when the stream has opened."""
        waiter, ids = Waiter(self), list(task_ids)
        with self._lock:
            for task_id in ids:
                self._waiting[task_id].append(waiter)
            self._deserted_at = None
        try:
            yield waiter
        finally:
            with self._lock:
                for task_id in ids:
                    self._waiting[task_id].remove(waiter)
                    if not self._waiting[task_id]:
                        del self._waiting[task_id]
                if not self._waiting:
                    self._deserted_at = monotonic()

    def open(self) -> None:
        """Have the stream open; returns at once."""
        self._watch.rest(False)
        self._watch.start()

    def _asked(self) -> Collection[str]:
        """Asked by the watch every few seconds, and before it opens: the moment to rest if nobody waits any more."""
        with self._lock:
            deserted_at = self._deserted_at
            if deserted_at is not None and (monotonic() - deserted_at > LINGER_S or not self._watch.healthy):
                self._watch.rest(True)
        return ()

    def _on_change(self, change: Change) -> None:
        with self._lock:
            if change.id is None:
                told = {waiter for waiters in self._waiting.values() for waiter in waiters}
            else:
                told = set(self._waiting.get(change.id, ()))
        for waiter in told:
            waiter.tell(change.id)


class _Known:
    """This process's ends by URI."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[tuple[int, str], Ends] = {}

    def of(self, database: Database) -> Ends:
        # The pid is in the key too: a fork made by C code runs no Python hook.
        key = (os.getpid(), database.uri)
        with self._lock:
            if key not in self._ends:
                self._ends[key] = Ends(Database(database.uri))
            return self._ends[key]


# "One stream per process" needs a place, as the clients do.
_known = _Known()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_known.__init__)  # type: ignore[misc]


def ends_of(database: Database) -> Ends:
    """This process's waiters on this database."""
    return _known.of(database)
