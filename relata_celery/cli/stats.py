"""``relata stats``: how many jobs there are, where, and whether anything is stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from relata_celery.store.stats import QueueDepth, Stats
from relata_celery.store.tally import Tally, tally

from . import render
from .options import json_option
from .reach import job_store


@click.command(
    epilog="""\b
Examples:
  celery -A relata_celery relata stats
  celery -A relata_celery relata stats --json | jq .by_queue.default"""
)
@json_option
def stats(as_json: bool) -> None:
    """Count the jobs by state, queue and type.

    Also tells how long the oldest due job has waited, how many leases ran out (a worker died, and no
    other has taken its jobs back yet), how many ended jobs still have follow-ups to publish, and what is paused.
    """
    store = job_store()
    database = store.jobs.database
    source = Stats(database)
    totals, depths = source.totals(), source.depths()
    report = summary(tally(database), depths)
    report.update(expired_leases=totals.expired_leases, pending_followups=totals.pending_followups)
    paused = store.paused()
    report["paused"] = {"queues": sorted(paused.queues), "types": sorted(paused.types)}
    if as_json:
        render.print_json(report)
    else:
        _print(report)


def summary(counted: Iterable[Tally], depths: Iterable[QueueDepth]) -> dict[str, Any]:
    """The counts as the command's JSON shows them; every state is named, also with none."""
    counted = list(counted)
    by_queue = _grouped(counted, lambda row: row.queue)
    ages = {depth.queue: depth.oldest_due_s for depth in depths}
    return {
        "total": sum(row.jobs for row in counted),
        "by_state": _by_state(counted),
        "by_queue": {
            name: {**counts, "oldest_due_s": round(ages.get(name, 0.0), 3)}
            for name, counts in by_queue.items()
        },
        "by_type": _grouped(counted, lambda row: row.type),
        "oldest_due_s": round(max(ages.values(), default=0.0), 3),
    }


def _grouped(counted: list[Tally], name_of: Callable[[Tally], str]) -> dict[str, dict[str, int]]:
    names = sorted({name_of(row) for row in counted})
    return {name: _by_state([row for row in counted if name_of(row) == name]) for name in names}


def _by_state(rows: Iterable[Tally]) -> dict[str, int]:
    counts = dict.fromkeys(render.STATES, 0)
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + row.jobs
    return counts


def _print(report: Mapping[str, Any]) -> None:
    if not report["total"]:
        render.say("No jobs yet.")
        _print_paused(report["paused"])
        return
    numbers = [f"+{state.upper()}" for state in render.STATES]
    rows = [
        [name, *_numbers(counts), render.span(counts["oldest_due_s"]) if counts["oldest_due_s"] else "-"]
        for name, counts in report["by_queue"].items()
    ]
    rows.append(["all", *_numbers(report["by_state"]), ""])
    render.print_table(["QUEUE", *numbers, "+OLDEST DUE"], rows, narrow=["QUEUE"])
    render.say()
    rows = [[name, *_numbers(counts)] for name, counts in report["by_type"].items()]
    render.print_table(["TYPE", *numbers], rows, narrow=["TYPE"])
    render.say()
    for number, what in (
        (report["expired_leases"], "lease(s) ran out and wait for a worker to take the jobs back"),
        (report["pending_followups"], "ended job(s) have follow-ups that are not published yet"),
    ):
        render.say(f"{number:,} {what}")
    _print_paused(report["paused"])


def _print_paused(paused: Mapping[str, list[str]]) -> None:
    for what, names in paused.items():
        if names:
            render.say(f"paused {what}: {', '.join(map(render.shown, names))}")


def _numbers(counts: Mapping[str, int]) -> list[str]:
    return [f"{counts[state]:,}" if counts[state] else "-" for state in render.STATES]
