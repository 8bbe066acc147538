"""Filters and update pipelines for what a person does to jobs: look, cancel, retry. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from relata_celery.domain.job import AttemptOutcome, ErrorClass, JobState

from .client import Document
from .codec import COLLECTION
from .job_queries import (
    CANCELLED,
    FAILED,
    NOW,
    QUEUED,
    REMOVE,
    RUNNING,
    SHELVED,
    Pipeline,
    cancelled_if,
    entry_of,
    expire_at,
    has_type,
    literal,
    number_of,
    with_entry,
)

#: What a listing may be sorted by. Only the first is served by an index, at any number of jobs.
SORT_FIELDS = ("created_at", "run_at", "started_at", "finished_at", "attempts", "type", "queue")


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs are meant; what is left empty does not restrict. ``text`` is looked for, without regard to
    case, in id, type, item_id and error. Times are of ``created_at``: since <= it < until."""

    states: Collection[JobState] = ()
    types: Collection[str] = ()
    queues: Collection[str] = ()
    error_class: ErrorClass | None = None
    item_id: str | None = None
    tag: str | None = None
    text: str | None = None
    created_since: datetime | None = None
    created_until: datetime | None = None

    def query(self) -> Document:
        """The filter as MongoDB's."""
        branches = self.branches()
        return branches[0] if len(branches) == 1 else {"$or": branches}

    def branches(self) -> list[Document]:
        """One query per state asked for, each of which that state's own index serves."""
        query: Document = {}
        for name, values in (("type", self.types), ("queue", self.queues)):
            if values:
                query[name] = {"$in": list(values)}
        if self.error_class is not None:
            query["error_class"] = ErrorClass(self.error_class).value
        if self.item_id is not None:
            query["item_id"] = self.item_id
        if self.tag is not None:
            query["tags"] = self.tag
        if self.text:
            pattern = {"$regex": re.escape(self.text), "$options": "i"}
            query["$or"] = [{name: pattern} for name in ("_id", "type", "item_id", "error")]
        created = {"$gte": self.created_since, "$lt": self.created_until}
        if bounds := {name: moment for name, moment in created.items() if moment is not None}:
            query["created_at"] = bounds
        states = list(dict.fromkeys(JobState(state).value for state in self.states))
        return [{"state": state, **query} for state in states] or [query]

    def page(self, sort: str, skip: int, limit: int) -> list[Document]:
        """A page of the listing as an aggregation.

        The states' first ``skip + limit`` jobs are put together: MongoDB reads several partial indexes
        side by side for a plain ``$or`` only if it need not keep an order.
        """
        sorting: Document = {"$sort": dict(order(sort))}
        first, *others = ([{"$match": branch}, sorting, {"$limit": skip + limit}] for branch in self.branches())
        united: list[Document] = [{"$unionWith": {"coll": COLLECTION, "pipeline": other}} for other in others]
        return [*first, *united, *([sorting] if others else []), {"$skip": skip}, {"$limit": limit}]


def order(sort: str) -> list[tuple[str, int]]:
    """``created_at`` or ``-created_at`` (newest first) as MongoDB's sort; ValueError on another field."""
    name = sort.removeprefix("-")
    if name not in SORT_FIELDS:
        raise ValueError(f"jobs cannot be sorted by {sort!r}, expected one of {', '.join(SORT_FIELDS)}")
    return [(name, -1 if sort.startswith("-") else 1)]


def live(ids: Sequence[str]) -> Document:
    """Those of these jobs that are not finished."""
    return {"_id": {"$in": list(ids)}, "state": {"$in": [QUEUED, RUNNING]}}


def cancel(retention_s: float | None, reason: str) -> Pipeline:
    """To cancelled. A running attempt is fenced off by it, gets its entry, and is told when it renews."""
    running = {"$eq": ["$state", RUNNING]}
    entry = entry_of("$attempts", AttemptOutcome.CANCELLED, ErrorClass.CANCELLED, literal(reason))
    recorded = {name: {"$cond": [running, value, f"${name}"]} for name, value in with_entry(entry).items()}
    return [
        {
            "$set": {
                **recorded,
                "state": CANCELLED,
                "error": literal(reason),
                "error_class": ErrorClass.CANCELLED.value,
                "cancel_requested": {"$cond": [running, True, REMOVE]},
                "finished_at": NOW,
                "expire_at": expire_at(retention_s),
                "unique_live": REMOVE,
                "exception": REMOVE,
                "lease": REMOVE,
                "custom": REMOVE,
            }
        }
    ]


def revoke(retention_s: float | None) -> Pipeline:
    """What waits is cancelled; what runs may end, and is cancelled where it would wait again."""
    waits = {"$eq": ["$state", QUEUED]}
    fields = cancelled_if(waits, retention_s)
    return [{"$set": {**fields, "revoked": {"$cond": [waits, "$revoked", True]}}}]


def retriable(job_id: str) -> Document:
    """The job if it ended without success."""
    return {"_id": job_id, "state": {"$in": [FAILED, CANCELLED]}}


def retry() -> Pipeline:
    """Failed or cancelled to queued, due now, attempts counted anew. History, fence and progress are kept.

    ``expires_at`` goes: a person who asks for another run does not want it refused as too late.
    """
    cleared = ("result", "ignored", "placeholder", "forgotten", "error", "error_class", "exception", "custom")
    on_shelf = {"$gte": [number_of("$rank"), SHELVED]}
    ended = ("finished_at", "expire_at", "expires_at", "cancel_requested", "revoked", "lease")
    return [
        {
            "$set": {
                **dict.fromkeys((*cleared, *ended, "snoozed_ms"), REMOVE),
                "state": QUEUED,
                "run_at": NOW,
                "attempts": literal(0),
                # One that was cancelled on the shelf of a paused type, which may be paused no more.
                "rank": {"$cond": [on_shelf, {"$subtract": ["$rank", SHELVED]}, "$rank"]},
                "unique_live": {"$cond": [has_type("$unique_key", "string"), "$unique_key", REMOVE]},
            }
        }
    ]
