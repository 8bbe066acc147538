"""What a worker publishes that is no job, written to MongoDB by a thread of its own.

Events, replies and broadcasts are published from a worker's event loop, which also takes its signals and
hands its jobs to the pool: it must not wait for MongoDB. So they are put into a bounded box, in order,
and this thread finds their listeners and writes them in batches. While MongoDB is away they wait; when
the box is full the oldest go, for a listener wants the news. What MongoDB refuses is dropped.

Who listens to a worker's heartbeat is remembered for some seconds: an idle worker's then costs a read now and
then, and no write when nobody listens. For everything else the listeners are looked up, once in a batch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import random
from time import monotonic
from typing import TYPE_CHECKING, Any

from relata_celery.domain.errors import StoreUnavailable
from relata_celery.engine.background import Background
from relata_celery.store.mailboxes import Binding, Post

from . import envelope

if TYPE_CHECKING:
    from relata_celery.bootstrap import Stores

logger = logging.getLogger("relata_celery")

#: Most messages that wait.
CAPACITY = 10_000
#: Most messages in one write.
MAX_BATCH = 500
#: How long the listeners of an exchange are remembered, in seconds.
REMEMBERED_S = 10.0

#: Of an exchange's table of (key, pattern, queue): the queues that a message goes to.
Route = Callable[[Sequence[tuple[str, str | None, str]]], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Letter:
    """A message on its way to an exchange. ``remembered``: whether its listeners may be some seconds old."""

    exchange: str
    route: Route
    message: Mapping[str, Any]
    ttl_s: float
    remembered: bool


class Outbox(Background):
    """Posts letters in their order. Safe from any thread."""

    name = "outbox"

    def __init__(self, stores: Stores, *, capacity: int = CAPACITY) -> None:
        super().__init__(random=random)
        self._stores = stores
        self._capacity = capacity
        self._lock = threading.Lock()
        self._letters: deque[Letter] = deque()
        #: Being written, or to be tried again; no longer in the box.
        self._under_way: list[Letter] = []
        self._dropped = 0
        self._told = False
        self._empty = threading.Event()
        self._empty.set()
        self._remembered: dict[str, tuple[float, list[Binding]]] = {}

    @property
    def dropped(self) -> int:
        """How many letters were not written because the box was full, or MongoDB refused them."""
        return self._dropped

    def post(self, letter: Letter) -> None:
        """Take a letter; return at once."""
        with self._lock:
            if len(self._letters) >= self._capacity:
                self._letters.popleft()
                self._note_dropped(f"{self._capacity} events and replies wait for MongoDB: the oldest are dropped")
            self._letters.append(letter)
            self._empty.clear()
        self.start()
        self.wake()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written; False when the time ran out first."""
        return self._empty.wait(timeout_s)

    def step(self) -> float | None:
        with self._lock:
            while self._letters and len(self._under_way) < MAX_BATCH:
                self._under_way.append(self._letters.popleft())
        if not self._under_way:
            return None
        try:
            self._write(self._under_way)
        except StoreUnavailable:
            raise
        except Exception:
            self._write_singly()
        with self._lock:
            self._under_way = []
            if not self._letters:
                self._told = False
                self._empty.set()
                return None
        return 0.0

    def _write_singly(self) -> None:
        while self._under_way:
            letter = self._under_way[0]
            try:
                self._write([letter])
            except StoreUnavailable:
                raise
            except Exception as exc:
                with self._lock:
                    self._note_dropped(f"a message to {letter.exchange} is dropped: {exc}")
            del self._under_way[0]

    def _write(self, batch: Sequence[Letter]) -> None:
        fresh = {letter.exchange for letter in batch if not letter.remembered}
        exchanges = {letter.exchange for letter in batch}
        bindings = {exchange: self._bindings(exchange, exchange in fresh) for exchange in exchanges}
        posts: list[Post] = []
        for letter in batch:
            table = bindings[letter.exchange]
            wanted = set(letter.route([(key, pattern, queue) for key, pattern, queue, _mailbox in table]))
            mailboxes = wanted & {binding.queue for binding in table if binding.mailbox}
            if mailboxes:
                posts.append(Post(sorted(mailboxes), envelope.stored_copy(letter.message), letter.ttl_s))
            for queue in sorted(wanted - mailboxes):
                self._stores.jobs.enqueue([envelope.to_new_job(queue, letter.message)])
        self._stores.mailboxes.put_all(posts)
        self.answered()

    def _bindings(self, exchange: str, fresh: bool) -> list[Binding]:
        until, bindings = self._remembered.get(exchange, (0.0, []))
        if fresh or monotonic() >= until:
            bindings = self._stores.mailboxes.bindings(exchange)
            self._remembered[exchange] = monotonic() + REMEMBERED_S, bindings
        return bindings

    def _note_dropped(self, why: str) -> None:
        self._dropped += 1
        if not self._told:
            self._told = True
            logger.warning("%s (%d so far)", why, self._dropped)


class Outboxes:
    """This process's outboxes, one for each database that an event loop of it publishes to."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], Outbox] = {}

    def open(self, uri: str, stores: Stores) -> Outbox:
        """The outbox of this database; made when there is none."""
        key = (os.getpid(), uri)
        if key not in self._open:
            self._open[key] = Outbox(stores)
        return self._open[key]

    def of(self, uri: str) -> Outbox | None:
        """The outbox of this database, if a loop of this very process has one (a forked child has none)."""
        return self._open.get((os.getpid(), uri)) if self._open else None

    def close(self, uri: str, flush_s: float) -> None:
        """Write what waits and end the thread. What cannot be written in time waits for the next connection."""
        outbox = self.of(uri)
        if outbox is not None and outbox.flush(flush_s):
            del self._open[(os.getpid(), uri)]
            outbox.stop()


outboxes = Outboxes()
