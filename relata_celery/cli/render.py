"""How things look: JSON for programs, tables for people. Nothing here reads or decides.

What comes from documents is shown, never obeyed: it is no markup, and a character that a terminal would
act on (escape sequences, line ends, direction marks) is printed as ``\\x1b``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relata_celery.domain.redact import one_line

#: Columns when no terminal says how many there are.
PLAIN_WIDTH = 180

STATE_STYLES: Mapping[str, str] = {
    "queued": "cyan",
    "running": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
}
STATES = tuple(STATE_STYLES)


def print_json(value: Any) -> None:
    """The value as JSON on standard output. ASCII only: what would steer a terminal is escaped."""
    click.echo(json.dumps(value, indent=2))


def say(line: str = "") -> None:
    """One line on standard output, as it is; the caller makes foreign text plain."""
    click.echo(line)


def console() -> Console:
    """A console on standard output that takes nothing for markup and adds no colours of its own."""
    context = click.get_current_context(silent=True)
    plain = bool(context and getattr(context.obj, "no_color", False))
    options: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "no_color": plain or None}
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        options["width"] = PLAIN_WIDTH
    return Console(**options)


def shown(value: object, limit: int = 300) -> str:
    """Foreign text on one line, with nothing in it that a terminal obeys."""
    return one_line(str(value), limit)


def lines(value: str, limit: int) -> str:
    """Foreign text that may keep its line ends, with nothing else in it that a terminal obeys."""
    cut = value if len(value) <= limit else f"{value[:limit]}… ({len(value):,} characters; --json shows all)"
    return "\n".join(one_line(line.replace("\t", "    "), len(cut)) for line in cut.splitlines())


def cell(value: object, style: str = "", limit: int = 300) -> Text:
    return Text(shown(value, limit), style=style, no_wrap=True, overflow="ellipsis")


def state_cell(state: str) -> Text:
    return cell(state, STATE_STYLES.get(state, ""))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Text | str]], *, whole: Sequence[str] = ()
) -> Table:
    """A table without borders; ``+`` in front of a column's name aligns it to the right.

    Each row stays on one line. Where a terminal is narrow, the columns named in ``whole`` are cut last.
    """
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in columns:
        title = name.lstrip("+")
        # rich narrows the columns that may wrap first; that no cell does wrap is for the cell to say.
        made.add_column(
            title,
            justify="right" if name.startswith("+") else "left",
            no_wrap=title in whole,
            overflow="ellipsis",
        )
    for row in rows:
        made.add_row(*(item if isinstance(item, Text) else cell(item) for item in row))
    return made


def iso(moment: datetime | None) -> str | None:
    """ISO 8601 in UTC, to the millisecond, as everywhere in the package's JSON."""
    if moment is None:
        return None
    return moment.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(moment: datetime | None) -> str:
    """A moment for people, UTC."""
    return "" if moment is None else moment.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def span(seconds: float) -> str:
    """A length of time for people: ``4 ms``, ``1.2 s``, ``3 m 20 s``, ``2 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for big, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= big:
            rest = whole % big // small
            return f"{whole // big} {names[0]} {rest} {names[1]}" if rest else f"{whole // big} {names[0]}"
    return f"{whole} s"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 job``, ``12,000 jobs``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
