"""What a person does to jobs: look at them, cancel, retry, remove. The worker's half is :mod:`.jobs`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pymongo import UpdateOne
from pymongo.collection import Collection as MongoCollection
from pymongo.errors import BulkWriteError

from relata_celery.domain.job import ErrorClass, Job, JobState

from . import by_hand_queries as queries
from .by_hand_queries import JobFilter
from .client import MAJORITY, Database, Document, translated
from .codec import COLLECTION, job_from_document
from .indexes import ensure_indexes
from .job_queries import QUEUED

#: Jobs of one update: bounded, so that a long list is many short writes and not one long lock.
_CHUNK = 1000


@dataclass(frozen=True, slots=True)
class Change:
    """What a cancel or retry did to one job: its state before (None: there is no such job) and whether it
    changed. ``reason`` says why it did not."""

    id: str
    before: JobState | None
    changed: bool
    reason: str | None = None


class ByHand:
    """Reading and changing jobs by hand. Safe from any thread; may be called again after StoreUnavailable."""

    def __init__(self, database: Database, *, retention_failed_s: float | None = None) -> None:
        self.database = database
        self._retention_failed_s = retention_failed_s
        self._prepared_pid = 0

    def _read(self) -> MongoCollection[Document]:
        """The collection for looking only: what a majority has, and nothing is built for it."""
        return self.database.collection(COLLECTION, read=MAJORITY)

    def _jobs(self) -> MongoCollection[Document]:
        """The collection; its indexes are built at this process's first use of it."""
        if self._prepared_pid != os.getpid():
            ensure_indexes(self.database)
            self._prepared_pid = os.getpid()
        return self.database.collection(COLLECTION)

    def get(self, job_id: str) -> Job | None:
        """The job, also when its document was edited into nonsense; None when there is none."""
        with translated():
            document = self._read().find_one({"_id": job_id})
        return None if document is None else job_from_document(document)

    def find(
        self,
        *,
        states: Collection[JobState] = (),
        types: Collection[str] = (),
        queues: Collection[str] = (),
        error_class: ErrorClass | None = None,
        item_id: str | None = None,
        tag: str | None = None,
        text: str | None = None,
        created_since: datetime | None = None,
        created_until: datetime | None = None,
        sort: str = "-created_at",
        skip: int = 0,
        limit: int = 100,
    ) -> list[Job]:
        """The jobs of which all this is true, newest first; what is left out does not restrict.

        ``message`` is read too: keep ``limit`` modest. ``text`` is looked for in id, type, item_id and error.
        Raises ValueError when ``limit`` is not positive, ``skip`` is negative, or there is no such ``sort``.
        """
        if limit < 1 or skip < 0:
            raise ValueError(f"limit is {limit} and skip {skip}, must be at least 1 and 0")
        where = JobFilter(
            states, types, queues, error_class, item_id, tag, text, created_since, created_until
        )
        with translated():
            return [job_from_document(document) for document in self._read().aggregate(where.page(sort, skip, limit))]

    def count(
        self,
        *,
        states: Collection[JobState] = (),
        types: Collection[str] = (),
        queues: Collection[str] = (),
        error_class: ErrorClass | None = None,
        item_id: str | None = None,
        tag: str | None = None,
        text: str | None = None,
        created_since: datetime | None = None,
        created_until: datetime | None = None,
    ) -> int:
        """How many jobs there are of which all this is true."""
        where = JobFilter(
            states, types, queues, error_class, item_id, tag, text, created_since, created_until
        )
        with translated():
            return self._read().count_documents(where.query())

    def queue_size(self, queue: str) -> int:
        """Jobs that wait in this queue, due or not; counted from the claim index's keys alone."""
        query = {"state": QUEUED, "queue": queue}
        return int(self.database.command({"count": COLLECTION, "query": query})["n"])

    def cancel(
        self,
        ids: Sequence[str] | str,
        retention_s: float | None = None,
        reason: str = "cancelled",
    ) -> dict[str, Change]:
        """Cancel queued and running jobs; finished ones stay as they are. One change per id asked for.

        A running attempt is fenced off at once: its worker learns of it at the next renewal, and what it
        still settles is refused. ``retention_s`` defaults to the one for failed jobs.
        """
        ids = _several(ids)
        kept_s = self._retention_failed_s if retention_s is None else retention_s
        changes: dict[str, Change] = {}
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            before = self._states(chunk)
            pipeline = queries.cancel(kept_s, reason)
            with translated():
                result = self._jobs().update_many(queries.live(chunk), pipeline, hint="_id_")
            live = {job_id for job_id, state in before.items() if not state.terminal}
            after = before if result.modified_count == len(live) else self._states(chunk)
            for job_id in chunk:
                changed = job_id in live and (after is before or after.get(job_id) is JobState.CANCELLED)
                why = None if changed else _unchanged(after.get(job_id))
                changes[job_id] = Change(job_id, before.get(job_id), changed, why)
        return changes

    def revoke(self, ids: Sequence[str] | str) -> None:
        """Have none of these jobs begin again: those that wait are cancelled, those that run may end.

        A running one that would be queued again (a retry, a lost worker, a drain) is cancelled then.
        """
        ids = _several(ids)
        pipeline = queries.revoke(self._retention_failed_s)
        for start in range(0, len(ids), _CHUNK):
            with translated():
                self._jobs().update_many(queries.live(ids[start : start + _CHUNK]), pipeline, hint="_id_")

    def retry(self, ids: Sequence[str] | str) -> dict[str, Change]:
        """Queue failed and cancelled jobs again, due now and with all attempts; others stay as they are.

        History and fence are kept, so an old attempt's outcome stays refused. A job whose unique key another
        unfinished job holds by now is not changed.
        """
        ids = _several(ids)
        changes: dict[str, Change] = {}
        for start in range(0, len(ids), _CHUNK):
            chunk = list(dict.fromkeys(ids[start : start + _CHUNK]))
            before = self._states(chunk)
            ended = [i for i in chunk if before.get(i) in (JobState.FAILED, JobState.CANCELLED)]
            taken = self._requeue(ended)
            for job_id in chunk:
                changed = job_id in ended and job_id not in taken
                why = None if changed else taken.get(job_id) or _unchanged(before.get(job_id))
                changes[job_id] = Change(job_id, before.get(job_id), changed, why)
        return changes

    def _requeue(self, ids: Sequence[str]) -> dict[str, str]:
        """Queue these again; for each that could not be, the reason."""
        if not ids:
            return {}
        pipeline = queries.retry()
        operations = [UpdateOne(queries.retriable(job_id), pipeline, hint="_id_") for job_id in ids]
        with translated():
            try:
                self._jobs().bulk_write(operations, ordered=False)
            except BulkWriteError as exc:
                details: Any = exc.details
                errors = details["writeErrors"]
                if details["writeConcernErrors"] or any(error["code"] != 11000 for error in errors):
                    raise
                reason = "another unfinished job holds its unique_key"
                return {ids[error["index"]]: reason for error in errors}
        return {}

    def purge(self, queue: str) -> int:
        """Remove every queued job of this queue; how many there were."""
        with translated(timeout_s=60.0):
            return self._jobs().delete_many({"state": QUEUED, "queue": queue}).deleted_count

    def delete(self, ids: Sequence[str] | str) -> int:
        """Remove these jobs whatever their state; a running attempt's outcome is then refused."""
        if not ids:
            return 0
        with translated(timeout_s=60.0):
            return self._jobs().delete_many({"_id": {"$in": _several(ids)}}).deleted_count

    def forget(self, job_id: str) -> bool:
        """Drop a finished job's result and exception; False when it is not finished or unknown."""
        finished = [state.value for state in JobState if state.terminal]
        update: Mapping[str, Any] = {"$set": {"forgotten": True}, "$unset": {"result": "", "exception": ""}}
        with translated():
            result = self._jobs().update_one({"_id": job_id, "state": {"$in": finished}}, update)
        return result.matched_count == 1

    def _states(self, ids: Sequence[str]) -> dict[str, JobState]:
        with translated():
            found = self._jobs().find({"_id": {"$in": list(ids)}}, {"state": 1})
            return {document["_id"]: job_from_document(document).state for document in found}


def _several(ids: Sequence[str] | str) -> list[str]:
    # A text is a sequence of texts too: without this, one id would be taken for its letters.
    return [ids] if isinstance(ids, str) else list(ids)


def _unchanged(state: JobState | None) -> str:
    return "there is no such job" if state is None else f"job is {state}"
