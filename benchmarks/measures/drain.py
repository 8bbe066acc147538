"""How fast one worker runs no-op jobs that wait for it, and what that costs.

Measured from the start of the first job to the end of the last, so neither the worker's start nor its stop
counts. Results are ignored, except in ``results``, where each contender stores them in its usual place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.contenders.base import PREFORK_2, Contender, Pool
from benchmarks.servers import MongoDB
from benchmarks.space import Space, space

from .base import Arena, Reading, Step, Table

TABLES = {
    "drain": Table("Drain of no-op jobs, results ignored", "jobs/s", True),
    "results": Table(
        "Drain with results stored (prefork 2)",
        "jobs/s",
        True,
        "Stored in: ours the job itself; Celery + Redis and Celery + RabbitMQ in Redis; kombu's MongoDB in"
        " Celery's MongoDB backend; dramatiq in Redis.",
    ),
    "cost": Table(
        "What a drained job costs (prefork 2)",
        "CPU ms, operations",
        False,
        "CPU of the worker's processes and of the queue's server; operations as MongoDB counts them.",
    ),
}


def measure(pool: Pool, results: bool, arena: Arena, contender: Contender) -> Iterator[Reading]:
    jobs = arena.sizes.drain
    with space(contender, arena.servers, arena.folder, results=results) as here:
        here.produce("in_bulk", jobs)
        here.start_workers(pool)
        begin = Spent.now(here, jobs // 10)
        count = here.drained(jobs)
        yield Reading("with results" if results else str(pool), count.rate)
        if pool == PREFORK_2 and not results:
            yield from Spent.now(here, jobs).since(begin)


@dataclass(frozen=True)
class Spent:
    """What workers and server had used when so many jobs had run: the start of a worker is left out."""

    jobs: int
    worker_s: float
    server_s: float
    operations: dict[str, int]

    @classmethod
    def now(cls, here: Space, jobs: int) -> Spent:
        count, server = here.drained(jobs), here.server
        operations = server.operations() if isinstance(server, MongoDB) else {}
        return cls(count.jobs, here.worker_cpu_seconds(), server.cpu_seconds(), operations)

    def since(self, begin: Spent) -> Iterator[Reading]:
        jobs = self.jobs - begin.jobs
        if jobs * 2 < self.jobs:  # it was looked at too late to say
            return
        yield Reading("worker CPU ms", (self.worker_s - begin.worker_s) * 1000 / jobs, "cost")
        yield Reading("server CPU ms", (self.server_s - begin.server_s) * 1000 / jobs, "cost")
        if self.operations:
            spent = {
                kind: (number - begin.operations[kind]) / jobs for kind, number in self.operations.items()
            }
            yield Reading("MongoDB operations", sum(spent.values()), "cost")
            for kind, number in spent.items():
                yield Reading(kind, number, "cost")


def steps(contenders: Sequence[Contender], deep: bool) -> list[Step]:
    found = [
        Step("drain", f"drain {pool}", contender, partial(measure, pool, False))
        for contender in contenders
        for pool in contender.pools
    ]
    found += [
        Step("results", "drain with results", contender, partial(measure, PREFORK_2, True))
        for contender in contenders
        if contender.results
    ]
    return found
