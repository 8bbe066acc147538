"""One measurement's surroundings: a queue nobody has used, a tally, the workers on it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contenders.base import Contender, Pool
from .processes import Process, cpu_seconds, environment, wait_for
from .producer import WARM_UP
from .servers import Servers
from .tally import FOLDER, Count, Tally


@dataclass(frozen=True)
class Sizes:
    """How much is done in each measurement."""

    enqueue: int = 2_000
    bulk: int = 10_000
    drain: int = 5_000
    probes: int = 400
    early_probes: int = 40
    settle_s: float = 12.0
    idle_workers: int = 10
    idle_s: float = 15.0
    fleet: int = 8
    deep: tuple[int, ...] = (2_000, 200_000, 1_000_000)
    deep_drain: int = 2_000
    future: int = 100_000


QUICK = Sizes(
    enqueue=300,
    bulk=1_000,
    drain=600,
    probes=60,
    early_probes=20,
    settle_s=7.0,
    idle_workers=3,
    idle_s=4.0,
    fleet=3,
    deep=(1_000, 10_000),
    deep_drain=600,
    future=5_000,
)


class Space:
    """Where one contender runs one measurement."""

    def __init__(
        self, contender: Contender, servers: Servers, name: str, folder: Path, results: bool
    ) -> None:
        self.contender, self.servers, self.name, self.folder = contender, servers, name, folder
        self.tally = Tally(folder)
        self._pages = itertools.count(1)
        self.env = {**contender.env(servers, name, results), FOLDER: str(folder)}
        self.workers: list[Process] = []

    @property
    def server(self) -> Any:
        """The one that keeps the queue."""
        return self.servers.get(self.contender.servers[0])

    # -- producing ------------------------------------------------------------------------------

    def produce(self, verb: str, jobs: int, rate: float = 0.0, timeout: float = 1800.0) -> float:
        """Have a process send jobs; the seconds that the sending took."""
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.producer", self.contender.name, verb, str(jobs), str(rate)],
            env=environment(self.env), capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if done.returncode:
            last = "\n".join(done.stderr.splitlines()[-6:])
            raise RuntimeError(f"the producer ended with {done.returncode}:\n{last}")
        return float(done.stdout.split()[-1])

    def delays_ms(self, probes: int, rate: float) -> list[float]:
        """Send so many probes at ``rate`` a second; what each waited for its start."""
        before = self.tally.count().jobs
        self.produce("paced", probes, rate)
        self.drained(before + WARM_UP + probes)
        return self.tally.new_delays_ms()

    # -- working ---------------------------------------------------------------------------------

    def start_workers(self, pool: Pool, count: int = 1, *, parked: bool = False) -> None:
        """Start ``count`` workers of this pool and wait until they are ready."""
        processes = count * self.contender.processes(pool)
        ready = self.tally.workers_ready() + processes * self.contender.readies(pool)
        for _ in range(processes):
            number = next(self._pages)
            log = self.folder / f"worker{number}.log"
            self.workers.append(
                Process(self.contender.worker(pool, number, parked), log, self.env, cwd=self.folder)
            )

        def all_ready() -> bool:
            for worker in self.workers:
                worker.check()
            return self.tally.workers_ready() >= ready

        wait_for(all_ready, 60 + 5 * count, f"{processes} worker processes are ready")

    def drained(self, jobs: int, timeout: float | None = None) -> Count:
        """The count when so many jobs have run, from the start of the first to the end of the last."""

        def enough() -> Count | None:
            count = self.tally.count()
            return count if count.jobs >= jobs else None

        try:
            found: Count = wait_for(enough, timeout or 60 + jobs / 50, f"{jobs} jobs have run")
        except TimeoutError as exc:
            for worker in self.workers:
                worker.check()
            logs = "\n".join(worker.log_tail(5) for worker in self.workers)
            raise TimeoutError(f"{exc}; so far {self.tally.count().jobs}\n{logs}") from None
        return found

    def worker_cpu_seconds(self) -> float:
        return sum(cpu_seconds(worker.pid) for worker in self.workers)

    def stop_workers(self) -> None:
        """Kill them, and begin a new count."""
        while self.workers:
            self.workers.pop().kill()
        self.tally.clear()


_numbers = itertools.count(1)


@contextmanager
def space(contender: Contender, servers: Servers, folder: Path, *, results: bool = False) -> Iterator[Space]:
    """A new space; at its end the workers are killed and what it holds is removed."""
    name = f"bench{os.getpid()}_{next(_numbers)}"
    contender.prepare(servers, name)
    made = Space(contender, servers, name, folder / name, results)
    try:
        yield made
    finally:
        made.stop_workers()
        contender.forget(servers, name)
