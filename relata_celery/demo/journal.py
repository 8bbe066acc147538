"""A second account of what ran, kept apart from the queue it checks.

Each process appends lines to a file of its own in one folder: a handler's begin, its end, and each
job it publishes. A line is written with one write before the thing it tells is done, so it is there
even when the process is killed in the next instant.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "RELATA_DEMO_JOURNAL"


@dataclass(frozen=True, slots=True)
class Line:
    """``event`` is begin, end or enqueue; ``attempt`` counts from 1 (0 for enqueue)."""

    event: str
    id: str
    attempt: int
    pid: int
    at: float


def write(event: str, job_id: str, attempt: int = 0) -> None:
    """Append a line to this process' file; does nothing when the environment names no folder."""
    folder = os.environ.get(ENVIRONMENT)
    if not folder:
        return
    pid = os.getpid()
    line = json.dumps({"event": event, "id": job_id, "attempt": attempt, "pid": pid, "at": time.time()})
    path = os.path.join(folder, f"{pid}.jsonl")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, (line + "\n").encode())
    finally:
        os.close(descriptor)


@contextmanager
def attempt(job_id: str, number: int) -> Iterator[None]:
    """Begin and end of one attempt; an attempt that raised has ended too, one that was killed has not."""
    write("begin", job_id, number)
    try:
        yield
    finally:
        write("end", job_id, number)


class Journal:
    """Reads a folder of such files, each line once, in the order of each file. For one thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._offsets: dict[Path, int] = {}
        self._lines: list[Line] = []

    def read(self) -> list[Line]:
        """The lines since the last call. A line whose end is not written yet is left for the next one."""
        fresh: list[Line] = []
        for path in sorted(self.folder.glob("*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(complete)
            fresh += [Line(**json.loads(line)) for line in complete.splitlines()]
        self._lines += fresh
        return fresh

    @property
    def lines(self) -> list[Line]:
        """All lines read so far."""
        return list(self._lines)

    def ids(self) -> set[str]:
        """Every job that was published by a handler or begun, as far as it was read."""
        return {line.id for line in self._lines}

    def running(self) -> set[str]:
        """Jobs with an attempt begun and not ended, as far as it was read."""
        begun = {(line.id, line.attempt, line.pid) for line in self._lines if line.event == "begin"}
        ended = {(line.id, line.attempt, line.pid) for line in self._lines if line.event == "end"}
        return {job_id for job_id, _, _ in begun - ended}
