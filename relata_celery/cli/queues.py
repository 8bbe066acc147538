"""``relata queues``: what waits in each queue, and for how long."""

from __future__ import annotations

import click

from relata_celery.store.stats import QueueDepth, Stats

from . import render
from .options import json_option
from .reach import app_here, job_store


@click.group()
def queues() -> None:
    """Look at the queues."""


@queues.command(
    "list",
    epilog="""\b
Examples:
  celery -A relata_celery relata queues list
  celery -A relata_celery relata queues list --json""",
)
@json_option
def list_queues(as_json: bool) -> None:
    """Show each queue: jobs waiting, jobs running, and how long the oldest due one has waited.

    Queues that the app consumes are listed also when they are empty, others only while they hold
    queued or running jobs.
    """
    depths = {depth.queue: depth for depth in Stats(job_store().jobs.database).depths()}
    names = sorted({*depths, *map(str, app_here().amqp.queues)})
    found = [depths.get(name, QueueDepth(name, 0, 0, 0.0)) for name in names]
    if as_json:
        render.print_json(
            [
                {
                    "queue": depth.queue,
                    "queued": depth.queued,
                    "running": depth.running,
                    "oldest_due_s": round(depth.oldest_due_s, 3),
                }
                for depth in found
            ]
        )
        return
    rows = [
        [
            depth.queue,
            f"{depth.queued:,}",
            f"{depth.running:,}",
            render.span(depth.oldest_due_s) if depth.oldest_due_s else "-",
        ]
        for depth in found
    ]
    render.print_table(["QUEUE", "+QUEUED", "+RUNNING", "+OLDEST DUE"], rows, narrow=["QUEUE"])
