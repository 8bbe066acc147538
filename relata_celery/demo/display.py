"""What the demo shows while it runs: bars in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

PLAIN_WIDTH = 140
PLAIN_PERIOD_S = 2.0


def console_for(stream: TextIO) -> Console:
    """A console on ``stream``; wide enough for the tables when there is no terminal to ask."""
    console = Console(file=stream, highlight=False)
    return console if console.is_terminal else Console(file=stream, highlight=False, width=PLAIN_WIDTH)


class Display(Protocol):
    """``totals`` and ``done`` go by step; ``note`` is what happens besides."""

    def say(self, line: str) -> None:
        """Print a line that stays."""

    def update(self, done: Mapping[str, int], note: str) -> None:
        """Show how far each step is."""

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""


def display_for(console: Console, totals: Mapping[str, int]) -> Display:
    """Bars when ``console`` is a terminal, else lines."""
    return Bars(console, totals) if console.is_terminal else Lines(console, totals)


class Bars:
    """One bar per step, redrawn in place; lines scroll above them."""

    def __init__(self, console: Console, totals: Mapping[str, int]) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._bars: dict[str, TaskID] = {
            step: self._progress.add_task(step, total=total, note="") for step, total in totals.items()
        }
        self._progress.start()

    def say(self, line: str) -> None:
        self._console.print(escape(line))

    def update(self, done: Mapping[str, int], note: str) -> None:
        last = list(self._bars)[-1]
        for step, bar in self._bars.items():
            shown = escape(note) if step == last else ""
            self._progress.update(bar, completed=done.get(step, 0), note=shown)

    def close(self) -> None:
        self._progress.stop()


class Lines:
    """A line whenever something changed, at most one in two seconds."""

    def __init__(self, console: Console, totals: Mapping[str, int]) -> None:
        self._console = console
        self._totals = totals
        self._shown = ""
        self._shown_at = float("-inf")

    def say(self, line: str) -> None:
        self._console.print(escape(line), soft_wrap=True)

    def update(self, done: Mapping[str, int], note: str) -> None:
        line = ", ".join(f"{step} {done.get(step, 0)}/{total}" for step, total in self._totals.items())
        line += f"  {note}" if note else ""
        now = time.monotonic()
        if line != self._shown and now - self._shown_at >= PLAIN_PERIOD_S:
            self._shown, self._shown_at = line, now
            self.say(line)

    def close(self) -> None:
        """Nothing was changed."""
