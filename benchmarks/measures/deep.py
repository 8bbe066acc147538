"""Whether a long queue makes each job dearer: a drain, and a claim at the store, with ever more jobs behind.

Only for ours, and only with ``--deep``: a million jobs take minutes to insert.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from benchmarks.contenders.base import PREFORK_2, Contender
from benchmarks.space import Space, space

from .base import Arena, Reading, Step, Table, percentile

BATCH = 32
CLAIMS = 30

TABLES = {
    "deep": Table("Drain (prefork 2) with so many jobs queued behind", "jobs/s", True),
    "claim": Table("One claim at the store with so many jobs queued", "ms", False),
}


def measure(arena: Arena, contender: Contender) -> Iterator[Reading]:
    sizes = arena.sizes
    with space(contender, arena.servers, arena.folder) as here:
        here.produce("later", sizes.future)
        here.produce("in_bulk", sizes.deep_drain)
        yield Reading(f"none, {sizes.future:,} future jobs beside", _drain(here, sizes.deep_drain))
    with space(contender, arena.servers, arena.folder) as here:
        for behind in sizes.deep:
            _fill(here, sizes.deep_drain + behind)
            yield Reading(f"{behind:,}", _drain(here, sizes.deep_drain))
            _fill(here, behind)
            yield from _claims(here, behind)


def _drain(here: Space, jobs: int) -> float:
    """The rate at which a new worker runs the first so many jobs."""
    here.start_workers(PREFORK_2)
    count = here.drained(jobs)
    here.stop_workers()
    return count.rate


def _fill(here: Space, jobs: int) -> None:
    """Add jobs until so many are queued."""
    waiting = here.server.client[here.name]["relata_jobs"].count_documents({"state": "queued"})
    if jobs > waiting:
        here.produce("in_bulk", jobs - waiting)


def _claims(here: Space, behind: int) -> Iterator[Reading]:
    from relata_celery.bootstrap import open_stores

    jobs = open_stores(here.server.uri(here.name)).jobs
    for size in (1, BATCH):
        took_ms = []
        for _ in range(CLAIMS):
            begin = time.perf_counter()
            claimed = jobs.claim([here.name], size, "benchmark", 600.0)
            took_ms.append((time.perf_counter() - begin) * 1000)
            if len(claimed) != size:
                raise RuntimeError(f"claimed {len(claimed)} of {size} jobs with {behind} queued")
        for name, part in (("p50", 0.5), ("p95", 0.95)):
            yield Reading(f"{size} of {behind:,}, {name}", percentile(took_ms, part), "claim")


def steps(contenders: Sequence[Contender], deep: bool) -> list[Step]:
    if not deep:
        return []
    return [
        Step("deep", "deep queue", contender, measure) for contender in contenders if contender.name == "ours"
    ]
