"""dramatiq on Redis."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks.servers import Servers

from .base import Contender, Pool, Producer, settings


class DramatiqProducer(Producer):
    def __init__(self) -> None:
        from .dramatiq_app import broker, noop

        self.broker, self.noop = broker, noop
        broker.client.ping()

    def one_by_one(self, jobs: int) -> None:
        for _ in range(jobs):
            self.noop.send()

    def probe(self, sent_ns: int) -> None:
        self.noop.send(sent_ns)

    def close(self) -> None:
        self.broker.close()


class Dramatiq(Contender):
    name = "dramatiq-redis"
    title = "dramatiq + Redis"
    servers = ("redis",)
    packages = ("dramatiq", "redis")
    results = "Redis"

    def env(self, servers: Servers, space: str, results: bool) -> Mapping[str, str]:
        return settings(broker=servers.get("redis").uri, queue=space, results=int(results))

    def prepare(self, servers: Servers, space: str) -> None:
        servers.get("redis").empty()

    forget = prepare

    def worker(self, pool: Pool, number: int, parked: bool) -> Sequence[str]:
        processes, threads = (1, pool.size) if pool.kind == "threads" else (pool.size, 1)
        return [
            *(sys.executable, "-m", "dramatiq", "benchmarks.contenders.dramatiq_app"),
            *("-p", str(processes), "-t", str(threads)),
        ]

    def readies(self, pool: Pool) -> int:
        return 1 if pool.kind == "threads" else pool.size

    def producer(self) -> Producer:
        return DramatiqProducer()
