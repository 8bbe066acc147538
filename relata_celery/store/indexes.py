"""The indexes of ``relata_jobs``: few, because each one is paid for at every transition of every job.

Most are partial: that of claiming holds only what waits, that of leases only what runs, so their size and
cost do not grow with the finished jobs kept. TTL prunes only; nothing that must be exact hangs on it. An index that
somebody built with other options is reported, never dropped: only its maker knows what it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pymongo import ASCENDING, DESCENDING, IndexModel
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from .client import Database, Document, translated
from .codec import COLLECTION

CLAIM = "relata_claim"
LEASE = "relata_lease"
UNIQUE = "relata_unique"
EXPIRE = "relata_expire"
CREATED = "relata_created"
FOLLOWUPS = "relata_followups"

#: IndexOptionsConflict, IndexKeySpecsConflict, CannotCreateIndex, DuplicateKey: one index's own trouble.
_CONFLICTS = frozenset({67, 85, 86, 11000})
_OPTIONS = ("unique", "sparse", "partialFilterExpression", "expireAfterSeconds")


@dataclass(frozen=True, slots=True)
class Index:
    """One index: its name, its keys in order, and the options that change what it does."""

    name: str
    keys: tuple[tuple[str, int], ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> IndexModel:
        return IndexModel(list(self.keys), name=self.name, **self.options)


def _of_state(name: str, state: str, *keys: tuple[str, int]) -> Index:
    """An index of one state's jobs alone: the others never touch it.

    ``state`` leads although it is constant in it: counting is then answered from the keys alone (the server
    does not know that a partial filter already implies the state, and would fetch).
    """
    return Index(name, (("state", ASCENDING), *keys), {"partialFilterExpression": {"state": state}})


#: A job that succeeds costs eight index writes: three when it is published, two when it is claimed, three
#: when it ends. Listing all states by one index over ``(state, created_at)`` cost five more.
INDEXES: tuple[Index, ...] = (
    _of_state(CLAIM, "queued", ("queue", ASCENDING), ("rank", ASCENDING), ("run_at", ASCENDING)),
    _of_state(LEASE, "running", ("lease.until", ASCENDING)),
    # A field of its own that only unfinished jobs have: a partial filter over several states needs 6.0.
    Index(UNIQUE, (("unique_live", ASCENDING),), {"unique": True, "sparse": True}),
    Index(EXPIRE, (("expire_at", ASCENDING),), {"expireAfterSeconds": 0, "sparse": True}),
    Index(CREATED, (("created_at", DESCENDING),)),
    *(
        _of_state(f"relata_{state}", state, ("created_at", DESCENDING))
        for state in ("succeeded", "failed", "cancelled")
    ),
    Index(
        FOLLOWUPS,
        (("finished_at", ASCENDING),),
        {"partialFilterExpression": {"followups": {"$exists": True}}},
    ),
)


def ensure_indexes(database: Database) -> list[str]:
    """Build what is missing; one short round trip when nothing is. Returns what could not be built."""
    collection = database.collection(COLLECTION)
    with translated(timeout_s=60.0):
        try:
            collection.create_indexes([index.model() for index in INDEXES])
        except OperationFailure as exc:
            if exc.code not in _CONFLICTS:
                raise
            return [problem for index in INDEXES if (problem := _build(collection, index))]
    return []


def _build(collection: Collection[Document], index: Index) -> str | None:
    try:
        collection.create_indexes([index.model()])
    except OperationFailure as exc:
        if exc.code not in _CONFLICTS:
            raise
        return f"index {index.name} cannot be built (code {exc.code}): see `relata doctor`"
    return None


def check_indexes(database: Database) -> list[str]:
    """What is missing or differs from what the queue expects, one sentence each; empty when all is well."""
    with translated():
        present = list(database.collection(COLLECTION).list_indexes())
    return [problem for index in INDEXES if (problem := _difference(index, present))]


def _difference(index: Index, present: list[Any]) -> str | None:
    wanted = {name: index.options[name] for name in _OPTIONS if name in index.options}
    alike = [found for found in present if tuple(found["key"].items()) == index.keys]
    named = [found for found in present if found["name"] == index.name]
    if named and not alike:
        return f"index {index.name} has the keys {dict(named[0]['key'])}, expected {dict(index.keys)}"
    if not alike:
        return f"index {index.name} on {dict(index.keys)} is missing"
    seen = [{name: _plain(found[name]) for name in _OPTIONS if name in found} for found in alike]
    if wanted in seen:
        return None
    return f"index {alike[0]['name']} on {dict(index.keys)} has the options {seen[0]}, expected {wanted}"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
