"""A storm: workers and producers on a replica set of three, and faults drawn from a seed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pymongo
from pymongo.errors import PyMongoError

from tests.chaos.apps_chaos import SLOTS
from tests.chaos.checker import Findings, check, read_journal
from tests.chaos.proxy import Mode, Proxy
from tests.chaos.small_disk import SmallDisk
from tests.mongo import ReplicaSet, with_database
from tests.waiting import wait_until
from tests.workers import ROOT, Worker, start_worker

APP = "tests.chaos.apps_chaos"
LEASE_S = 3
#: The workers of a storm: their pools, and the clock of the last one is five hours ahead.
CREWS: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (("-P", "prefork", "-c", "2"), {}),
    (("-P", "threads", "-c", "4"), {}),
    (("-P", "prefork", "-c", "1"), {"CHAOS_CLOCK_S": "18000"}),
)


@dataclass
class Report:
    """What a storm did, and what came of it."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    longest_gap_s: float = 0.0
    findings: Findings = field(default_factory=Findings)

    def __str__(self) -> str:
        counted = dict(sorted(self.findings.counted.items()))
        return (
            f"seed {self.seed}: {dict(self.faults)}; {self.refused} calls raised; "
            f"longest time without a settled job {self.longest_gap_s:.1f} s\n{counted}\nwrong: {self.findings}"
        )


