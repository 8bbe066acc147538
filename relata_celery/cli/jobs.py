"""``relata jobs``: list, show, retry, cancel, purge."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from relata_celery.domain.job import ErrorClass, JobState
from relata_celery.store.by_hand import Change
from relata_celery.store.by_hand_queries import SORT_FIELDS

from . import job_page, render
from .commands import Refusal
from .options import Moment, json_option, moment, several, several_of, when
from .payload import payload_of, plain_json
from .reach import job_store

LIMIT = 50
MOST = 100_000

_SORTS = [*(f"-{name}" for name in SORT_FIELDS), *SORT_FIELDS]


@click.group()
def jobs() -> None:
    """Look at jobs; retry, cancel or remove them."""


@jobs.command(
    "list",
    epilog="""\b
Examples:
  celery -A relata_celery relata jobs list --state failed --since 1d
  celery -A relata_celery relata jobs list --type myapp.summarise --state queued,running
  celery -A relata_celery relata jobs list --text timeout --sort -finished_at --limit 20
  celery -A relata_celery relata jobs list --item document-42 --json | jq -r '.[].id'""",
)
@click.option(
    "--state", multiple=True, callback=several_of(JobState), help="One or several, as in failed,cancelled."
)
@click.option("--type", "types", multiple=True, callback=several, help="The task's full name.")
@click.option("--queue", "queues", multiple=True, callback=several, help="The queue's name.")
@click.option("--error-class", help="transient, permanent, invalid, timeout or cancelled.")
@click.option("--item", help="The item_id that the app gave.")
@click.option("--tag", help="One of the tags that the app gave.")
@click.option("--text", help="Text within id, type, item_id or error; upper and lower case are the same.")
@click.option(
    "--since", callback=when, help="Created at this time or later: 30m, 2h, 3d (ago), or ISO 8601 (UTC)."
)
@click.option("--until", callback=when, help="Created before this time.")
@click.option(
    "--limit", type=click.IntRange(1, MOST), default=LIMIT, show_default=True, help="At most so many."
)
@click.option(
    "--sort",
    default="-created_at",
    show_default=True,
    help=f"By {', '.join(SORT_FIELDS)}; a minus in front: largest first. Only created_at is fast with very many.",
)
@json_option
def list_jobs(
    state: tuple[str, ...],
    types: tuple[str, ...],
    queues: tuple[str, ...],
    error_class: str | None,
    item: str | None,
    tag: str | None,
    text: str | None,
    since: Moment | None,
    until: Moment | None,
    limit: int,
    sort: str,
    as_json: bool,
) -> None:
    """List jobs, newest first. Filters restrict together; without any, all jobs are meant."""
    if error_class is not None and error_class.lower() not in list(ErrorClass):
        known = ", ".join(ErrorClass)
        raise click.BadParameter(f"{error_class[:60]!r} is not one of {known}", param_hint="'--error-class'")
    if sort not in _SORTS:
        raise click.BadParameter(
            f"{sort[:60]!r} is not one of {', '.join(SORT_FIELDS)}", param_hint="'--sort'"
        )
    store = job_store()
    now = store.jobs.database.clock.now
    created_since, created_until = moment(since, now), moment(until, now)
    if created_since and created_until and created_since >= created_until:
        raise click.BadParameter(
            f"{render.iso(created_since)} is not before --until {render.iso(created_until)}",
            param_hint="'--since'",
        )
    found = store.find(
        state=state,
        type=types,
        queue=queues,
        error_class=error_class and error_class.lower(),
        item_id=item,
        tag=tag,
        text=text,
        created_since=created_since,
        created_until=created_until,
        sort=sort,
        limit=limit if as_json else limit + 1,
    )
    if as_json:
        render.print_json_array(plain_json(job) for job in found)
    elif not found:
        render.say("No job matches." if _filtered() else "No jobs yet.")
    else:
        job_page.listing(found[:limit])
        if len(found) > limit:
            render.say(
                f"\nThere are more than these {render.count(limit, 'job')}: restrict them, or give --limit."
            )


def _filtered() -> bool:
    """Whether the command line restricts the jobs."""
    given: Mapping[str, Any] = click.get_current_context().params
    return any(value for name, value in given.items() if name not in ("limit", "sort", "as_json"))


@jobs.command(
    epilog="""\b
