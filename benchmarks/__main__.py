"""``python -m benchmarks``: starts the servers, runs the contenders in turn, prints tables, writes JSON."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from . import machine
from .contenders import CONTENDERS, REFERENCE
from .contenders.base import Contender
from .measures import TABLES, all_steps
from .measures.base import Arena, Step
from .report import Results, show, write_json
from .servers import Missing, Servers
from .space import QUICK, Sizes

#: What one may go wrong with in a measurement without ending the run.
TROUBLE = (OSError, RuntimeError, ValueError, LookupError, ImportError)


def present(
    contenders: Iterable[Contender], servers: Servers, results: Results, console: Console
) -> list[Contender]:
    """Those that can run here; a line for each that cannot."""
    found = []
    for contender in contenders:
        try:
            contender.check(servers)
        except Missing as exc:
            results.skipped[contender.name] = str(exc)
            console.print(f"left out: {contender.title}: {exc}", markup=False)
        else:
            found.append(contender)
    return found


def run(steps: list[Step], rounds: int, arena: Arena, results: Results, console: Console) -> None:
    """Every round runs every step; what is compared stands side by side in time."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=rounds * len(steps))
        for number in range(1, rounds + 1):
            for step in steps:
                what = f"{step.label}: {step.contender.title}"
                progress.update(bar, description=f"round {number}, {what}")
                try:
                    for reading in step.run(arena, step.contender):
                        results.add(
                            reading.table or step.table, reading.column, step.contender.name, reading.value
                        )
                except TROUBLE as exc:
                    results.failed.append(f"round {number}, {what}: {type(exc).__name__}: {exc}")
                    progress.console.print(results.failed[-1], style="red", markup=False)
                progress.advance(bar)


def split(value: str | None, known: Iterable[str], option: str) -> list[str]:
    names = [name.strip() for name in (value or "").split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
    return names


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


@click.command(help="Compare relata_celery with other job queues on this machine.")
@click.option("--quick", is_flag=True, help="A few hundred jobs in each measurement: to see that it works.")
@click.option(
    "--rounds", type=click.IntRange(1), help="How often everything is measured.  [3; with --quick 1]"
)
@click.option("--only", help=f"Measures, by comma: {', '.join(TABLES)}.")
@click.option("--contenders", help=f"By comma: {', '.join(CONTENDERS)}. Ratios need {REFERENCE}.")
@click.option("--deep", is_flag=True, help="Also the queues of up to 1,000,000 jobs; takes many minutes.")
@click.option("--jobs", type=click.IntRange(10), help="Jobs in each drain.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all values here."
)
@click.option("--keep", is_flag=True, help="Keep the folder with the logs of servers and workers.")
def main(
    quick: bool,
    rounds: int | None,
    only: str | None,
    contenders: str | None,
    deep: bool,
    jobs: int | None,
    json_path: Path | None,
    keep: bool,
) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # of a file or a pipe nobody knows the width
    measures = split(only, TABLES, "--only")
    chosen = split(contenders, CONTENDERS, "--contenders") or list(CONTENDERS)
    rounds = rounds or (1 if quick else 3)
    sizes = QUICK if quick else Sizes()
    if jobs:
        sizes = dataclasses.replace(sizes, drain=jobs)
    signal.signal(signal.SIGTERM, _end)
    folder = Path(tempfile.mkdtemp(prefix="relata-benchmarks-"))
    folder.chmod(0o711)  # PostgreSQL may run as another user
    servers, results = Servers(folder), Results()
    about: dict[str, Any] = {
        "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.facts(),
        "rounds": rounds,
        "sizes": dataclasses.asdict(sizes),
    }
    try:
        there = present((CONTENDERS[name] for name in chosen), servers, results, console)
        about["servers"] = servers.versions()
        about["packages"] = machine.package_versions(there)
        steps = all_steps(there, measures, deep)
        if not steps:
            raise click.ClickException("nothing to measure")
        run(steps, rounds, Arena(servers, folder, sizes), results, console)
    except KeyboardInterrupt:
        console.print("interrupted: what follows is what was measured until then")
    finally:
        servers.stop()
        if keep:
            console.print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    about["machine"]["load_after"] = machine.load()
    about["ended_at"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    show(results, console)
    _print_about(about, console)
    if json_path:
        write_json(json_path, results, about)
    sys.exit(1 if results.failed else 0)


def _print_about(about: dict[str, Any], console: Console) -> None:
    facts = about["machine"]
    console.print(
        f"{facts['cores']} cores, {facts['processor']}, {facts['memory_gb']} GB, {facts['system']}, Python"
        f" {facts['python']}; load {facts['load_before']} before, {facts['load_after']} after;"
        f" {about['rounds']} round(s) of {about['sizes']['drain']:,} jobs"
    )
    versions = [*about.get("servers", ()), *(f"{name} {v}" for name, v in about.get("packages", {}).items())]
    console.print("; ".join(versions), markup=False)


if __name__ == "__main__":
    main()
