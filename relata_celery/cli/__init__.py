"""The operator's commands: ``celery -A APP relata ...``.

Celery loads this module at every one of its commands, a worker's start included, so it imports
nothing but click: each command is loaded when it is asked for.

    commands.py   the group: loads commands, tells errors in one line
    reach.py      from the command line to the app's jobs
    options.py    what people type: times, states, several values
    render.py     terminal and JSON; job_page.py one job, payload.py what its message holds
    jobs.py queues.py types.py limits.py workers.py stats.py doctor.py embedded.py demo.py    one file per noun;
    pausing.py    what two of them have in common
"""

from __future__ import annotations

import click

from .commands import Commands

_ROOMS = {
    name: f"relata_celery.cli.{name}"
    for name in ("demo", "doctor", "embedded", "jobs", "limits", "queues", "stats", "types")
}


@click.group(
    cls=Commands,
    rooms=_ROOMS,
    epilog="""\b
Examples:
  celery -A relata_celery relata stats
  celery -A myapp relata jobs list --state failed --since 1d
  celery -A myapp relata doctor""",
)
def relata() -> None:
    """Look at and steer the jobs that are kept in MongoDB.

    Every command that reads takes --json. Exit status: 0, 1 when it could not be done, or 2 when
    it was asked in a way that cannot be understood.
    """
