"""From the producer's call to the task's start, at 20 jobs a second, to workers that have nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from benchmarks.contenders.base import PREFORK_2, Contender, Pool
from benchmarks.space import Space, space

from .base import Arena, Reading, Step, Table, percentile

RATE = 20.0

TABLES = {
    "latency": Table(
        "From the producer's call to the start of the job, 20 jobs/s, idle worker (prefork 2)", "ms", False
    ),
    "latency-idle": Table("The same with many idle workers (prefork 1 each)", "ms", False),
    "idle": Table(
        "What idle workers ask of MongoDB",
        "operations",
        False,
        "Per second of one idle worker (prefork 2), and per job enqueued at 20 jobs/s, with that worker and with"
        " many, their idle operations included.",
    ),
}


def measure(arena: Arena, contender: Contender) -> Iterator[Reading]:
    with space(contender, arena.servers, arena.folder) as here:
        here.start_workers(PREFORK_2)
        yield from _delays(here, arena.sizes.probes)


def measure_idle_workers(arena: Arena, contender: Contender) -> Iterator[Reading]:
    workers = arena.sizes.idle_workers
    with space(contender, arena.servers, arena.folder) as here:
        here.start_workers(Pool("prefork", 1), workers)
        before = here.server.operations()
        jobs = 0
        for reading in _delays(here, arena.sizes.probes):
            yield Reading(f"{reading.column}, {workers} workers", reading.value)
            jobs = arena.sizes.probes
        yield from _operations(here, before, jobs, f"per job, {workers} workers")


def measure_idle(arena: Arena, contender: Contender) -> Iterator[Reading]:
    sizes = arena.sizes
    with space(contender, arena.servers, arena.folder) as here:
        here.start_workers(PREFORK_2)
        here.drained(here.produce_paced(5, RATE))  # all that is made once has been made
        before = here.server.operations()
        cpu_s = here.server.cpu_seconds(), here.worker_cpu_seconds()
        time.sleep(sizes.idle_s)
        yield from _operations(here, before, sizes.idle_s, "per idle second")
        yield Reading(
            "server CPU ms per idle second", _per_s(here.server.cpu_seconds() - cpu_s[0], sizes.idle_s)
        )
        yield Reading(
            "worker CPU ms per idle second", _per_s(here.worker_cpu_seconds() - cpu_s[1], sizes.idle_s)
        )
        before = here.server.operations()
        jobs = here.produce_paced(sizes.probes, RATE)
        yield from _operations(here, before, jobs, "per job, 1 worker")


def _per_s(cpu_s: float, seconds: float) -> float:
    return cpu_s * 1000 / seconds


def _delays(here: Space, probes: int) -> Iterator[Reading]:
    here.drained(here.produce_paced(probes, RATE))
    delays = here.tally.delays_ms()
    for name, part in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99)):
        yield Reading(name, percentile(delays, part))


def _operations(here: Space, before: dict[str, int], per: float, what: str) -> Iterator[Reading]:
    after = here.server.operations()
    kinds = {kind: (after[kind] - number) / per for kind, number in before.items()}
    yield Reading(f"all {what}", sum(kinds.values()), "idle")
    yield Reading(f"queries {what}", kinds["query"], "idle")


def steps(contenders: Sequence[Contender], deep: bool) -> list[Step]:
    found = [Step("latency", "latency", contender, measure) for contender in contenders if contender.pools]
    ours = [contender for contender in contenders if contender.name == "ours"]
    found += [
        Step("latency-idle", "latency, idle workers", contender, measure_idle_workers) for contender in ours
    ]
    on_mongodb = [c for c in contenders if c.pools and c.servers[0] == "mongodb"]
    found += [Step("idle", "idle worker", contender, measure_idle) for contender in on_mongodb]
    return found
