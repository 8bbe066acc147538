"""A page of memory shared by a worker's parent and its pool processes: what the leases are now.

Pool processes open no MongoDB connection for the queue's sake, yet a handler wants to know whether
its lease still holds (``current_job().check()``), and a child must not begin a job that was
given back a moment ago. The parent writes a few bytes per attempt; the child reads them.

A slot holds the attempt's token, the reason to stop (0: none) and the lease's local deadline on the
system-wide monotonic clock. A token that is not the reader's own means that the slot was given to
another attempt: the reader's lease is over. A forked child inherits the memory itself, and nothing is
left behind however the worker ends; a spawned one opens a file by its path.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from pathlib import Path

from relata_celery.engine.held import StopReason

_SLOT = struct.Struct("<qqd")
#: More attempts than this at once are not told early that they must stop (settling still fences them).
SLOTS = 4096

_REASONS = tuple(StopReason)


class Board:
    """The parent's side: hands out slots and writes them. Safe from any thread."""

    def __init__(self, *, inherited: bool) -> None:
        #: Where a spawned child opens the board; empty when children inherit it.
        self.path = ""
        if inherited:
            self._memory = mmap.mmap(-1, _SLOT.size * SLOTS)
        else:
            self._memory = self._open_file()
        self._lock = threading.Lock()
        self._free = list(range(SLOTS - 1, -1, -1))
        self._tokens = 0

    def _open_file(self) -> mmap.mmap:
        descriptor, name = tempfile.mkstemp(prefix=f"relata-board-{os.getpid()}-")
        self.path = name
        try:
            os.ftruncate(descriptor, _SLOT.size * SLOTS)
            return mmap.mmap(descriptor, _SLOT.size * SLOTS)
        finally:
            os.close(descriptor)

    def reader(self) -> BoardReader:
        """What a child that inherited the board reads it with."""
        return BoardReader(self._memory)

    def take(self, lease_deadline: float) -> tuple[int, int] | None:
        """A slot and a token for a new attempt; None when all are taken."""
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
            self._tokens += 1
            _SLOT.pack_into(self._memory, slot * _SLOT.size, self._tokens, 0, lease_deadline)
            return slot, self._tokens

    def extend(self, slot: int, token: int, lease_deadline: float) -> None:
        with self._lock:
            held, reason, _ = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
            if held == token:
                _SLOT.pack_into(self._memory, slot * _SLOT.size, token, reason, lease_deadline)

    def mark(self, slot: int, token: int, reason: StopReason) -> None:
        with self._lock:
            held, _, deadline = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
            if held == token:
                _SLOT.pack_into(
                    self._memory, slot * _SLOT.size, token, _REASONS.index(reason) + 1, deadline
                )

    def give_back(self, slot: int, token: int) -> None:
        with self._lock:
            held, _, _ = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
            if held == token:
                _SLOT.pack_into(self._memory, slot * _SLOT.size, 0, 0, 0.0)
                self._free.append(slot)

    def close(self) -> None:
        if self.path:
            Path(self.path).unlink(missing_ok=True)


class BoardReader:
    """A pool process' view of the board. Reading is a few nanoseconds and takes no lock."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def open(cls, path: str) -> BoardReader:
        with open(path, "rb") as file:
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def read(self, slot: int, token: int) -> tuple[StopReason | None, float]:
        """Why this attempt should stop, if at all, and until when its lease holds (monotonic)."""
        held, reason, deadline = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
        if held != token:
            return StopReason.LEASE_LOST, 0.0
        return (_REASONS[reason - 1] if reason else None), deadline
