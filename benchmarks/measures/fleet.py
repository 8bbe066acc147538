"""Many worker processes (solo) draining one queue, against one.

All of them are ready, on a queue that stays empty, before one broadcast tells them to consume the full
one: so the slow start of many Python processes is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.contenders.base import SOLO, Contender
from benchmarks.space import space

from .base import Arena, Reading, Step, Table

TABLES = {"fleet": Table("One queue drained by many workers (solo)", "jobs/s", True)}


def measure(arena: Arena, contender: Contender) -> Iterator[Reading]:
    jobs = arena.sizes.drain
    for workers in (1, arena.sizes.fleet):
        with space(contender, arena.servers, arena.folder) as here:
            here.produce("in_bulk", jobs)
            here.start_workers(SOLO, workers, parked=True)
            here.produce("consume", workers)
            yield Reading("1 worker" if workers == 1 else f"{workers} workers", here.drained(jobs).rate)


def steps(contenders: Sequence[Contender], deep: bool) -> list[Step]:
    return [Step("fleet", "many workers", contender, measure) for contender in contenders if contender.fleet]
