"""Counting every job once, by queue, type and state: one pass over the collection, for a person's eyes."""

from __future__ import annotations

from dataclasses import dataclass

from .client import Database, Document, translated
from .codec import COLLECTION

#: A million documents take some seconds.
_SLOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Tally:
    """So many jobs are of this queue, type and state (as the documents say, known or not)."""

    queue: str
    type: str
    state: str
    jobs: int


def tally(database: Database) -> list[Tally]:
    """All jobs, counted by queue, type and state together."""
    with translated(timeout_s=_SLOW_S):
        rows = list(database.collection(COLLECTION).aggregate(pipeline()))
    return [_read(row["_id"], int(row["n"])) for row in rows]


def _read(key: Document, jobs: int) -> Tally:
    queue, type_, state = (str(key.get(name, "")) for name in ("queue", "type", "state"))
    return Tally(queue, type_, state, jobs)


def pipeline() -> list[Document]:
    key = {name: f"${name}" for name in ("queue", "type", "state")}
    return [{"$group": {"_id": key, "n": {"$sum": 1}}}]
