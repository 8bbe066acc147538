"""From the producer's call to the task's start, at 20 jobs a second, to workers that have nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from benchmarks.contenders.base import PREFORK_2, Contender, Pool
from benchmarks.producer import WARM_UP
from benchmarks.space import space

from .base import Arena, Reading, Step, Table, percentile

RATE = 20.0

TABLES = {
    "latency": Table(
        "From the producer's call to the start of the job, 20 jobs/s, idle worker (prefork 2)",
        "ms",
        False,
        "After the worker has had nothing to do for a while; and, apart, in its very first seconds.",
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
    sizes = arena.sizes
    with space(contender, arena.servers, arena.folder) as here:
        here.start_workers(PREFORK_2)
        early = here.delays_ms(sizes.early_probes, RATE)
        time.sleep(sizes.settle_s)
        yield from _percentiles(here.delays_ms(sizes.probes, RATE))
        yield Reading("p50, worker just started", percentile(early, 0.5))


def measure_idle_workers(arena: Arena, contender: Contender) -> Iterator[Reading]:
    for workers in (arena.sizes.idle_workers, 2 * arena.sizes.idle_workers):
        yield from _with_idle_workers(arena, contender, workers)


def _with_idle_workers(arena: Arena, contender: Contender, workers: int) -> Iterator[Reading]:
    sizes = arena.sizes
    with space(contender, arena.servers, arena.folder) as here:
        here.start_workers(Pool("prefork", 1), workers)
        time.sleep(sizes.settle_s)
        before = here.server.operations()
        delays = here.delays_ms(sizes.probes, RATE)
        after = here.server.operations()
        yield from _percentiles(delays, f", {workers} workers")
        yield from _operations(before, after, sizes.probes + WARM_UP, f"per job, {workers} workers")


def measure_idle(arena: Arena, contender: Contender) -> Iterator[Reading]:
    sizes = arena.sizes
    with space(contender, arena.servers, arena.folder) as here:
        here.start_workers(PREFORK_2)
        here.delays_ms(5, RATE)  # all that is made once has been made
        time.sleep(sizes.settle_s)
        server, before = here.server, here.server.operations()
        server_s, worker_s = server.cpu_seconds(), here.worker_cpu_seconds()
        time.sleep(sizes.idle_s)
        idle = server.operations()
        yield from _operations(before, idle, sizes.idle_s, "per idle second")
        for what, spent_s in (
            ("server", server.cpu_seconds() - server_s),
            ("worker", here.worker_cpu_seconds() - worker_s),
        ):
            yield Reading(f"{what} CPU ms per idle second", spent_s * 1000 / sizes.idle_s)
        before = server.operations()
        here.delays_ms(sizes.probes, RATE)
        yield from _operations(before, server.operations(), sizes.probes + WARM_UP, "per job, 1 worker")


def _percentiles(delays: list[float], what: str = "") -> Iterator[Reading]:
    for name, part in (("p50", 0.50), ("p95", 0.95), ("p99", 0.99)):
        yield Reading(name + what, percentile(delays, part))


def _operations(before: dict[str, int], after: dict[str, int], per: float, what: str) -> Iterator[Reading]:
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
