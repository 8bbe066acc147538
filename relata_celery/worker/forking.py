"""Forking pool processes while other threads write the log.

A buffered stream has a lock of its own, and no fork makes that one anew: a child forked in the middle of
another thread's line waits for ever at its first own line, with its job. Python's ``logging`` renews only its
own locks (https://bugs.python.org/issue6721). Celery's parent logs from one thread, the one that
forks; ours logs from several.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from typing import Any

#: How long a fork waits for the lines being written, in seconds. A log that takes longer stalls the worker's
#: own lines as well; the limit is for handlers that wait for one another.
PATIENCE_S = 5.0


class _LogLocks:
    """Logging's own lock and all log handlers' locks, held over a fork: nobody is inside a stream then."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def take(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        # As logging.config and logging.shutdown() go: its own first; a handler that passes on to another was made
        # after that one.
        handlers = [reference() for reference in reversed(logging._handlerList)]  # type: ignore[attr-defined]
        for lock in (logging._lock, *(handler.lock for handler in handlers if handler is not None)):  # type: ignore[attr-defined]
            if lock is not None and lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                self._held.append(lock)

    def give_back(self) -> None:
        while self._held:
            self._held.pop().release()

    def forget(self) -> None:
        """In the child ``logging`` has made these locks anew."""
        self._held.clear()


@functools.cache
def fork_between_log_lines() -> None:
    """From now on this process forks only while no thread is inside a log handler. Once per process."""
    if hasattr(os, "register_at_fork"):
        locks = _LogLocks()
        os.register_at_fork(before=locks.take, after_in_parent=locks.give_back, after_in_child=locks.forget)
