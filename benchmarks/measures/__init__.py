"""What is measured, in the order in which it is run and printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.contenders.base import Contender

from . import deep, drain, enqueue, fleet, latency, memory
from .base import Step, Table

_ROOMS = (enqueue, drain, latency, memory, fleet, deep)

TABLES: dict[str, Table] = {name: table for room in _ROOMS for name, table in room.TABLES.items()}
_STEPS: tuple[Callable[[Sequence[Contender], bool], list[Step]], ...] = tuple(room.steps for room in _ROOMS)


def all_steps(contenders: Sequence[Contender], only: Sequence[str], want_deep: bool) -> list[Step]:
    """Those that run, one measurement after the other, the contenders of each in turn."""
    wanted_deep = want_deep or "deep" in only or "claim" in only
    steps = [step for make in _STEPS for step in make(contenders, wanted_deep)]
    if only:
        names = {"drain" if name == "cost" else "deep" if name == "claim" else name for name in only}
        steps = [step for step in steps if step.table in names]
    order = {label: place for place, label in enumerate(dict.fromkeys(step.label for step in steps))}
    return sorted(steps, key=lambda step: order[step.label])
