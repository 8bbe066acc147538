"""Real workers for tests: ``celery -A APP worker`` in a process group of its own, and its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent

#: Short periods, so that what a test waits for comes soon; a test gives its own where it matters.
QUICK = {
    "RELATA_LEASE_DURATION": "3",
    "RELATA_HEARTBEAT_PERIOD": "1",
    "RELATA_POLL_INTERVAL": "0.2",
    "RELATA_REAP_PERIOD": "1",
    "RELATA_DRAIN_TIMEOUT": "10",
    "RELATA_TIMEOUT_GRACE": "1",
}


class Worker:
    """One ``celery worker`` process with its pool. Stopped by pid, never by name."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log_path = log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def children(self) -> list[int]:
        """The pids of the pool's processes."""
        return [child.pid for child in psutil.Process(self.pid).children()]

    def wait_ready(self, timeout: float = 30) -> Worker:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the worker ended with {self.process.returncode}:\n{self.log}")
            return " ready." in self.log

        wait_until(ready, timeout=timeout, message="the worker is ready")
        return self

    def signal(self, number: int) -> None:
        """To the parent process only."""
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """To the parent and all of its children."""
        os.killpg(self.pid, number)

    def kill_group(self) -> None:
        self.signal_group(signal.SIGKILL)
        self.process.wait(10)

    def terminate(self, timeout: float = 30) -> int:
        """A warm shutdown; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                os.killpg(self.pid, signal.SIGCONT)
                self.signal(signal.SIGTERM)
                self.process.wait(8)
            except (subprocess.TimeoutExpired, ProcessLookupError):
                pass
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)


def start_worker(
    app: str, uri: str, folder: Path, *arguments: str, env: Mapping[str, str] | None = None, name: str = "w1"
) -> Worker:
    """Start ``celery -A app worker`` on this MongoDB; :meth:`Worker.wait_ready` waits for it."""
    log = folder / f"{name}.log"
    environment = {
        **os.environ,
        **QUICK,
        "RELATA_TEST_URI": uri,
        "RELATA_MONGODB_URI": uri,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        **(env or {}),
    }
    command = [
        sys.executable, "-m", "celery", "-A", app, "worker", "-l", "info", "-n", f"{name}@%h", *arguments,
    ]  # fmt: skip
    # As users run it: an unbuffered stream has no lock that a forked child could find taken.
    environment.pop("PYTHONUNBUFFERED", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
        )
    return Worker(process, log)


@contextmanager
def running_worker(
    app: str, uri: str, folder: Path, *arguments: str, env: Mapping[str, str] | None = None, name: str = "w1"
) -> Iterator[Worker]:
    worker = start_worker(app, uri, folder, *arguments, env=env, name=name)
    try:
        yield worker.wait_ready()
    finally:
        worker.close()
