"""What a measure gives: readings, each a cell of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders.base import Contender
from benchmarks.servers import Servers
from benchmarks.space import Sizes


@dataclass(frozen=True)
class Reading:
    """One value of one round; ``column`` says of what."""

    column: str
    value: float
    table: str = ""


@dataclass(frozen=True)
class Table:
    """``more``: whether a higher value is the better one."""

    title: str
    unit: str
    more: bool
    note: str = ""


@dataclass(frozen=True)
class Arena:
    """What every measurement is handed."""

    servers: Servers
    folder: Path
    sizes: Sizes


@dataclass(frozen=True)
class Step:
    """One measurement of one contender. Its readings go to ``table`` unless they name another."""

    table: str
    label: str
    contender: Contender
    run: Callable[[Arena, Contender], Iterator[Reading]]


def percentile(values: list[float], part: float) -> float:
    """By the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