Examples:
  celery -A relata_celery relata jobs show 4f1c0d3e-...
  celery -A relata_celery relata jobs show 4f1c0d3e-... --json | jq .history"""
)
@click.argument("job_id", metavar="ID")
@json_option
def show(job_id: str, as_json: bool) -> None:
    """Show all of one job: arguments, attempts, error, progress, result.

    With --json: the job's document, and besides it `payload` with the decoded args and kwargs.
    """
    job = job_store().get(job_id)
    if job is None:
        raise Refusal(
            f"there is no job {render.shown(job_id)!r}; `relata jobs list` shows which there are, "
            "and ended jobs are removed after their retention"
        )
    if as_json:
        payload = payload_of(job.message)
        read = {"args": payload.args, "kwargs": payload.kwargs, "unread": payload.unread}
        render.print_json({**plain_json(job), "payload": read})
    else:
        job_page.show(job)


@jobs.command(
    epilog="""\b
Examples:
  celery -A relata_celery relata jobs retry 4f1c0d3e-... 9a7b2c1d-...
  celery -A relata_celery relata jobs list --state failed --json | jq -r '.[].id' \\
    | xargs celery -A relata_celery relata jobs retry"""
)
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@json_option
def retry(job_ids: tuple[str, ...], as_json: bool) -> None:
    """Queue failed or cancelled jobs again: due now, with all their attempts. Their history is kept.

    Exit status: 0, or 1 when none changed or one does not exist.
    """
    changes = job_store().retry(_once(job_ids))
    _tell(changes, "queued again", as_json)


@jobs.command(
    epilog="""\b
Example:
  celery -A relata_celery relata jobs cancel 4f1c0d3e-... 9a7b2c1d-..."""
)
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@json_option
def cancel(job_ids: tuple[str, ...], as_json: bool) -> None:
    """Cancel queued and running jobs for good.

    A running job's outcome is refused from now on; its worker is told within a heartbeat.
    Exit status: 0, or 1 when none changed or one does not exist.
    """
    changes = job_store().cancel(_once(job_ids))
    _tell(changes, "cancelled", as_json)


@jobs.command(
    epilog="""\b
Examples:
  celery -A relata_celery relata jobs purge --queue default
  celery -A relata_celery relata jobs purge --queue default --yes"""
)
@click.option("--queue", required=True, help="The queue whose waiting jobs are removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def purge(queue: str, yes: bool, as_json: bool) -> None:
    """Remove every job that waits in a queue, for good. Running and ended jobs stay.

    Counts them first and asks. Where nobody can answer, nothing is removed without --yes.
    """
    by_hand = job_store().jobs
    name, waiting = render.shown(queue), by_hand.queue_size(queue)
    if waiting and not yes:
        what = f"{render.count(waiting, 'queued job')} of queue {name}"
        if not sys.stdin.isatty():
            raise Refusal(f"{what} would be removed for good; say --yes to do it")
        if not click.confirm(f"Remove {what} for good?", err=True):
            raise Refusal("nothing was removed")
    removed = by_hand.purge(queue) if waiting else 0
    if as_json:
        render.print_json({"queue": queue, "removed": removed})
    elif removed:
        render.say(f"Removed {render.count(removed, 'queued job')} of queue {name}.")
    else:
        render.say(f"No job waits in queue {name}; `relata queues list` shows where any do.")


def _once(job_ids: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(job_ids))


def _tell(changes: Mapping[str, Change], done: str, as_json: bool) -> None:
    """Say what happened to each, and end with 1 when none changed or one does not exist."""
    if as_json:
        render.print_json(
            [
                {
                    "id": change.id,
                    "changed": change.changed,
                    "before": None if change.before is None else change.before.value,
                    "reason": change.reason,
                }
                for change in changes.values()
            ]
        )
    else:
        for change in changes.values():
            was = f"{done} (was {change.before})" if change.changed else f"not changed: {change.reason}"
            render.say(f"{render.shown(change.id)}: {was}")
    changed = [change for change in changes.values() if change.changed]
    unknown = [change for change in changes.values() if change.before is None]
    if unknown or not changed:
        click.get_current_context().exit(1)
