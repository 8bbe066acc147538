"""What is paused, on MongoDB: one document that every worker reads, and the shelf for jobs of paused types.

Durable: the document is written with majority before a call returns. Workers hear of a change through the
stream that they follow for their mailboxes (a hint); they read the document from time to time in any case.

Every call may be sent again after StoreUnavailable.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from pymongo import ReturnDocument
from pymongo.collection import Collection as MongoCollection

from relata_celery.domain.errors import StoreError
from relata_celery.domain.pauses import MAX_NAMES, Paused, checked_name

from . import pause_queries as queries
from .client import Database, Document, translated
from .codec import COLLECTION as JOBS
from .indexes import CLAIM
from .job_queries import shelve
from .mailboxes import Mailboxes
from .pause_queries import COLLECTION, PAUSED_ID

logger = logging.getLogger("relata_celery")

Kind = Literal["queues", "types"]

#: The mailbox that nobody reads: a message for it tells those who follow it to look at the document.
HINT_QUEUE = "relata.paused"
_HINT_TTL_S = 60.0
#: Jobs that are moved at once: bounded, so that a long backlog is many short writes.
_CHUNK = 1000
_SLOW_S = 60.0


class Pauses:
    """Pauses and resumes (fulfils :class:`relata_celery.engine.pausing.PauseStore`). Safe from any thread."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def paused(self) -> Paused:
        """What is paused now."""
        with translated():
            found = self._control().find_one({"_id": PAUSED_ID})
        return _paused(found or {})

    def pause(self, kind: Kind, names: Sequence[str]) -> dict[str, bool]:
        """Pause these queues or types; of each, whether that is new. Waiting jobs of a type are shelved.

        Raises ValueError for a name that cannot be one, or when too many would be paused.
        """
        names = [checked_name(name) for name in dict.fromkeys(names)]
        before = self._names(self.paused(), kind)
        if len({*before, *names}) > MAX_NAMES:
            raise ValueError(f"more than {MAX_NAMES} {kind} cannot be paused")
        before = self._names(self._change(queries.add(kind, names)), kind)
        if kind == "types":
            self._move(queries.to_shelve(names), to_shelf=True)
        return {name: name not in before for name in names}

    def resume(self, kind: Kind, names: Sequence[str]) -> dict[str, bool]:
        """Let these queues or types be claimed again; of each, whether it was paused."""
        names = [checked_name(name) for name in dict.fromkeys(names)]
        before = self._names(self._change(queries.remove(kind, names)), kind)
        if kind == "types" and self._move(queries.shelved(names), to_shelf=False):
            self._hint()
        return {name: name in before for name in names}

    def bring_back(self, queues: Collection[str], paused_types: Collection[str]) -> int:
        """Take some jobs of types that are not paused off the shelf; how many (0: none is left there).

        A worker that had not heard of a resume may have shelved them after it.
        """
        if not queues:
            return 0
        return self._move_some(queries.left_on_the_shelf(queues, paused_types), to_shelf=False, hint=CLAIM)

    def _change(self, pipeline: Any) -> Paused:
        """Change the document, tell the workers; what it said before."""
        with translated():
            before = self._control().find_one_and_update(
                {"_id": PAUSED_ID}, pipeline, upsert=True, return_document=ReturnDocument.BEFORE
            )
        self._hint()
        return _paused(before or {})

    def _hint(self) -> None:
        try:
            Mailboxes(self.database).put([HINT_QUEUE], {}, _HINT_TTL_S)
        except StoreError as exc:
            logger.debug("workers see a changed pause a few seconds later: %s", exc)

    def _move(self, query: Document, *, to_shelf: bool) -> int:
        moved = 0
        while some := self._move_some(query, to_shelf=to_shelf):
            moved += some
        return moved

    def _move_some(self, query: Document, *, to_shelf: bool, hint: str | None = None) -> int:
        with translated(timeout_s=_SLOW_S):
            found = self._jobs().find(query, {"_id": 1}, hint=hint, limit=_CHUNK)
            ids = [document["_id"] for document in found]
            if ids:
                which, update = shelve(ids) if to_shelf else queries.unshelve(ids)
                self._jobs().update_many(which, update, hint="_id_")
        return len(ids)

    @staticmethod
    def _names(paused: Paused, kind: Kind) -> Collection[str]:
        return paused.queues if kind == "queues" else paused.types

    def _control(self) -> MongoCollection[Document]:
        return self.database.collection(COLLECTION)

    def _jobs(self) -> MongoCollection[Document]:
        return self.database.collection(JOBS)


def _paused(document: Mapping[str, Any]) -> Paused:
    """The document read with tolerance: an entry without a name pauses nothing."""
    return Paused(_by_name(document.get("queues")), _by_name(document.get("types")))


def _by_name(entries: Any) -> dict[str, datetime | None]:
    named = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    moments = {entry["name"]: entry.get("at") for entry in named if isinstance(entry.get("name"), str)}
    return {name: at if isinstance(at, datetime) else None for name, at in moments.items()}
