"""Messages that are not jobs (remote control, replies, worker events), and the bindings that route them.

Plain collections with ids and expiry times; no capped collection, no tailable cursor. Invariants:

- A message is delivered at most once, whoever reads: it belongs to the reader whose conditional write
  marked or removed it. Each mailbox has one reader by design; two of them share its messages.
- Nothing grows without bound. Messages expire, bindings of readers that are gone expire (so nothing
  more is put), and a mailbox keeps its newest ``cap`` messages: readers cut it back whenever they
  see a backlog, senders once in ``cap / 10`` messages.
- Whether something has expired is judged by the server's clock, not by when the TTL index prunes.
- Writes wait for the primary's memory only: what is lost in a failover is a reply or an event.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from bson import ObjectId
from pymongo import ASCENDING, DESCENDING, IndexModel
from pymongo.collection import Collection as MongoCollection

from .client import WEAK, Database, Document, translated

MESSAGES = "relata_mailboxes"
BINDINGS = "relata_bindings"
DEFAULT_CAP = 10_000
#: Queues whose messages since the last cut are remembered; past it all counts start anew.
_COUNTED_QUEUES = 10_000

_LIVE: Document = {"$expr": {"$gt": ["$expire_at", "$$NOW"]}}
_FOR_EVER_OR_LIVE: Document = {"$or": [{"expire_at": None}, _LIVE]}


class Binding(NamedTuple):
    """One entry of an exchange's table. ``mailbox`` is false when the queue holds jobs."""

    routing_key: str
    pattern: str | None
    queue: str
    mailbox: bool


class Post(NamedTuple):
    """A message for some queues, and how many seconds it is good for."""

    queues: Sequence[str]
    message: Mapping[str, Any]
    ttl_s: float


