"""What people type, made into values: times, states, names given several times or with commas."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any, Union

import click

Moment = Union[datetime, timedelta]

_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([smhdw])(?:\s+ago)?", re.ASCII | re.IGNORECASE)
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON and nothing else."
)


def when(context: click.Context, parameter: click.Parameter, value: str | None) -> Moment | None:
    """A moment (ISO 8601, UTC unless it says otherwise) or a span before now: a callback for an option."""
    if value is None:
        return None
    text = value.strip()
    try:
        if found := _AGO.fullmatch(text):
            return timedelta(seconds=float(found[1]) * _UNIT_S[found[2].lower()])
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return moment.astimezone(timezone.utc) if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text[:60]!r} is no time: write 30m, 2h or 3d for so long ago, or 2026-01-31T12:00 (UTC)",
            ctx=context,
            param=parameter,
        ) from None


def moment(value: Moment | None, now: Callable[[], datetime]) -> datetime | None:
    """The moment that was meant; ``now`` is asked only for a span before it."""
    if not isinstance(value, timedelta):
        return value
    try:
        return now() - value
    except OverflowError:  # before the calendar began
        return datetime.min.replace(tzinfo=timezone.utc)


def several(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...] | None
) -> tuple[str, ...]:
    """``--x a --x b,c`` as a, b, c: a callback for options given with ``multiple=True``."""
    return tuple(part for value in values or () for part in (p.strip() for p in value.split(",")) if part)


def several_of(known: type[Enum]) -> Callable[[click.Context, click.Parameter, Any], tuple[str, ...]]:
    """:func:`several`, each of them one of ``known``."""
    names = [str(member.value) for member in known]

    def checked(context: click.Context, parameter: click.Parameter, values: Any) -> tuple[str, ...]:
        chosen = several(context, parameter, values)
        for name in chosen:
            if name.lower() not in names:
                raise click.BadParameter(
                    f"{name[:60]!r} is not one of {', '.join(names)}", ctx=context, param=parameter
                )
        return tuple(name.lower() for name in chosen)

    return checked
