"""Medians and ratios: as tables for people, as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from .contenders import CONTENDERS, REFERENCE
from .measures import TABLES

Key = tuple[str, str, str]  # table, column, contender


@dataclass
class Results:
    """Every value of every round, and what did not run."""

    values: dict[Key, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, table: str, column: str, contender: str, value: float) -> None:
        self.values.setdefault((table, column, contender), []).append(value)

    def median(self, table: str, column: str, contender: str) -> float | None:
        values = self.values.get((table, column, contender))
        return median(values) if values else None

    def ratio(self, table: str, column: str, contender: str) -> float | None:
        """To the reference, always as "so many times as good": above 1 is better than it."""
        ours, reference = self.median(table, column, contender), self.median(table, column, REFERENCE)
        if not ours or not reference or contender == REFERENCE:
            return None
        return ours / reference if TABLES[table].more else reference / ours

    def columns(self, table: str) -> list[str]:
        return list(dict.fromkeys(column for name, column, _contender in self.values if name == table))

    def contenders(self, table: str) -> list[str]:
        measured = {contender for name, _column, contender in self.values if name == table}
        return [name for name in CONTENDERS if name in measured]


def number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def show(results: Results, console: Console) -> None:
    """One table for each measure. Those with more columns than contenders are turned round."""
    for name, table in TABLES.items():
        columns, contenders = results.columns(name), results.contenders(name)
        if not columns:
            continue
        titles = {contender: CONTENDERS[contender].title for contender in contenders}

        def cell(column: str, contender: str, name: str = name) -> str:
            value, ratio = results.median(name, column, contender), results.ratio(name, column, contender)
            if value is None:
                return ""
            return number(value) + (f"  [dim]{ratio:.2f}x[/]" if ratio is not None else "")

        shown = RichTable(
            title=f"{table.title}, {table.unit}", caption=table.note or None, title_justify="left"
        )
        if len(columns) > 4:
            shown.add_column("")
            for contender in contenders:
                shown.add_column(contender, justify="right")
            for column in columns:
                shown.add_row(column, *(cell(column, contender) for contender in contenders))
        else:
            shown.add_column("")
            for column in columns:
                shown.add_column(column, justify="right")
            for contender in contenders:
                shown.add_row(titles[contender], *(cell(column, contender) for column in columns))
        console.print(shown, "")
    console.print(
        f"Medians; [dim]1.50x[/] = one and a half times as good as {CONTENDERS[REFERENCE].title} in this run."
    )
    for contender, reason in results.skipped.items():
        console.print(f"left out: {CONTENDERS[contender].title}: {reason}", markup=False)
    for failure in results.failed:
        console.print(f"failed: {failure}", style="red", markup=False)


def as_json(results: Results, about: dict[str, Any]) -> dict[str, Any]:
    return {
        **about,
        "reference": REFERENCE,
        "results": [
            {
                "table": table,
                "title": TABLES[table].title,
                "unit": TABLES[table].unit,
                "more_is_better": TABLES[table].more,
                "column": column,
                "contender": contender,
                "median": median(values),
                "ratio": results.ratio(table, column, contender),
                "rounds": values,
            }
            for (table, column, contender), values in results.values.items()
        ],
        "left_out": results.skipped,
        "failed": results.failed,
    }


def write_json(path: Path, results: Results, about: dict[str, Any]) -> None:
    path.write_text(json.dumps(as_json(results, about), indent=1) + "\n")
