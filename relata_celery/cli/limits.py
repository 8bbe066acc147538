"""``relata limits``: what the fleet may do at once and per time; change it while workers run."""

from __future__ import annotations

from typing import Any

import click

from relata_celery.domain.limits import Limit, Rate
from relata_celery.store.limits import UNCHANGED

from . import render
from .commands import Refusal, WrongUsage
from .options import json_option
from .reach import job_store

_NONE = ("none", "unlimited")


@click.group()
def limits() -> None:
    """Look at the limits of the fleet; change them while workers run."""


@limits.command(
    "list",
    epilog="""\b
Examples:
  celery -A relata_celery relata limits list
  celery -A relata_celery relata limits list --json | jq '.[] | {limit, in_use, concurrency}'""",
)
@json_option
def list_limits(as_json: bool) -> None:
    """Show each limit that was used or set: slots in use, what is allowed, who waits, who set it."""
    found = job_store().limits.list()
    if as_json:
        render.print_json([_as_json(limit) for limit in found])
    elif not found:
        render.say("No limit was used or set yet; `relata limits set NAME` makes one.")
    else:
        columns = ["LIMIT", "+IN USE", "+AT ONCE", "+RATE", "+PERMITS NOW", "+WAITING", "SET BY"]
        rows: list[list[render.Cell | str]] = [[limit.name, *_numbers(limit), _source(limit)] for limit in found]
        render.print_table(columns, rows, narrow=["LIMIT"])


@limits.command(
    epilog="""\b
Examples:
  celery -A relata_celery relata limits show ai
  celery -A relata_celery relata limits show ai --json | jq .slots"""
)
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show one limit with those who hold its slots and those who wait for one."""
    limit = job_store().limits.get(name)
    if limit is None:
        raise _unknown(name)
    if as_json:
        render.print_json(_as_json(limit))
    else:
        _print(limit)


@limits.command(
    "set",
    epilog="""\b
Examples:
  celery -A relata_celery relata limits set ai --concurrency 4 --rate 60/m
  celery -A relata_celery relata limits set ai --rate 60/m --burst 10
  celery -A relata_celery relata limits set openai --concurrency none
  celery -A relata_celery relata limits set ai --concurrency 0""",
)
@click.argument("name")
@click.option("--concurrency", help="Slots at once: a whole number (0 lets nobody start), or none for any number.")
@click.option("--rate", help='Starts per time, such as 60/m (per s, m, h or d), or none for any rate.')
@click.option("--burst", type=float, help="How many of the rate may start at once; left out: a whole period's.")
@json_option
def set_limit(name: str, concurrency: str | None, rate: str | None, burst: float | None, as_json: bool) -> None:
    """Set a limit by hand: running workers obey from their next start on, whatever their settings say.

    What is left out stays as it is. Slots that are held stay held: after a lower number nobody
    starts until enough of them are free.
    """
    if concurrency is None and rate is None and burst is None:
        raise WrongUsage("nothing to set: give --concurrency, --rate, or both; see relata limits set --help")
    try:
        limit = job_store().limits.set(name, _at_once(concurrency), _rate(rate), burst=burst)
    except ValueError as exc:
        raise WrongUsage(render.shown(exc)) from None
    if as_json:
        render.print_json(_as_json(limit))
    else:
        in_use, at_once, rate_text, *_ = _numbers(limit)
        render.say(f"limit {render.shown(name)}: {at_once} at once, rate {rate_text}; {in_use} in use now")


@limits.command(
    epilog="""\b
Example:
  celery -A relata_celery relata limits reset ai"""
)
@click.argument("name")
@json_option
def reset(name: str, as_json: bool) -> None:
    """Have a limit follow the workers' settings again, from the next start on."""
    store = job_store().limits
    limit = store.get(name) if store.reset(name) else None
    if limit is None:
        raise _unknown(name)
    if as_json:
        render.print_json(_as_json(limit))
    else:
        render.say(f"limit {render.shown(name)}: follows the workers' settings from the next start on")


def _unknown(name: str) -> Refusal:
    return Refusal(
        f"there is no limit {render.shown(name)!r}: it was neither used nor set; `relata limits list` shows which are"
    )


def _at_once(text: str | None) -> Any:
    if text is None:
        return UNCHANGED
    if text.strip().lower() in _NONE:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"concurrency is {text[:60]!r}, must be a whole number from 0, or none") from None


def _rate(text: str | None) -> Any:
    if text is None:
        return UNCHANGED
    return None if text.strip().lower() in _NONE else text


def _numbers(limit: Limit) -> list[str]:
    """In use, at once, rate, permits, waiting."""
    at_once = "any" if limit.concurrency is None else f"{limit.concurrency:,}"
    permits = "-" if limit.permits is None else f"{limit.permits:.1f}"
    return [f"{limit.in_use:,}", at_once, _shown_rate(limit.rate), permits, f"{len(limit.waiters):,}"]


def _shown_rate(rate: Rate | None) -> str:
    if rate is None:
        return "any"
    usual = Rate.of(rate.count, rate.period_s).burst
    return str(rate) if rate.burst == usual else f"{rate}, {rate.burst:g} at once"


def _source(limit: Limit) -> str:
    return "hand" if limit.by_hand else "settings"


def _print(limit: Limit) -> None:
    in_use, at_once, rate, permits, waiting = _numbers(limit)
    render.print_fields(
        [
            ("limit", render.shown(limit.name)),
            ("in use", f"{in_use} of {at_once}"),
            ("rate", rate if limit.rate is None else f"{rate} ({permits} permits now)"),
            ("waiting", waiting),
            ("set by", _source(limit)),
        ]
    )
    if limit.slots:
        render.say()
        rows: list[list[render.Cell | str]] = [
            [slot.owner, slot.job_id or "-", str(slot.weight), render.clock(slot.since), render.clock(slot.until)]
            for slot in limit.slots
        ]
        columns = ["HELD BY", "JOB", "+WEIGHT", "SINCE (UTC)", "LEASED UNTIL (UTC)"]
        render.print_table(columns, rows, narrow=["HELD BY", "JOB"])


def _as_json(limit: Limit) -> dict[str, Any]:
    rate = limit.rate
    return {
        "limit": limit.name,
        "concurrency": limit.concurrency,
        "rate": rate and {"count": rate.count, "period_s": rate.period_s, "burst": rate.burst},
        "source": _source(limit),
        "in_use": limit.in_use,
        "permits": None if limit.permits is None else round(limit.permits, 3),
        "slots": [
            {
                "id": slot.id,
                "owner": slot.owner,
                "job": slot.job_id,
                "weight": slot.weight,
                "since": render.iso(slot.since),
                "until": render.iso(slot.until),
            }
            for slot in limit.slots
        ],
        "waiters": [{"id": waiter.id, "until": render.iso(waiter.until)} for waiter in limit.waiters],
    }
