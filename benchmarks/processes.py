"""Processes of the benchmark: started in a group of their own, measured, and ended by that group."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent


def die_with_parent() -> Callable[[], None] | None:
    """For ``preexec_fn``: have Linux end the child when the benchmark is killed."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGKILL)


class Process:
    """One process and its descendants."""

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self.log_path = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(env),
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - one system call, no lock taken
                **options,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def log_tail(self, lines: int = 12) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def check(self) -> None:
        """Raise RuntimeError when it has ended."""
        if self.popen.poll() is not None:
            raise RuntimeError(f"{self.popen.args[0]} ended with {self.popen.returncode}:\n{self.log_tail()}")

    def stop(self, timeout: float = 20.0) -> None:
        """SIGTERM to the process, then SIGKILL to what is left of its group."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.popen.wait(10)


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Ours without settings that would change what is measured, with the checkout importable."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("RELATA_", "CELERY_"))
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**inherited, "PYTHONPATH": path, **(env or {})}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its living descendants."""
    total = 0.0
    for process in _family(pid):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def rss_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def peak_rss_mb(pid: int) -> float:
    """The highest resident size so far, where the system keeps it; else the present one."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 / 1e6 if found else rss_mb(pid)


def wait_for(condition: Callable[[], Any], timeout: float, what: str, interval: float = 0.01) -> Any:
    """The first true answer of ``condition``. Raises TimeoutError, with ``what``, after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(interval)
    return answer
