"""Publishing: new jobs into ``relata_jobs``, idempotent by id, each judged by itself where its keys exist."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson.raw_bson import RawBSONDocument
from pymongo.errors import BulkWriteError, DuplicateKeyError

from relata_celery.domain.errors import DuplicateJob, InvalidJob, RelataError, StoreError, StoreUnavailable
from relata_celery.domain.job import NewJob

from . import job_queries as queries
from .by_hand import ByHand
from .client import CALL_TIMEOUT_S, Database, translated
from .codec import encode_new


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that was found fit to be stored, and its document, encoded once."""

    job: NewJob
    document: RawBSONDocument


class Inserts(ByHand):
    """Inserts jobs. ``default_max_attempts`` is for those that are published without their own."""

    def __init__(
        self,
        database: Database,
        *,
        default_max_attempts: int = 5,
        retention_failed_s: float | None = None,
    ) -> None:
        super().__init__(database, retention_failed_s=retention_failed_s)
        self._default_max_attempts = default_max_attempts

    def enqueue(self, jobs: Sequence[NewJob]) -> list[bool]:
        """Insert jobs as ``queued``; for each, whether it was inserted (True) or its id existed (False).

        Raises InvalidJob, with nothing written, when one of them cannot be stored; DuplicateJob when an
        unfinished job holds the unique key of one: the others of the batch are then published.
        """
        return self.insert([self.prepare(job) for job in jobs])

    def prepare(self, job: NewJob) -> Prepared:
        """The job's document, ready to be inserted; raises InvalidJob. Writes nothing."""
        return Prepared(job, encode_new(job, self.database.clock.now(), self._default_max_attempts))

    def insert(self, prepared: Sequence[Prepared]) -> list[bool]:
        """Insert prepared jobs in one write; answers and errors as in :meth:`enqueue`."""
        answers = self._insert(prepared)
        for answer in answers:
            if isinstance(answer, DuplicateJob):
                raise answer
        return [answer is True for answer in answers]

    def publish(self, jobs: Sequence[NewJob]) -> list[bool | RelataError]:
        """Insert each job that can be; for each, as :meth:`enqueue`, or the error that would be raised for it.

        Of what MongoDB refuses for another reason than a key, each is tried by itself.
        """
        answers: dict[int, bool | RelataError] = {}
        prepared: dict[int, Prepared] = {}
        for place, job in enumerate(jobs):
            try:
                prepared[place] = self.prepare(job)
            except InvalidJob as problem:
                answers[place] = problem
        answers |= zip(prepared, self._insert_each(list(prepared.values())), strict=True)
        return [answers[place] for place in range(len(jobs))]

    def _insert_each(self, prepared: Sequence[Prepared]) -> Sequence[bool | RelataError]:
        try:
            return self._insert(prepared)
        except StoreUnavailable:
            raise
        except StoreError as problem:
            if len(prepared) == 1:
                return [problem]
            return [answer for one in prepared for answer in self._insert_each([one])]

    def _insert(self, prepared: Sequence[Prepared]) -> list[bool | DuplicateJob]:
        """One write for all; of those whose keys exist, each is judged by itself."""
        if not prepared:
            return []
        answers: list[bool | DuplicateJob] = [True] * len(prepared)
        held: dict[int, str] = {}
        try:
            with translated(timeout_s=CALL_TIMEOUT_S + len(prepared) / 2000):
                for error in self._insert_many([one.document for one in prepared]):
                    place, one = error["index"], prepared[error["index"]]
                    taken = self._take_place(one) if "_id" in error.get("keyPattern", ()) else None
                    if taken is None:
                        held[place] = str(one.job.unique_key)
                    else:
                        answers[place] = taken
                holders = self._holders(held.values())
                answers = [
                    DuplicateJob(held[place], holders.get(held[place])) if place in held else answer
                    for place, answer in enumerate(answers)
                ]
        except StoreError:
            self.database.clock.reset()
            raise
        return answers

    def _insert_many(self, documents: Sequence[RawBSONDocument]) -> Sequence[Mapping[str, Any]]:
        """The errors of those that were not inserted because a key of theirs exists."""
        try:
            if len(documents) == 1:  # at three quarters of what the driver takes for a batch of one
                self._jobs().insert_one(documents[0])
            else:
                self._jobs().insert_many(documents, ordered=False)
        except DuplicateKeyError as exc:
            return [{"index": 0, **(exc.details or {})}]
        except BulkWriteError as exc:
            details: Any = exc.details
            errors: list[Mapping[str, Any]] = details["writeErrors"]
            if details["writeConcernErrors"] or any(error["code"] != 11000 for error in errors):
                raise
            return errors
        return []

    def _take_place(self, one: Prepared) -> bool | None:
        """Put a job where a document of its id stands only to keep its place.

        False when that is a real job, None when another job holds the unique key.
        """
        query, pipeline = queries.placeholder(one.job.id), queries.take_place(one.document)
        try:
            return bool(self._jobs().update_one(query, pipeline, hint="_id_").modified_count)
        except DuplicateKeyError:
            return None

    def _holders(self, keys: Collection[str]) -> dict[str, str]:
        """The unfinished jobs that hold these unique keys now."""
        if not keys:
            return {}
        found = self._jobs().find({"unique_live": {"$in": list(keys)}}, {"unique_live": 1})
        return {str(holder["unique_live"]): str(holder["_id"]) for holder in found}