class Storm:
    """Everything that a storm needs; ``close`` ends what it started."""

    def __init__(
        self, cluster: ReplicaSet, folder: Path, name: str, seed: int, disk: SmallDisk | None = None
    ) -> None:
        self.cluster = cluster
        #: That of one of the servers, if it is one that can be filled.
        self.disk = disk
        self.folder = folder
        self.uri = with_database(cluster.uri, name)
        self.random = random.Random(seed)
        self.report = Report(seed)
        self.proxies = {member.port: Proxy(member.port) for member in cluster.members}
        self.client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(self.uri, tz_aware=True)
        self.jobs = self.client[name]["relata_jobs"]
        self._environment = {
            "CHAOS_FOLDER": str(folder),
            "CHAOS_PORTS": json.dumps({port: proxy.port for port, proxy in self.proxies.items()}),
            "RELATA_LEASE_DURATION": str(LEASE_S),
        }
        self.workers: list[Worker] = []
        self._started = 0
        self._producer: subprocess.Popen[bytes] | None = None
        self._watching = threading.Event()

    # -- the crews ------------------------------------------------------------------------------

    def start(self) -> None:
        for number in range(len(CREWS)):
            self.workers.append(self._start_worker(number))
        for worker in self.workers:
            worker.wait_ready(60)

    def _start_worker(self, number: int) -> Worker:
        arguments, environment = CREWS[number]
        self._started += 1
        return start_worker(
            APP,
            self.uri,
            self.folder,
            *arguments,
            env={**self._environment, **environment},
            name=f"w{number}-{self._started}",
        )

    def produce(self, seconds: float) -> None:
        """Begin to publish, from a process of its own, which writes down what it was told."""
        command = [sys.executable, "-m", "tests.chaos.producer", str(seconds), str(self.report.seed)]
        environment = {**os.environ, **self._environment, "RELATA_TEST_URI": self.uri, "PYTHONPATH": str(ROOT)}
        with (self.folder / "producer.log").open("wb") as log:
            self._producer = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
        threading.Thread(target=self._watch_gaps, daemon=True).start()

    def _watch_gaps(self) -> None:
        """For how long at most nothing was settled, while there was something to do."""
        last, seen = time.monotonic(), 0
        while not self._watching.wait(0.2):
            with contextlib.suppress(PyMongoError), pymongo.timeout(1.0):
                settled = self.jobs.count_documents({"state": {"$in": ["succeeded", "failed"]}})
                if settled != seen or not self.jobs.count_documents({"state": "queued"}, limit=1):
                    self.report.longest_gap_s = max(self.report.longest_gap_s, time.monotonic() - last)
                    last, seen = time.monotonic(), settled

    # -- the faults -----------------------------------------------------------------------------

    def faults(self) -> dict[str, Callable[[], None]]:
        network = {f"network {mode.value}": partial(self._spoil, mode) for mode in Mode if mode is not Mode.PASS}
        return {
            "worker killed": self._kill_worker,
            "pool process killed": self._kill_child,
            "worker stopped for longer than its lease": self._freeze_worker,
            "worker drained": self._drain_worker,
            "primary stepped down": self._step_down,
            "primary killed": self._kill_primary,
            **({} if self.disk is None else {"a server's disk full": partial(self._fill_disk, self.disk)}),
            **network,
        }

    def rage(self, seconds: float, calm_s: float = 1.0) -> None:
        """Inject faults, each kind once before any comes again, with a pause between them."""
        until = time.monotonic() + seconds
        waiting: list[tuple[str, Callable[[], None]]] = []
        while time.monotonic() < until:
            if not waiting:
                waiting = list(self.faults().items())
                self.random.shuffle(waiting)
            name, fault = waiting.pop()
            self.report.faults[name] += 1
            fault()
            time.sleep(calm_s * self.random.uniform(0.5, 1.5))

    def _replace(self, number: int) -> None:
        self.workers[number] = self._start_worker(number)
        self.workers[number].wait_ready(60)

    def _any(self) -> int:
        return self.random.randrange(len(self.workers))

    def _kill_worker(self) -> None:
        number = self._any()
        self.workers[number].kill_group()
        self._replace(number)

    def _kill_child(self) -> None:
        number = self.random.choice([0, 2])
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess, IndexError):
            os.kill(self.random.choice(self.workers[number].children()), signal.SIGKILL)

    def _freeze_worker(self) -> None:
        worker = self.workers[self._any()]
        worker.signal_group(signal.SIGSTOP)
        time.sleep(LEASE_S + 2)
        worker.signal_group(signal.SIGCONT)

    def _drain_worker(self) -> None:
        number = self._any()
        self.workers[number].terminate(60)
        self._replace(number)

    def _step_down(self) -> None:
        with self.cluster.primary().client() as client, contextlib.suppress(PyMongoError):
            client.admin.command({"replSetStepDown": 10, "secondaryCatchUpPeriodSecs": 5, "force": True})
        self.cluster.primary(60)

    def _kill_primary(self) -> None:
        member = self.cluster.primary(60)
        member.kill()
        self.cluster.primary(60)
        time.sleep(self.random.uniform(0, 2))
        member.start()

    def _fill_disk(self, disk: SmallDisk) -> None:
        """The server ends itself when it cannot write its journal; there is room again when it is started."""
        (member,) = (member for member in self.cluster.members if member.folder == disk.folder)
        disk.fill()
        with contextlib.suppress(AssertionError):  # it had nothing to write
            wait_until(lambda: not member.running(), 10, "the server has ended")
        disk.empty()
        if not member.running():
            member.start()

    def _spoil(self, mode: Mode) -> None:
        for proxy in self.proxies.values():
            proxy.spoil(mode)
        time.sleep(self.random.uniform(1, 4))
        for proxy in self.proxies.values():
            proxy.spoil(Mode.PASS)

    # -- the end --------------------------------------------------------------------------------

    def judge(self, timeout_s: float = 90.0) -> Report:
        """After the storm: wait until all has ended, and have the checker look at it."""
        assert self._producer is not None
        assert self._producer.wait(60) == 0, (self.folder / "producer.log").read_text()
        unfinished = {"$or": [{"state": {"$in": ["queued", "running"]}}, {"followups": {"$exists": True}}]}
        with contextlib.suppress(AssertionError):  # what has not ended is one of the findings
            wait_until(lambda: not self.jobs.count_documents(unfinished), timeout_s, "all jobs have ended")
        self._watching.set()
        for worker in self.workers:
            worker.terminate(60)
        acknowledged: dict[str, str | None] = {}
        for text in (self.folder / "acknowledged").read_text().splitlines():
            said = json.loads(text)
            self.report.refused += "raised" in said
            acknowledged |= said.get("ids", {})
        self.report.findings = check(acknowledged, self.jobs.find(), read_journal(self.folder), SLOTS)
        return self.report

    def close(self) -> None:
        self._watching.set()
        if self._producer is not None and self._producer.poll() is None:
            self._producer.kill()
            self._producer.wait(10)
        for worker in self.workers:
            worker.close()
        for proxy in self.proxies.values():
            proxy.close()
        self.client.close()


@contextlib.contextmanager
def storm(
    cluster: ReplicaSet, folder: Path, name: str, seed: int, disk: SmallDisk | None = None
) -> Iterator[Storm]:
    made = Storm(cluster, folder, name, seed, disk)
    try:
        yield made
    finally:
        made.close()
