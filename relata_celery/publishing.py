"""Publishing many jobs in few round trips.

Ids are made by the client, so every call inside ``bulk()`` returns its ``AsyncResult`` at once; the
jobs are written together, up to a thousand in one insert, when the block ends or enough have come.

A write that fails loses nothing by itself: its jobs are kept for the next write, and writing one twice is
harmless. Only a block that ends with an error gives up what is not written, and says how many that is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from kombu.exceptions import OperationalError

from .domain.errors import DuplicateJob, EnqueueError, StoreError, StoreUnavailable
from .domain.job import NewJob
from .store.inserting import Prepared
from .store.jobs import Jobs

#: Jobs of one insert.
BATCH = 1000

logger = logging.getLogger("relata_celery")

_current: ContextVar[Bulk | None] = ContextVar("relata_bulk", default=None)


class PublishFailed(OperationalError, EnqueueError):
    """A job could not be written: MongoDB refused it, or gave no answer (then it may be there all the same)."""


class BulkNotWritten(OperationalError, EnqueueError):
    """Jobs of a ``bulk()`` block are not written; ``job_ids`` names them."""

    def __init__(self, job_ids: tuple[str, ...], reason: object, outlook: str) -> None:
        super().__init__(f"{len(job_ids)} jobs published in bulk() are not written {outlook}: {reason}")
        self.job_ids = job_ids


class Bulk:
    """The jobs published in one block and not written yet, by database."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._stores: dict[str, Jobs] = {}
        self._waiting: dict[str, list[Prepared]] = {}
        self._duplicates: list[DuplicateJob] = []
        #: The job taken last and where it goes, and those that calls of their task repeat (:mod:`.repeating`).
        self.newest: tuple[Jobs, NewJob] | None = None
        self.patterns: dict[Any, tuple[Jobs, NewJob] | None] = {}

    @property
    def waiting(self) -> int:
        """How many jobs are not written yet."""
        return sum(map(len, self._waiting.values()))

    def add(self, store: Jobs, job: NewJob) -> None:
        """Take a job, and write the batch when it is full.

        Raises InvalidJob for this job, which is not taken, and BulkNotWritten when the batch cannot be written:
        then this job and the others are kept, and written with the next one.
        """
        prepared = store.prepare(job)
        uri = store.database.uri
        self._stores.setdefault(uri, store)
        waiting = self._waiting.setdefault(uri, [])
        waiting.append(prepared)
        self.newest = (store, job)
        if len(waiting) >= self._batch:
            self._write("yet; they are kept for the next write")

    def close(self) -> None:
        self._write("and the block has ended")
        if self._duplicates:
            raise self._duplicates[0]

    def _write(self, outlook: str) -> None:
        for uri, waiting in self._waiting.items():
            while waiting:
                batch = waiting[: self._batch]
                try:
                    self._stores[uri].insert(batch)
                except DuplicateJob as exc:  # the others of the batch were written
                    self._duplicates.append(exc)
                except StoreError as exc:
                    ids = tuple(one.job.id for jobs in self._waiting.values() for one in jobs)
                    raise BulkNotWritten(ids, exc, outlook) from exc
                del waiting[: len(batch)]


@contextmanager
def bulk(batch: int = BATCH) -> Iterator[None]:
    """Write the jobs published inside the block together, ``batch`` at a time.

    When the block ends normally all are written, or an error says why not: BulkNotWritten (an
    ``OperationalError``) names those that are not, as MongoDB cannot be reached or refuses;
    :class:`DuplicateJob` says that an unfinished job holds the ``unique_key`` of one (all others are written).
    A call inside the block whose batch cannot be written raises BulkNotWritten too: its jobs, that of this
    call among them, are kept and written with the next batch or at the end, unless the error ends the block.
    When an error ends the block, what was not written yet is dropped, and a warning in the log says how many.
    An inner block joins the outer one. Applies to this thread or task.
    """
    if _current.get() is not None:
        yield
        return
    collected = Bulk(batch)
    token = _current.set(collected)
    try:
        yield
    except BaseException as exc:
        if collected.waiting:
            text = "bulk() was ended by %s: %d jobs that were published in it are not written"
            logger.warning(text, type(exc).__name__, collected.waiting)
        raise
    finally:
        _current.reset(token)
    collected.close()


def current_bulk() -> Bulk | None:
    return _current.get()


def write(jobs: Jobs, job: NewJob, collected: Bulk | None) -> None:
    """Insert a job, now or with its block. Raises PublishFailed, InvalidJob, DuplicateJob."""
    try:
        if collected is None:
            jobs.enqueue([job])
        else:
            collected.add(jobs, job)
    except StoreUnavailable as exc:
        again = f"published again as task_id={job.id!r} it is no second job"
        raise PublishFailed(f'job type "{job.type}" is perhaps not queued ({again}): {exc}') from exc
    except StoreError as exc:
        raise PublishFailed(f'job type "{job.type}" ({job.id}) was not queued: {exc}') from exc
