"""``relata types``: pause and resume job types for the whole fleet."""

from __future__ import annotations

import click

from . import pausing
from .options import json_option
from .reach import job_store


@click.group()
def types() -> None:
    """Pause and resume job types; `relata stats` counts them."""


@types.command(
    epilog="""\b
Examples:
  celery -A myapp relata types pause myapp.summarise
  celery -A myapp relata types pause myapp.summarise myapp.translate --json"""
)
@click.argument("names", metavar="TYPE...", nargs=-1, required=True)
@json_option
def pause(names: tuple[str, ...], as_json: bool) -> None:
    """Have no worker begin a job of these types, until they are resumed.

    A type is a task's full name. All workers obey within a second, and so do those that start later.
    Running jobs go on; what is published waits, and jobs of other types in the same queues go on.
    """
    store = job_store()
    pausing.pause("type", names, store.pause_type, lambda: store.paused().types, as_json)


@types.command(
    epilog="""\b
Example:
  celery -A myapp relata types resume myapp.summarise"""
)
@click.argument("names", metavar="TYPE...", nargs=-1, required=True)
@json_option
def resume(names: tuple[str, ...], as_json: bool) -> None:
    """Let workers begin jobs of these types again, in the order in which they wait.

    Exit status: 0, or 1 when none of them was paused.
    """
    store = job_store()
    pausing.resume("type", names, store.resume_type, lambda: store.paused().types, as_json)
