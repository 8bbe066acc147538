"""The document of what is paused, and the shelf for waiting jobs of a paused type. Pure.

    _id      "paused"
    queues   [{name, at}]    at: since when, by the server's clock
    types    [{name, at}]

A paused queue is left out of the claims' queues, which costs nothing. A paused type cannot be left out so: its
backlog at the head of a queue would be passed over by every claim anew. So its waiting jobs are put on a *shelf*:
``rank`` is raised by ``SHELVED``, beyond what a claim looks at; they stay queued, and keep their order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .client import Document
from .job_queries import NOW, QUEUED, SHELVED, Pipeline, literal

COLLECTION = "relata_control"
PAUSED_ID = "paused"


def _entries(field: str) -> Document:
    return {"$cond": [{"$isArray": field}, field, []]}


def add(kind: str, names: Sequence[str]) -> Pipeline:
    """Add what is not paused yet; what is keeps its moment."""
    present = {"$map": {"input": _entries(f"${kind}"), "as": "entry", "in": "$$entry.name"}}
    new = {"$filter": {"input": literal(list(names)), "as": "name", "cond": {"$not": {"$in": ["$$name", present]}}}}
    entries = {"$map": {"input": new, "as": "name", "in": {"name": "$$name", "at": NOW}}}
    return [{"$set": {kind: {"$concatArrays": [_entries(f"${kind}"), entries]}}}]


def remove(kind: str, names: Sequence[str]) -> Pipeline:
    keep = {"$not": {"$in": ["$$entry.name", literal(list(names))]}}
    return [{"$set": {kind: {"$filter": {"input": _entries(f"${kind}"), "as": "entry", "cond": keep}}}}]


def to_shelve(types: Collection[str]) -> Document:
    """Waiting jobs of these types that a claim would look at."""
    return {"state": QUEUED, "rank": {"$lt": SHELVED}, "type": {"$in": list(types)}}


def shelved(types: Collection[str]) -> Document:
    """The shelved jobs of these types."""
    return {"state": QUEUED, "rank": {"$gte": SHELVED}, "type": {"$in": list(types)}}


def left_on_the_shelf(queues: Collection[str], paused_types: Collection[str]) -> Document:
    """Shelved jobs of these queues whose type is not paused."""
    wrong = {"$nin": list(paused_types)}
    return {"state": QUEUED, "queue": {"$in": list(queues)}, "rank": {"$gte": SHELVED}, "type": wrong}


def unshelve(ids: Sequence[Any]) -> tuple[Document, Document]:
    """Take these off the shelf (see :func:`.job_queries.shelve`): the filter and the update."""
    return {"_id": {"$in": list(ids)}, "state": QUEUED, "rank": {"$gte": SHELVED}}, {"$inc": {"rank": -SHELVED}}
