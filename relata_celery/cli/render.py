"""How things look: JSON for programs, tables for people. Nothing here reads or decides.

What comes from documents is shown, never obeyed: it is no markup, and a character that a terminal would
act on (escape sequences, line ends, direction marks) is printed as ``\\x1b``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relata_celery.domain.redact import one_line

#: Columns when no terminal says how many there are.
PLAIN_WIDTH = 180
#: Longest value of a field for people, in characters; JSON shows everything.
MAX_VALUE = 20_000
GAP = "  "
NARROWEST = 6

STATE_COLOURS: Mapping[str, str] = {
    "queued": "cyan",
    "running": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
}
STATES = tuple(STATE_COLOURS)


def print_json(value: Any) -> None:
    """The value as JSON on standard output. ASCII only: what would steer a terminal is escaped."""
    click.echo(json.dumps(value, indent=2))


def print_json_array(values: Iterable[Any]) -> None:
    """A JSON array with each value on a line of its own, written as it goes."""
    texts = map(json.dumps, values)
    first = next(texts, None)
    if first is None:
        say("[]")
        return
    _write(itertools.chain([f"[{first}"], (f",\n {text}" for text in texts), ["]\n"]))


def say(line: str = "") -> None:
    """One line on standard output, as it is; the caller makes foreign text plain."""
    click.echo(line)


def shown(value: object, limit: int = 300) -> str:
    """Foreign text on one line, with nothing in it that a terminal obeys."""
    return one_line(str(value), limit)


def lines(value: str, limit: int) -> str:
    """Foreign text that may keep its line ends, with nothing else in it that a terminal obeys."""
    cut = value if len(value) <= limit else f"{value[:limit]}… ({len(value):,} characters; --json shows all)"
    return "\n".join(one_line(line.replace("\t", "    "), len(cut)) for line in cut.splitlines())


def _write(parts: Iterable[str]) -> None:
    """Write the parts as they are, many at a time: each write is flushed."""
    parts = iter(parts)
    while some := "".join(itertools.islice(parts, 500)):
        click.echo(some, nl=False)


class Cell(NamedTuple):
    """A plain text, ready to be shown, and its colour ("" for the terminal's own)."""

    text: str
    colour: str = ""


def cell(value: object, colour: str = "", limit: int = 300) -> Cell:
    return Cell(shown(value, limit), colour)


def state_cell(state: str) -> Cell:
    return cell(state, STATE_COLOURS.get(state, ""))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell | str]], *, narrow: Collection[str]
) -> None:
    """Print columns without borders, one line for each row; ``+`` before a column's name aligns it to the right.

    Where the terminal has too few columns, those named in ``narrow`` are cut, the widest first. Laid out here,
    because rich takes 2 ms for a row, and a listing can have thousands.
    """
    titles = [Cell(name.lstrip("+")) for name in columns]
    cells = [[item if isinstance(item, Cell) else cell(item) for item in row] for row in rows]
    widths = [max(cell_len(row[at].text) for row in (titles, *cells)) for at in range(len(columns))]
    free = [at for at, title in enumerate(titles) if title.text in narrow]
    _narrow(widths, free, width() - len(GAP) * (len(columns) - 1))
    rightwards = [name.startswith("+") for name in columns]
    _write(_lines(titles, cells, widths, rightwards))


def _lines(
    titles: Sequence[Cell], cells: Sequence[Sequence[Cell]], widths: Sequence[int], rightwards: Sequence[bool]
) -> Iterator[str]:
    plain = _plain()
    for row in (titles, *cells):
        parts = []
        for item, size, rightward in zip(row, widths, rightwards, strict=True):
            text = _fitted(item.text, size)
            space = " " * (size - cell_len(text))
            if not plain and (row is titles or item.colour):
                text = click.style(text, fg=item.colour or None, bold=row is titles or None)
            parts.append(space + text if rightward else text + space)
        yield f"{GAP.join(parts).rstrip()}\n"


def _narrow(widths: list[int], free: Sequence[int], most: int) -> None:
    """Take from the widest of the ``free`` columns until all fit, or each is as narrow as is of any use."""
    while sum(widths) > most and free:
        widest = max(free, key=lambda at: widths[at])
        if widths[widest] <= NARROWEST:
            return
        widths[widest] -= 1


def _fitted(text: str, size: int) -> str:
    return text if cell_len(text) <= size else f"{set_cell_size(text, size - 1)}…"


def print_fields(rows: Iterable[Sequence[Cell | str]]) -> None:
    """Names and, in the last column, values: these keep their line ends and fold at the terminal's edge."""
    grid = Table.grid(padding=(0, 2))
    for *names, value in rows:
        last = value if isinstance(value, Cell) else Cell(lines(value, MAX_VALUE))
        first = (item if isinstance(item, Cell) else cell(item) for item in names)
        grid.add_row(
            *(Text(text, style=colour, no_wrap=True) for text, colour in first), Text(*last, overflow="fold")
        )
    to = _console()
    with to.capture() as captured:
        to.print(grid)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def width() -> int:
    """How many columns there are to write on."""
    return _console().width


def _plain() -> bool:
    context = click.get_current_context(silent=True)
    return bool(context and getattr(context.obj, "no_color", False))


def _console() -> Console:
    """A console on standard output that takes nothing for markup and adds no colours of its own."""
    options: dict[str, Any] = {
        "markup": False,
        "highlight": False,
        "emoji": False,
        "no_color": _plain() or None,
    }
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        options["width"] = PLAIN_WIDTH
    return Console(**options)


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
