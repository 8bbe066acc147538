"""``relata queues``: what waits in each queue, and for how long; pause, resume."""

from __future__ import annotations

import click

from relata_celery.store.stats import QueueDepth, Stats

from . import pausing, render
from .options import json_option
from .reach import app_here, job_store


@click.group()
def queues() -> None:
    """Look at the queues; pause and resume them."""


@queues.command(
    "list",
    epilog="""\b
Examples:
  celery -A relata_celery relata queues list
  celery -A relata_celery relata queues list --json""",
)
@json_option
def list_queues(as_json: bool) -> None:
    """Show each queue: jobs waiting, jobs running, how long the oldest due one has waited, since when it is paused.

    Queues that the app consumes are listed also when they are empty, others only while they hold
    queued or running jobs, or are paused.
    """
    store = job_store()
    depths = {depth.queue: depth for depth in Stats(store.jobs.database).depths()}
    paused = store.paused().queues
    names = sorted({*depths, *map(str, app_here().amqp.queues), *paused})
    found = [depths.get(name, QueueDepth(name, 0, 0, 0.0)) for name in names]
    if as_json:
        render.print_json(
            [
                {
                    "queue": depth.queue,
                    "queued": depth.queued,
                    "running": depth.running,
                    "oldest_due_s": round(depth.oldest_due_s, 3),
                    "paused": depth.queue in paused,
                    "paused_since": render.iso(paused.get(depth.queue)),
                }
                for depth in found
            ]
        )
        return
    rows: list[list[render.Cell | str]] = [
        [
            depth.queue,
            f"{depth.queued:,}",
            f"{depth.running:,}",
            render.span(depth.oldest_due_s) if depth.oldest_due_s else "-",
            pausing.since_cell(paused, depth.queue),
        ]
        for depth in found
    ]
    render.print_table(["QUEUE", "+QUEUED", "+RUNNING", "+OLDEST DUE", "PAUSED (UTC)"], rows, narrow=["QUEUE"])


@queues.command(
    epilog="""\b
Examples:
  celery -A relata_celery relata queues pause ai
  celery -A myapp relata queues pause reports mail --json"""
)
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True)
@json_option
def pause(names: tuple[str, ...], as_json: bool) -> None:
    """Have no worker begin a job of these queues, until they are resumed.

    All workers obey within a second, and so do those that start later. Running jobs go on; what is
    published waits.
    """
    store = job_store()
    pausing.pause("queue", names, store.pause_queue, lambda: store.paused().queues, as_json)


@queues.command(
    epilog="""\b
Example:
  celery -A relata_celery relata queues resume ai"""
)
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True)
@json_option
def resume(names: tuple[str, ...], as_json: bool) -> None:
    """Let workers begin jobs of these queues again.

    Exit status: 0, or 1 when none of them was paused.
    """
    store = job_store()
    pausing.resume("queue", names, store.resume_queue, lambda: store.paused().queues, as_json)
