"""A wake-up that an event loop, a ``select`` and a thread can all give and take."""

from __future__ import annotations

import select
import socket
from threading import Lock


class Wakeup:
    """A socket pair that becomes readable when :meth:`set` was called, until :meth:`clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = Lock()
        self._is_set = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        with self._lock:
            if not self._is_set:
                self._is_set = True
                try:
                    self._writer.send(b"\0")
                except OSError:  # closed while a background part still reports
                    pass

    def clear(self) -> None:
        with self._lock:
            self._is_set = False
            try:
                self._reader.recv(64)
            except OSError:
                pass

    def wait(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._reader], [], [], timeout_s)
        return bool(ready)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
