"""``relata embedded``: the private MongoDB of people who have none."""

from __future__ import annotations

from typing import Any

import click

from relata_celery import embedded as server

from . import render
from .options import json_option


@click.group()
def embedded() -> None:
    """Start, stop or look at the embedded MongoDB (one per RELATA_HOME, shared by all of its processes)."""


@embedded.command(
    epilog="""\b
Example:
  celery -A relata_celery relata embedded start"""
)
@json_option
def start(as_json: bool) -> None:
    """Start it unless it runs, and wait until it takes writes."""
    _tell(server.start(), as_json)


@embedded.command(
    epilog="""\b
Example:
  celery -A relata_celery relata embedded stop"""
)
@json_option
def stop(as_json: bool) -> None:
    """Shut it down and wait until it is gone. Its data stay; workers that use it wait for it."""
    stopped = server.stop()
    if as_json:
        render.print_json({"stopped": stopped, **described(server.status())})
    else:
        render.say("The embedded MongoDB is stopped." if stopped else "The embedded MongoDB was not running.")


@embedded.command(
    epilog="""\b
Examples:
  celery -A relata_celery relata embedded status
  celery -A relata_celery relata embedded status --json | jq .running"""
)
@json_option
def status(as_json: bool) -> None:
    """Say whether it runs, and where. Starts nothing."""
    _tell(server.status(), as_json)


def described(found: server.EmbeddedStatus) -> dict[str, Any]:
    """The status as JSON; its URI shows no password."""
    return {
        "running": found.running,
        "home": str(found.home),
        "log": str(found.log),
        "pid": found.pid,
        "port": found.port,
        "version": found.version,
        "since": render.iso(found.since),
        "uri": found.uri,
    }


def _tell(found: server.EmbeddedStatus, as_json: bool) -> None:
    if as_json:
        render.print_json(described(found))
        return
    if not found.running:
        render.say(f"The embedded MongoDB is not running. Its home is {render.shown(found.home, 1000)}")
        return
    render.say("The embedded MongoDB is running.")
    for name, value in described(found).items():
        if name != "running" and value is not None:
            render.say(f"  {name:8} {render.shown(value, 1000)}")
