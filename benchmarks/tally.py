"""Counts what tasks do, in the same way for every contender, at about a microsecond a job.

Each process that runs tasks owns one small memory-mapped file, named by its pid, in the folder that
``BENCH_TALLY`` names: how many jobs it ran, when it started the first and ended the last, and, for
probes, how long each waited. No system call is made per job, and nothing is shared between processes.
Times are of the monotonic clock, which on one machine is the same for all processes.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = "BENCH_TALLY"

#: count, start of the first job, end of the last (ns), number of probes
HEAD = struct.Struct("<qqqq")
DELAY = struct.Struct("<d")
MAX_DELAYS = 16_000
SIZE = HEAD.size + MAX_DELAYS * DELAY.size


class _Page:
    """This process' file."""

    def __init__(self, folder: str) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.count = self.first_ns = self.delays = 0
        with open(Path(folder) / f"{self.pid}.tally", "w+b") as file:
            file.write(bytes(SIZE))  # a hole in the file would end the process when the disk is full
            file.flush()
            self.memory = mmap.mmap(file.fileno(), SIZE)


_page: _Page | None = None
_opening = threading.Lock()


def _own_page() -> _Page:
    """This process' page, made once: a second opening would cut the file off under a thread that writes."""
    global _page
    with _opening:
        if _page is None or _page.pid != os.getpid():
            _page = _Page(os.environ[FOLDER])
        return _page


def ran(sent_ns: int = 0) -> None:
    """Called by a task: it was started now; ``sent_ns`` is when its producer began to send it."""
    now_ns = time.monotonic_ns()
    page = _page
    if page is None or page.pid != os.getpid():
        page = _own_page()
    with page.lock:
        page.count += 1
        page.first_ns = page.first_ns or now_ns
        if sent_ns and page.delays < MAX_DELAYS:
            DELAY.pack_into(page.memory, HEAD.size + page.delays * DELAY.size, (now_ns - sent_ns) / 1e6)
            page.delays += 1
        HEAD.pack_into(page.memory, 0, page.count, page.first_ns, time.monotonic_ns(), page.delays)


def ready() -> None:
    """Called by a worker when it is ready to take jobs."""
    (Path(os.environ[FOLDER]) / f"{os.getpid()}.ready").touch()


@dataclass(frozen=True)
class Count:
    """What all processes together have done so far."""

    jobs: int
    first_ns: int
    last_ns: int

    @property
    def seconds(self) -> float:
        return (self.last_ns - self.first_ns) / 1e9

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds if self.seconds > 0 else 0.0


class Tally:
    """The reader's side: a folder of such files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._pages: dict[str, mmap.mmap] = {}
        self._given: dict[str, int] = {}

    def workers_ready(self) -> int:
        return len(list(self.folder.glob("*.ready")))

    def _heads(self) -> list[tuple[int, int, int, int]]:
        for path in self.folder.glob("*.tally"):
            if path.name not in self._pages and path.stat().st_size == SIZE:
                with path.open("rb") as file:
                    self._pages[path.name] = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        return [HEAD.unpack_from(page) for page in self._pages.values()]

    def count(self) -> Count:
        heads = [head for head in self._heads() if head[0]]
        if not heads:
            return Count(0, 0, 0)
        return Count(sum(h[0] for h in heads), min(h[1] for h in heads), max(h[2] for h in heads))

    def new_delays_ms(self) -> list[float]:
        """From the producer's call to the task's start, of every probe that ran since the last time this was asked."""
        found: list[float] = []
        for head, (name, page) in zip(self._heads(), self._pages.items(), strict=True):
            for place in range(self._given.get(name, 0), head[3]):
                found += DELAY.unpack_from(page, HEAD.size + place * DELAY.size)
            self._given[name] = head[3]
        return found

    def clear(self) -> None:
        """Forget what processes that have ended did."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()
        self._given.clear()
        for path in [*self.folder.glob("*.tally"), *self.folder.glob("*.ready")]:
            path.unlink()
