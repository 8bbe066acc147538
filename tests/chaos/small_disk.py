"""A disk that can be filled: a tmpfs of its own for one server's files."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Holds a server's empty data, its journal and a storm's jobs, in MB.
SIZE_MB = 700
_PIECE = b"\0" * 2**20


@dataclass(frozen=True)
class SmallDisk:
    folder: Path

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as ballast:
            try:
                while True:
                    os.write(ballast.fileno(), _PIECE)
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk | None]:
    """Mount one at ``folder``, for as long as the block lasts; None where this user may not mount."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        yield None
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
