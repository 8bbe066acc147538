"""Resident memory of the worker's parent process: idle, and after it has drained a queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.contenders.base import PREFORK_2, Contender
from benchmarks.processes import peak_rss_mb, rss_mb
from benchmarks.space import space

from .base import Arena, Reading, Step, Table

COMPARED = ("ours", "celery-redis", "celery-rabbitmq")

TABLES = {"memory": Table("Memory of the worker's parent (prefork 2)", "MB", False)}


def measure(arena: Arena, contender: Contender) -> Iterator[Reading]:
    with space(contender, arena.servers, arena.folder) as here:
        here.start_workers(PREFORK_2)
        here.delays_ms(5, 20.0)  # what is loaded with the first job has been loaded
        parent = here.workers[0].pid
        yield Reading("idle", rss_mb(parent))
        done = here.tally.count().jobs
        here.produce("in_bulk", arena.sizes.drain)
        here.drained(done + arena.sizes.drain)
        yield Reading("after the drain", rss_mb(parent))
        yield Reading("peak", peak_rss_mb(parent))


def steps(contenders: Sequence[Contender], deep: bool) -> list[Step]:
    return [
        Step("memory", "memory", contender, measure) for contender in contenders if contender.name in COMPARED
    ]
