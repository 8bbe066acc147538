"""What pausing and resuming have in common, of queues and of types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import click

from . import render
from .commands import WrongUsage

Change = Callable[[Sequence[str]], Mapping[str, bool]]
Since = Callable[[], Mapping[str, "datetime | None"]]


def pause(noun: str, names: Sequence[str], change: Change, since: Since, as_json: bool) -> None:
    """Pause these, and say of each whether that is new."""
    _tell(noun, _changed(names, change), since(), ("paused", "was paused already"), as_json)


def resume(noun: str, names: Sequence[str], change: Change, since: Since, as_json: bool) -> None:
    """Resume these, and say of each whether it was paused; exit status 1 when none was."""
    changed = _changed(names, change)
    _tell(noun, changed, since(), ("resumed", "was not paused"), as_json)
    if not any(changed.values()):
        click.get_current_context().exit(1)


def _changed(names: Sequence[str], change: Change) -> Mapping[str, bool]:
    try:
        return change(names)
    except ValueError as exc:
        raise WrongUsage(render.shown(exc)) from None


def _tell(
    noun: str,
    changed: Mapping[str, bool],
    since: Mapping[str, datetime | None],
    words: tuple[str, str],
    as_json: bool,
) -> None:
    if as_json:
        render.print_json(
            [
                {noun: name, "changed": new, "paused": name in since, "paused_since": render.iso(since.get(name))}
                for name, new in changed.items()
            ]
        )
        return
    for name, new in changed.items():
        render.say(f"{noun} {render.shown(name)}: {words[0] if new else words[1]}")


def since_cell(paused: Mapping[str, datetime | None], name: str) -> render.Cell:
    """Since when this is paused, for a table; empty when it is not."""
    if name not in paused:
        return render.cell("")
    moment = paused[name]
    return render.cell("yes" if moment is None else f"since {render.clock(moment)}", "yellow")
