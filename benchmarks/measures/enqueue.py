"""How fast one producer sends: one call at a time, and in bulk. No worker is running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.contenders.base import Contender
from benchmarks.space import space

from .base import Arena, Reading, Step, Table

TABLES = {
    "enqueue": Table(
        "Enqueue, one producer",
        "jobs/s",
        True,
        "In bulk: relata_celery.bulk() or its store's batches of 1,000; procrastinate's batch_defer; the others"
        " have no bulk call and loop with one producer. The floor writes documents of that size with the plain driver.",
    )
}


def measure(arena: Arena, contender: Contender) -> Iterator[Reading]:
    sizes = arena.sizes
    for column, verb, jobs in (
        ("one by one", "one_by_one", sizes.enqueue),
        ("in bulk", "in_bulk", sizes.bulk),
    ):
        with space(contender, arena.servers, arena.folder) as here:
            yield Reading(column, jobs / here.produce(verb, jobs))


def steps(contenders: Sequence[Contender], deep: bool) -> list[Step]:
    return [Step("enqueue", "enqueue", contender, measure) for contender in contenders]
