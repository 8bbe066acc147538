"""Counting jobs, from indexes wherever there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relata_celery.domain.job import JobState

from . import job_queries as queries
from .client import Database, Document, translated
from .codec import COLLECTION

#: Counting a type reads documents; a million of them takes some seconds.
_SLOW_S = 60.0


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """One queue: jobs waiting, jobs running, and how long the oldest due one has waited (0: none due)."""

    queue: str
    queued: int
    running: int
    oldest_due_s: float


@dataclass(frozen=True, slots=True)
class Totals:
    """All queues together. ``expired_leases`` wait for a reaper, ``pending_followups`` to be published."""

    by_state: Mapping[JobState, int]
    expired_leases: int
    pending_followups: int


class Stats:
    """Counts of the queue. Safe from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def depths(self) -> list[QueueDepth]:
        """Every queue that has queued or running jobs, by name."""
        running = {str(row["_id"]): int(row["n"]) for row in self._grouped("queue", JobState.RUNNING)}
        with translated():
            waiting = self._database.collection(COLLECTION).distinct("queue", {"state": queries.QUEUED})
        names = sorted({str(name) for name in waiting} | set(running))
        return [QueueDepth(name, self._queued(name), running.get(name, 0), self._age(name)) for name in names]

    def totals(self) -> Totals:
        """Jobs by state, expired leases, pending follow-ups."""
        by_state = {state: self._count({"state": state.value}) for state in JobState}
        with translated():  # the count command does not know $$NOW
            expired = self._database.collection(COLLECTION).count_documents(queries.expired())
        return Totals(by_state, expired, self._count(queries.with_followups()))

    def oldest_expired_s(self) -> float:
        """How long the longest expired lease has waited for a reaper, in seconds by the server's clock (0: none).

        More than a ``reap_period`` or two says that no worker takes jobs back.
        """
        dated = {**queries.expired(), "lease.until": {"$type": "date"}}  # by hand it may become anything
        with translated():
            found = self._database.collection(COLLECTION).find_one(
                dated, queries.LATE_FIELDS, sort=[("lease.until", 1)]
            )
        return found["late_ms"] / 1000 if found else 0.0

    def by_type(self) -> dict[str, dict[JobState, int]]:
        """Jobs of every type by state. Reads every document: for a person, not for a timer."""
        counts: dict[str, dict[JobState, int]] = {}
        for state in JobState:
            for row in self._grouped("type", state):
                counts.setdefault(str(row["_id"]), {})[state] = int(row["n"])
        return counts

    def _queued(self, queue: str) -> int:
        return self._count({"state": queries.QUEUED, "queue": queue})

    def _age(self, queue: str) -> float:
        with translated():
            found = self._database.collection(COLLECTION).find_one(
                queries.waiting([queue]), queries.WAIT_FIELDS, sort=[("run_at", 1)]
            )
        wait_ms = (found or {}).get("wait_ms")
        return max(0.0, -wait_ms / 1000) if isinstance(wait_ms, (int, float)) else 0.0

    def _count(self, query: Document) -> int:
        # The count command, not an aggregation: it counts keys when an index covers the query.
        return int(self._database.command({"count": COLLECTION, "query": query})["n"])

    def _grouped(self, field: str, state: JobState) -> list[Document]:
        stages: list[Document] = [
            {"$match": {"state": state.value}},
            {"$group": {"_id": f"${field}", "n": {"$sum": 1}}},
        ]
        with translated(timeout_s=_SLOW_S):
            return list(self._database.collection(COLLECTION).aggregate(stages))
