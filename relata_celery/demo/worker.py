"""The demo's worker: a real one, in a process group of its own, so that it can be killed whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LEASE_S = 5
HEARTBEAT_S = 2
SLOTS = 2
LOG_LINES = 15


def worker_environment(
    base: Mapping[str, str], uri: str, journal: Path, endpoint: Mapping[str, str]
) -> dict[str, str]:
    """The variables of worker and producer: this run's database, and leases short enough to watch."""
    return {
        **base,
        "RELATA_MONGODB_URI": uri,
        "RELATA_LEASE_DURATION": str(LEASE_S),
        "RELATA_HEARTBEAT_PERIOD": str(HEARTBEAT_S),
        "RELATA_REAP_PERIOD": "1",
        "RELATA_POLL_INTERVAL": "0.5",
        "RELATA_AI_CONCURRENCY": str(SLOTS),
        "RELATA_DEMO_JOURNAL": str(journal),
        **endpoint,
    }


class Worker:
    """One worker process and its children. For one thread."""

    def __init__(self, environment: Mapping[str, str], log: Path, name: str) -> None:
        self._environment = dict(environment)
        self.log = log
        self.name = name
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> list[str]:
        celery = [sys.executable, "-m", "celery", "-A", "relata_celery", "worker", "--loglevel", "INFO"]
        return [*celery, "-c", str(SLOTS), "-I", "relata_celery.demo.jobs", "-n", f"{self.name}@demo"]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ended(self) -> int | None:
        """The exit status of a worker that is no more; None while it runs or before it was started."""
        return self._process.poll() if self._process else None

    def kill(self) -> None:
        """SIGKILL to the whole group: parent and children at once, no good-bye to anyone."""
        if self._process is None:
            return
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self, timeout_s: float = 15.0) -> None:
        """A warm shutdown; after ``timeout_s`` the group is killed. May be called twice or before start."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        # The parent is gone or stuck: what is left of its group goes too.
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        """The end of its log, for a worker that could not start."""
        try:
            text = self.log.read_text("utf-8", "replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-LOG_LINES:])


def _signal_group(group: int, number: signal.Signals) -> None:
    # Gone already; macOS says "not permitted" of a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
