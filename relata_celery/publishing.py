"""Publishing many jobs in few round trips.

Ids are made by the client, so every call inside ``bulk()`` returns its ``AsyncResult`` at once; the
jobs are written together, up to a thousand in one insert, when the block ends or enough have come. While
MongoDB takes one full batch the next is filled.

A write that fails loses nothing by itself: its jobs are kept for the next write, and writing one twice is
harmless. Only a block that ends with an error gives up what is not written, and says how many that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
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
_record: ContextVar[list[tuple[Jobs, NewJob]] | None] = ContextVar("relata_record", default=None)


class PublishFailed(OperationalError, EnqueueError):
    """A job could not be written: MongoDB refused it, or gave no answer (then it may be there all the same)."""


class BulkNotWritten(OperationalError, EnqueueError):
    """Jobs of a ``bulk()`` block are not written; ``job_ids`` names them."""

    def __init__(self, job_ids: tuple[str, ...], reason: object, outlook: str) -> None:
        super().__init__(f"{len(job_ids)} jobs published in bulk() are not written {outlook}: {reason}")
        self.job_ids = job_ids


@dataclass(slots=True)
class _Line:
    """The jobs of one database that wait. The first batch of them is being written while ``written`` is there."""

    store: Jobs
    waiting: list[Prepared] = field(default_factory=list)
    written: Future[Any] | None = None


class Bulk:
    """The jobs published in one block and not known to be written yet, by database."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._lines: dict[str, _Line] = {}
        self._writer: ThreadPoolExecutor | None = None
        self._duplicates: list[DuplicateJob] = []

    def add(self, store: Jobs, job: NewJob) -> None:
        """Take a job, and have the batch written when it is full.

        Raises InvalidJob for this job, which is not taken, and BulkNotWritten when the batch before cannot be
        written: then this job and the others are kept, and written with the next one.
        """
        prepared = store.prepare(job)
        line = self._lines.get(store.database.uri)
        if line is None:
            line = self._lines[store.database.uri] = _Line(store)
        line.waiting.append(prepared)
        if len(line.waiting) % self._batch == 0:
            self._land(line, "yet; they are kept for the next write")
            self._launch(line)

    def close(self) -> None:
        """Write what waits. Raises BulkNotWritten, or the first DuplicateJob."""
        outlook = "and the block has ended"
        try:
            for line in self._lines.values():
                self._land(line, outlook)
                while line.waiting:
                    self._write(line, partial(line.store.insert, line.waiting[: self._batch]), outlook)
        finally:
            self._end()
        if self._duplicates:
            raise self._duplicates[0]

    def give_up(self) -> int:
        """Write no more; how many jobs are not written."""
        for line in self._lines.values():
            with suppress(BulkNotWritten):
                self._land(line, "as the block was ended")
        self._end()
        return sum(len(line.waiting) for line in self._lines.values())

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.shutdown()

    def _launch(self, line: _Line) -> None:
        """Begin to write the first batch."""
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "relata-bulk")
        batch = line.waiting[: self._batch]
        line.written = self._writer.submit(copy_context().run, line.store.insert, batch)

    def _land(self, line: _Line, outlook: str) -> None:
        """Wait until the batch that is on its way is written."""
        if line.written is not None:
            written, line.written = line.written, None
            self._write(line, written.result, outlook)

    def _write(self, line: _Line, write: Callable[[], object], outlook: str) -> None:
        """The first batch is written by this, or waits on."""
        try:
            write()
        except DuplicateJob as exc:  # the others of the batch were written
            self._duplicates.append(exc)
        except StoreError as exc:
            ids = tuple(one.job.id for other in self._lines.values() for one in other.waiting)
            raise BulkNotWritten(ids, exc, outlook) from exc
        del line.waiting[: self._batch]


@contextmanager
def bulk(batch: int = BATCH) -> Iterator[None]:
    """Write the jobs published inside the block together, ``batch`` at a time.

    When the block ends normally all are written, or an error says why not: BulkNotWritten (an
    ``OperationalError``) names those that are not, as MongoDB cannot be reached or refuses;
    :class:`DuplicateJob` says that an unfinished job holds the ``unique_key`` of one (all others are written).
    A full batch is written while the next is filled. The call that fills that one raises BulkNotWritten if the
    first could not be written: all its jobs, that of this call among them, are kept and written with the next
    batch or at the end, unless the error ends the block. When an error ends the block, what was not handed to
    MongoDB yet is dropped, and a warning in the log says how many jobs are not written.
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
        lost = collected.give_up()
        if lost:
            text = "bulk() was ended by %s: %d jobs that were published in it are not written"
            logger.warning(text, type(exc).__name__, lost)
        raise
    finally:
        _current.reset(token)
    collected.close()


def current_bulk() -> Bulk | None:
    return _current.get()


@contextmanager
def recorded() -> Iterator[list[tuple[Jobs, NewJob]]]:
    """The jobs that are written, or taken by a block, inside this one, and where to."""
    record: list[tuple[Jobs, NewJob]] = []
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def write(jobs: Jobs, job: NewJob, collected: Bulk | None) -> None:
    """Insert a job, now or with its block. Raises PublishFailed, InvalidJob, DuplicateJob."""
    record = _record.get()
    if record is not None:
        record.append((jobs, job))
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
