"""``relata doctor``: does everything that the queue needs work, and if not, what to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import click

from . import render
from .checkup import ERROR, OK, WARNING, Check, Setting, check_up, settings_in_force
from .options import json_option
from .reach import app_here

_COLOURS = {OK: "green", WARNING: "yellow", ERROR: "red"}
_PACKAGES = ("relata_celery", "celery", "kombu", "pymongo")


@click.command(
    epilog="""\b
Examples:
  celery -A myapp relata doctor
  celery -A myapp relata doctor --json | jq '.checks[] | select(.status != "ok")'"""
)
@json_option
def doctor(as_json: bool) -> None:
    """Check the connection, the server, the indexes, the settings and the clock; change nothing.

    Every finding comes with what to do about it. Exit status: 0, or 1 when there is an error.
    """
    app = app_here()
    checks = list(check_up(app))
    # Settings that could not be loaded are told by a check, and a configuration that cannot be has none.
    settings = [] if checks[0].name == "configuration" else settings_in_force(app)
    failed = any(check.status == ERROR for check in checks)
    if as_json:
        render.print_json(
            {
                "ok": not failed,
                "checks": [
                    {"name": check.name, "status": check.status, "found": check.found, "mend": check.mend}
                    for check in checks
                ],
                "settings": {
                    setting.name: {"value": setting.value, "source": setting.source} for setting in settings
                },
                "versions": _versions(),
            }
        )
    else:
        _print(checks, settings)
    click.get_current_context().exit(1 if failed else 0)


def _print(checks: Sequence[Check], settings: Sequence[Setting]) -> None:
    lines: list[list[render.Cell | str]] = []
    for check in checks:
        lines.append([render.cell(check.status, _COLOURS[check.status]), check.name, check.found])
        if check.mend:
            lines.append(["", "", f"-> {check.mend}"])
    render.print_fields(lines)
    if settings:
        render.say()
        rows = [[setting.name, render.shown(setting.value), setting.source] for setting in settings]
        render.print_table(["SETTING", "VALUE", "FROM"], rows, narrow=["VALUE"])
    render.say()
    render.say(", ".join(f"{name} {number}" for name, number in _versions().items()))
    counts = {status: sum(check.status == status for check in checks) for status in _COLOURS}
    render.say(
        f"{counts[OK]} ok, {render.count(counts[WARNING], 'warning')}, {render.count(counts[ERROR], 'error')}"
    )


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
