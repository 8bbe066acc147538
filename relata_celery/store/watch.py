"""Wake-ups by change stream: a hint that something came, never the word of it.

Authority: none. A lost, late or doubled hint changes nothing but when somebody looks, so no resume
token is kept: a token can die (the server's log has moved on) and then never comes back. Whenever
the stream was opened, for whatever reason, ``on_change`` is called once with an empty :class:`Change`,
and its owner looks at everything; so nothing that happened in between waits for the next poll.

Cost: an open stream has the server look at every write of the database. An owner with more work than
it can take has the watch rest.

Failure: the stream is opened again, after a pause that grows with jitter. ``healthy`` is false
meanwhile, and the owner polls faster. On a server that has no change streams (a standalone) it
says so once and ends, with ``available`` false.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pymongo
from pymongo import ReadPreference
from pymongo.command_cursor import CommandCursor
from pymongo.errors import OperationFailure, PyMongoError

from relata_celery.domain.job import JobState

from .client import DEFAULT_DATABASE, MAJORITY, Database, Document, store_error
from .codec import COLLECTION as JOBS
from .job_queries import RUNNING
from .mailboxes import MESSAGES
from .results import RESULTS

logger = logging.getLogger("relata_celery")

#: One request in this time when nothing happens.
AWAIT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
#: "only supported on replica sets", unknown stage, unknown command: other servers' words for "never".
_NO_CHANGE_STREAMS = frozenset({40573, 40324, 59, 115, 303})


@dataclass(frozen=True, slots=True)
class Change:
    """What a stream told. ``queue`` and ``id`` are None where they are not known: then look at everything.

    ``run_at`` is when the job is due, by the server's clock. ``taken``: it was claimed, nothing is to be done.
    """

    queue: str | None = None
    id: str | None = None
    run_at: datetime | None = None
    taken: bool = False


Queues = Callable[[], Collection[str]]
OnChange = Callable[[Change], None]
#: For names of interest: the stages that pick out, of all changes, what the owner is told.
Wanted = Callable[[Collection[str]], list[Document]]


class Watch:
    """Follows one change stream on a thread of its own and reports to ``on_change``.

    ``queues`` gives the names of interest whenever it is asked; it is asked at least every five
    seconds, and at once after :meth:`refresh`. ``on_change`` is called on the watching thread, up to
    thousands of times a second: it should note what it was told and return.
    """

    def __init__(
        self, database: Database, collection: str | None, queues: Queues, on_change: OnChange, wanted: Wanted
    ) -> None:
        self._database = database
        self._collection = collection
        self._what = collection or "ends"
        self._queues = queues
        self._on_change = on_change
        self._wanted = wanted
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._awake = threading.Event()
        self._awake.set()
        self._refreshing = False
        self._cursor_id: int | None = None
        self._followed: frozenset[str] = frozenset()
        self._healthy = False
        self._available = True

    @classmethod
    def jobs(cls, database: Database, queues: Queues, on_change: OnChange) -> Watch:
        """A watch for jobs that are published, put back into a queue, or claimed."""
        return cls(database, JOBS, queues, on_change, lambda names: _of_queues(names, updates=True))

    @classmethod
    def mailboxes(cls, database: Database, queues: Queues, on_change: OnChange) -> Watch:
        """A watch for messages put into mailboxes."""
        return cls(database, MESSAGES, queues, on_change, lambda names: _of_queues(names, updates=False))

    @classmethod
    def ends(cls, database: Database, queues: Queues, on_change: OnChange) -> Watch:
        """A watch for jobs and plain tasks, whatever their queue, that have ended."""
        return cls(database, None, queues, on_change, lambda _names: _ENDED)

    @property
    def healthy(self) -> bool:
        """Whether a stream is open now: while it is, rare polls are enough."""
        return self._healthy

    @property
    def available(self) -> bool:
        """False once the server was found to have no change streams; the watch has ended then."""
        return self._available

    def start(self) -> bool:
        """Begin to watch; returns at once. A second call, or one after ``stop``, does nothing and says False."""
        with self._lock:
            if self._thread is not None or self._stopping.is_set():
                return False
            name = f"relata-watch-{self._what}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
            return True

    def stop(self, timeout_s: float = 0.2) -> None:
        """End the watch; waits ``timeout_s`` for its thread. May be called at any time, and again.

        On a server where nothing is written the thread's last request ends by itself, up to five
        seconds later; nothing is reported any more.
        """
        self._stopping.set()
        self._awake.set()
        self._interrupt()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def refresh(self) -> None:
        """Ask for the names of interest again, no later than at the next write to the server.

        So what is put into a queue after this call is heard of, whenever that is.
        """
        self._refreshing = True
        self._interrupt()

    def rest(self, resting: bool) -> None:
        """Close the stream, at the next change or within five seconds; or open it again.

        ``on_change`` is told to look when it is open.
        """
        if resting:
            self._awake.clear()
        else:
            self._awake.set()

    def _interrupt(self) -> None:
        """Have the server end the request that the watching thread waits in.

        A waiting request looks up when something is written, and finds its cursor killed then.
        Closing the cursor object from here would hand its session to others while it is in use.
        """
        cursor_id = self._cursor_id
        if cursor_id is None:
            return
        try:
            with pymongo.timeout(0.5):
                self._target().command("killCursors", self._collection or "$cmd.aggregate", cursors=[cursor_id])
        except PyMongoError:
            logger.debug("the change stream on %s was not interrupted", self._what, exc_info=True)

    # -- on the watching thread -----------------------------------------------------------------

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            self._queues()  # whose owner may find that there is nothing to watch for, and have this rest
            self._awake.wait()
            opened_at = time.monotonic()
            failure = self._round()
            self._healthy = False
            if failure is None:
                pause_s = FIRST_PAUSE_S
                continue
            if isinstance(failure, OperationFailure) and failure.code in _NO_CHANGE_STREAMS:
                self._available = False
                logger.info("this MongoDB has no change streams (no replica set): polling instead")
                return
            if time.monotonic() - opened_at > 2 * LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            logger.log(
                logging.DEBUG if pause_s == FIRST_PAUSE_S else logging.WARNING,
                "the change stream on %s ended and is opened again: %s",
                self._what,
                store_error(failure) if isinstance(failure, PyMongoError) else type(failure).__name__,
                exc_info=None if isinstance(failure, PyMongoError) else failure,
            )
            self._stopping.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _round(self) -> Exception | None:
        """Open a stream and follow it to its end. None when the end was wanted, else the reason."""
        try:
            self._refreshing = False
            cursor = self._open()
            try:
                self._follow(cursor)
            finally:
                self._cursor_id = None
                with pymongo.timeout(0.5):
                    cursor.close()
        except Exception as exc:
            # Interrupted by refresh or stop: the server's "cursor killed" is what was asked for.
            wanted = self._refreshing or self._stopping.is_set()
            return None if wanted and isinstance(exc, PyMongoError) else exc
        return None

    def _open(self) -> CommandCursor[Document]:
        self._followed = frozenset(self._queues())
        target = self._target() if self._collection is None else self._target()[self._collection]
        cursor: CommandCursor[Document] = target.aggregate(
            [{"$changeStream": {}}, *self._wanted(self._followed)], maxAwaitTimeMS=int(self._await_s() * 1000)
        )
        self._cursor_id = cursor.cursor_id
        return cursor

    def _follow(self, cursor: CommandCursor[Document]) -> None:
        """Report until the stream should be opened anew: asked to, or for other queues."""
        self._healthy = True
        self._report(Change())
        while self._awake.is_set() and not self._stopping.is_set() and not self._refreshing:
            event = cursor.try_next()
            if event is not None:
                if self._stopping.is_set():
                    return
                self._report(_read(event))
            elif not cursor.alive:
                raise _StreamEnded("the server closed the change stream")
            elif frozenset(self._queues()) != self._followed:
                return

    def _report(self, change: Change) -> None:
        try:
            self._on_change(change)
        except Exception:
            logger.exception("a listener to changes of %s failed", self._what)

    def _await_s(self) -> float:
        """How long one request waits: less than the socket does, whatever time-out its URI gave it."""
        socket_timeout_s = self._database.client.options.pool_options.socket_timeout
        return min(AWAIT_S, socket_timeout_s / 2) if socket_timeout_s else AWAIT_S

    def _target(self) -> pymongo.database.Database[Document]:
        return self._database.client.get_default_database(DEFAULT_DATABASE).with_options(
            read_preference=ReadPreference.PRIMARY, read_concern=MAJORITY
        )


class _StreamEnded(PyMongoError):
    """The stream ended without an error (its collection was dropped or renamed)."""


def _of_queues(queues: Collection[str], *, updates: bool) -> list[dict[str, Any]]:
    """Only what the owner is told leaves the server. Of a job put back not even its queue is known to it."""
    mine = {"$in": sorted(queues)}
    wanted: list[Document] = [{"operationType": "insert", "fullDocument.queue": mine}]
    if updates:
        changed = "updateDescription.updatedFields"
        wanted.append({"operationType": "update", f"{changed}.state": "queued"})
        wanted.append({"operationType": "update", f"{changed}.lease.queue": mine})
    fields = ("fullDocument", "updateDescription.updatedFields")
    told = {f"{where}.{name}": 1 for where in fields for name in ("queue", "run_at", "state")}
    return [{"$match": {"$or": wanted}}, {"$project": {"documentKey": 1, **told}}]


_TERMINAL: Document = {"$in": [state.value for state in JobState if state.terminal]}
#: Jobs that end or are put on record as ended, and whatever is stored of plain tasks.
_ENDED: list[Document] = [
    {
        "$match": {
            "$or": [
                {"ns.coll": JOBS, "updateDescription.updatedFields.state": _TERMINAL},
                {"ns.coll": JOBS, "fullDocument.state": _TERMINAL},
                {"ns.coll": RESULTS},
            ]
        }
    },
    {"$project": {"documentKey": 1}},
]


def _read(event: Document) -> Change:
    description = event.get("updateDescription") or {}
    fields = event.get("fullDocument") or description.get("updatedFields") or {}
    run_at = fields.get("run_at")
    return Change(
        queue=fields.get("queue"),
        id=str((event.get("documentKey") or {}).get("_id")),
        run_at=run_at if isinstance(run_at, datetime) else None,
        taken=fields.get("state") == RUNNING,
    )