class Mailboxes:
    """Mailboxes and bindings of one database. Safe to share between threads."""

    def __init__(self, database: Database, *, cap: int = DEFAULT_CAP) -> None:
        self._database = database
        self._cap = cap
        self._lock = threading.Lock()
        self._put_since_cut: dict[str, int] = {}
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many messages this object has removed because a mailbox was over its cap."""
        return self._dropped

    def ensure_indexes(self) -> None:
        """Build the indexes that are missing."""
        expiry = IndexModel([("expire_at", ASCENDING)], name="relata_expire", expireAfterSeconds=0)
        by_queue = IndexModel([("queue", ASCENDING), ("_id", ASCENDING)], name="relata_queue")
        by_exchange = IndexModel([("exchange", ASCENDING)], name="relata_exchange")
        with translated(timeout_s=60.0):
            self._messages.create_indexes([by_queue, expiry])
            self._bindings.create_indexes([by_exchange, by_queue, expiry])

    # -- bindings -------------------------------------------------------------------------------

    def bind(
        self,
        exchange: str,
        routing_key: str,
        pattern: str | None,
        queue: str,
        mailbox: bool,
        expires_s: float | None,
    ) -> None:
        """Route an exchange's messages to a queue for ``expires_s`` seconds from now (None: for ever).

        The same binding made again counts from now anew.
        """
        fields: Document = {
            "exchange": exchange,
            "routing_key": routing_key,
            "pattern": pattern,
            "queue": queue,
            "mailbox": mailbox,
        }
        key = json.dumps([exchange, routing_key, pattern, queue])
        # Everything given is a literal: a routing key may begin with the "$" of an expression.
        update: Document = {name: {"$literal": value} for name, value in fields.items()}
        update["expire_at"] = "$$REMOVE" if expires_s is None else _in(expires_s)
        with translated():
            self._bindings.update_one({"_id": key}, [{"$set": update}], upsert=True)

    def touch(self, queues: Collection[str], expires_s: float) -> None:
        """Have the bindings of these queues last ``expires_s`` from now; those for ever stay so."""
        with translated():
            self._bindings.update_many(
                {"queue": {"$in": list(queues)}, "expire_at": {"$exists": True}},
                [{"$set": {"expire_at": _in(expires_s)}}],
            )

    def unbind_queue(self, queue: str) -> None:
        """Remove all bindings of a queue."""
        with translated():
            self._bindings.delete_many({"queue": queue})

    def bindings(self, exchange: str) -> list[Binding]:
        """The bindings of an exchange that have not expired."""
        with translated():
            found = list(self._bindings.find({"exchange": exchange, **_FOR_EVER_OR_LIVE}))
        return [Binding(doc["routing_key"], doc["pattern"], doc["queue"], doc["mailbox"]) for doc in found]

    def is_mailbox(self, queue: str) -> bool:
        """Whether a queue was declared as a mailbox, by anyone.

        An expired binding counts for as long as it is there: what is sent to a reader that is late
        is still no job.
        """
        with translated():
            return self._bindings.find_one({"queue": queue, "mailbox": True}, {"_id": 1}) is not None

    # -- messages -------------------------------------------------------------------------------

    def put(self, queues: Sequence[str], message: Mapping[str, Any], ttl_s: float) -> None:
        """Put a copy of the message into each queue, for ``ttl_s`` seconds, in one write."""
        self.put_all([Post(queues, message, ttl_s)])

    def put_all(self, posts: Sequence[Post]) -> None:
        """Put these messages into their queues in one write; they keep their order."""
        now = self._database.clock.now()
        documents: list[Document] = [
            {
                "_id": ObjectId(),
                "queue": queue,
                "message": post.message,
                "at": now,
                "expire_at": now + timedelta(seconds=post.ttl_s),
            }
            for post in posts
            for queue in post.queues
        ]
        if not documents:
            return
        with translated():
            self._messages.insert_many(documents, ordered=False)
            for queue in self._due_for_a_cut([str(document["queue"]) for document in documents]):
                self._cut(queue)

    def take(self, queues: Collection[str], limit: int) -> list[tuple[str, Document]]:
        """Remove and return up to ``limit`` messages of these queues, oldest first.

        Messages of one sender keep their order. A lone message costs two round trips, any greater
        number three, an empty mailbox one. Expired messages that are met are removed, not returned.
        A reader that dies between marking and returning loses what it had marked.
        """
        if not queues or limit < 1:
            return []
        while True:
            with translated():
                page = self._page(queues, limit)
                if len(page) == limit > 1:
                    for queue in {doc["queue"] for doc in page}:
                        self._cut(queue)
                owned = self._own(page)
            taken = [(doc["queue"], doc["message"]) for doc in page if doc["live"] and doc["_id"] in owned]
            if taken or len(page) < limit:
                return taken

    def size(self, queue: str) -> int:
        """How many messages wait in a mailbox."""
        with translated():
            return self._messages.count_documents({"queue": queue, "reader": None, **_LIVE})

    def purge(self, queue: str) -> int:
        """Remove all messages of a mailbox; returns how many there were."""
        with translated():
            return self._messages.delete_many({"queue": queue}).deleted_count

    def delete_queue(self, queue: str) -> None:
        """Remove a mailbox: its bindings first, so that nothing more comes, then its messages."""
        self.unbind_queue(queue)
        self.purge(queue)

    # -- inside ---------------------------------------------------------------------------------

    def _page(self, queues: Collection[str], limit: int) -> list[Document]:
        """The oldest messages that nobody has marked, each with whether it is ``live``."""
        wanted = {"queue": {"$in": list(queues)}, "reader": None}
        fields = {"queue": 1, "message": 1, "live": {"$gt": ["$expire_at", "$$NOW"]}}
        return list(self._messages.find(wanted, fields).sort("_id", ASCENDING).limit(limit))

    def _own(self, page: Sequence[Document]) -> set[ObjectId]:
        """Remove the page's messages; the ids of those that no other reader had before us."""
        ids = [doc["_id"] for doc in page]
        if not ids:
            return set()
        if len(ids) == 1:
            found = self._messages.find_one_and_delete({"_id": ids[0], "reader": None}, {"_id": 1})
            return set(ids) if found else set()
        reader = ObjectId()
        marked = self._messages.update_many(
            {"_id": {"$in": ids}, "reader": None}, {"$set": {"reader": reader}}
        ).modified_count
        if marked < len(ids):
            mine = self._messages.find({"_id": {"$in": ids}, "reader": reader}, {"_id": 1})
            ids = [doc["_id"] for doc in mine]
        self._messages.delete_many({"_id": {"$in": ids}})
        return set(ids)

    def _due_for_a_cut(self, queues: Sequence[str]) -> list[str]:
        """Count one more message for each queue; those whose count says that it is time to look."""
        due = []
        with self._lock:
            if len(self._put_since_cut) > _COUNTED_QUEUES:
                self._put_since_cut.clear()
            for queue in queues:
                count = self._put_since_cut.get(queue, 0) + 1
                if count >= max(self._cap // 10, 1):
                    count = 0
                    due.append(queue)
                self._put_since_cut[queue] = count
        return due

    def _cut(self, queue: str) -> None:
        """Remove all but the newest ``cap`` messages of a mailbox."""
        newest_too_many = self._messages.find_one(
            {"queue": queue}, {"_id": 1}, sort=[("_id", DESCENDING)], skip=self._cap
        )
        if newest_too_many is not None:
            removed = self._messages.delete_many({"queue": queue, "_id": {"$lte": newest_too_many["_id"]}})
            with self._lock:
                self._dropped += removed.deleted_count

    @property
    def _messages(self) -> MongoCollection[Document]:
        return self._database.collection(MESSAGES, write=WEAK)

    @property
    def _bindings(self) -> MongoCollection[Document]:
        return self._database.collection(BINDINGS, write=WEAK)


def _in(seconds: float) -> Document:
    """The server's now plus ``seconds``, as an expression."""
    return {"$add": ["$$NOW", int(seconds * 1000)]}
