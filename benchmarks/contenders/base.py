"""What a contender is: how its workers are started, and how jobs are sent to it."""

from __future__ import annotations

import importlib.metadata
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.servers import Missing, Servers


@dataclass(frozen=True)
class Pool:
    """How a worker executes: so many processes, or so many threads of one process."""

    kind: str
    size: int

    def __str__(self) -> str:
        return self.kind if self.kind == "solo" else f"{self.kind} {self.size}"


PREFORK_2, PREFORK_4 = Pool("prefork", 2), Pool("prefork", 4)
THREADS_4, SOLO = Pool("threads", 4), Pool("solo", 1)


class Producer(ABC):
    """Sends no-op jobs; lives in a process of its own, set up by the contender's environment."""

    @abstractmethod
    def one_by_one(self, jobs: int) -> None:
        """Send so many, each by the call that an application would make."""

    def in_bulk(self, jobs: int) -> None:
        """The same by the fastest way that the library documents; here: it has none."""
        self.one_by_one(jobs)

    @abstractmethod
    def probe(self, sent_ns: int) -> None:
        """Send one that notes how long ago ``sent_ns`` was when it is started."""

    def consume(self, workers: int) -> None:
        """Have so many waiting workers begin to take jobs."""
        raise NotImplementedError

    def later(self, jobs: int) -> None:
        """Send jobs that are due in a day."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Everything sent has reached the server."""


class Contender(ABC):
    """One way to run jobs."""

    name: ClassVar[str]
    title: ClassVar[str]
    #: Kinds of servers it needs; the first keeps the queue.
    servers: ClassVar[tuple[str, ...]]
    packages: ClassVar[tuple[str, ...]] = ()
    pools: ClassVar[tuple[Pool, ...]] = (PREFORK_2, PREFORK_4, THREADS_4, SOLO)
    #: Where its results go when a measure stores them; None: it stores none.
    results: ClassVar[str | None] = None
    #: Whether waiting workers can be told to begin, as the measure of many workers needs.
    fleet: ClassVar[bool] = False

    def check(self, servers: Servers) -> None:
        """Start its servers. Raises Missing."""
        for package in self.packages:
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                raise Missing(f"no package {package} (pip install '.[benchmarks]')") from None
        for kind in self.servers:
            servers.get(kind)

    def versions(self) -> dict[str, str]:
        return {package: importlib.metadata.version(package) for package in self.packages}

    @abstractmethod
    def env(self, servers: Servers, space: str, results: bool) -> Mapping[str, str]:
        """Environment of its workers and producers; ``space`` names a queue that nobody has used yet."""

    def prepare(self, servers: Servers, space: str) -> None:  # noqa: B027
        """Whatever an installation does once."""

    def forget(self, servers: Servers, space: str) -> None:  # noqa: B027
        """Remove what the space holds."""

    @abstractmethod
    def worker(self, pool: Pool, number: int, parked: bool) -> Sequence[str]:
        """The command of worker ``number``; ``parked``: it waits until :meth:`Producer.consume`."""

    def processes(self, pool: Pool) -> int:
        """How many such workers make up the pool: for libraries whose worker is one process."""
        return 1

    def readies(self, pool: Pool) -> int:
        """How many processes of one worker say that they are ready."""
        return 1

    @abstractmethod
    def producer(self) -> Producer:
        """Called in the producing process, in the environment of :meth:`env`."""


def setting(name: str) -> str:
    return os.environ[f"BENCH_{name}"]


def settings(**values: Any) -> dict[str, str]:
    return {f"BENCH_{name.upper()}": str(value) for name, value in values.items()}
