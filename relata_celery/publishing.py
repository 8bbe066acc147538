"""Publishing many jobs in few round trips.

Ids are made by the client, so every call inside ``bulk()`` returns its ``AsyncResult`` at once; the
jobs are written together, up to a thousand in one insert, when the block ends or enough have come.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .domain.errors import DuplicateJob
from .domain.job import NewJob
from .store.jobs import Jobs, Prepared

#: Jobs of one insert.
BATCH = 1000

_current: ContextVar[Bulk | None] = ContextVar("relata_bulk", default=None)


class Bulk:
    """The jobs published in one block and not written yet."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._store: Jobs | None = None
        self._waiting: list[Prepared] = []
        self._duplicates: list[DuplicateJob] = []

    def add(self, store: Jobs, job: NewJob) -> None:
        """Take a job; raises InvalidJob for this one, and the others are not affected."""
        if self._store is not None and self._store.database.uri != store.database.uri:
            self.flush()
        self._store = store
        self._waiting.append(store.prepare(job))
        if len(self._waiting) >= self._batch:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._store is not None:
            try:
                self._store.insert(waiting)
            except DuplicateJob as exc:  # the others of the batch were written
                self._duplicates.append(exc)

    def close(self) -> None:
        self.flush()
        if self._duplicates:
            raise self._duplicates[0]


@contextmanager
def bulk(batch: int = BATCH) -> Iterator[None]:
    """Write the jobs published inside the block together, ``batch`` at a time.

    When the block ends normally all are written, or an error says why not: ``OperationalError`` when
    MongoDB cannot be reached (those of earlier batches are written), :class:`DuplicateJob` when an
    unfinished job holds the ``unique_key`` of one (all others are written). When the block raises, what
    was not written yet is dropped. An inner block joins the outer one. Applies to this thread or task.
    """
    if _current.get() is not None:
        yield
        return
    collected = Bulk(batch)
    token = _current.set(collected)
    try:
        yield
    finally:
        _current.reset(token)
    collected.close()


def current_bulk() -> Bulk | None:
    return _current.get()
