"""Publishing many jobs in few round trips.

Ids are made by the client, so every call inside ``bulk()`` returns its ``AsyncResult`` at once; the
jobs are written together, up to a thousand in one insert, when the block ends or enough have come. While
MongoDB takes one full batch the next is filled.

A write that fails loses nothing by itself: its jobs are kept for the next write, and writing one twice is
harmless. Only a block that ends with an error gives up what is not written, and says how many that is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Line:
    """The jobs of one database that wait, and the first of them that are being written meanwhile."""

    store: Jobs
    waiting: list[Prepared] = field(default_factory=list)
    written: Future[Any] | None = None
    sent: int = 0


class Bulk:
    """The jobs published in one block and not known to be written yet, by database."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._lines: dict[str, _Line] = {}
        self._writer: ThreadPoolExecutor | None = None
        self._duplicates: list[DuplicateJob] = []
        #: The job taken last and where it goes, and those that calls of their task repeat (:mod:`.repeating`).
        self.newest: tuple[Jobs, NewJob] | None = None
        self.patterns: dict[Any, tuple[Jobs, NewJob] | None] = {}

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
        self.newest = (store, job)
        if len(line.waiting) - line.sent >= self._batch:
            self._land(line, "yet; they are kept for the next write")
            self._send(line)

    def close(self) -> None:
        """Write what waits. Raises BulkNotWritten, or the first DuplicateJob."""
        try:
            for line in self._lines.values():
                while line.waiting:
                    if line.written is None:
                        self._send(line)
                    self._land(line, "and the block has ended")
        finally:
            self._end()
        if self._duplicates:
            raise self._duplicates[0]

    def give_up(self) -> int:
        """Write no more; how many jobs are not written."""
        for line in self._lines.values():
            try:
                self._land(line, "")
            except BulkNotWritten:
                pass
        self._end()
        return sum(len(line.waiting) for line in self._lines.values())

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.shutdown()

    def _send(self, line: _Line) -> None:
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "relata-bulk")
        batch = line.waiting[: self._batch]
        line.sent, line.written = len(batch), self._writer.submit(copy_context().run, line.store.insert, batch)

    def _land(self, line: _Line, outlook: str) -> None:
        """Wait for what was sent: it is written, or waits again."""
        if line.written is None:
            return
        written, sent = line.written, line.sent
        try:
            written.result()
        except DuplicateJob as exc:  # the others of the batch were written
            self._duplicates.append(exc)
        except StoreError as exc:
            line.written, line.sent = None, 0
            ids = tuple(one.job.id for other in self._lines.values() for one in other.waiting)
            raise BulkNotWritten(ids, exc, outlook) from exc
        line.written, line.sent = None, 0
        del line.waiting[:sent]


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
