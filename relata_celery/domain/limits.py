"""Limits that hold for the whole fleet: how many at once, and how many in a time.

A *limit* has a name and, of each of two things, one or none: *concurrency* (slots that are leased, so that a
crash gives them back) and a *rate* (a bucket of permits that fills steadily). Who wants to start asks for a
slot; who is refused may enter a queue of *waiters*, in which nobody is overtaken by a later one.

These are values and sums. What decides is one atomic update of the limit's document
(:mod:`relata_celery.store.limit_queries`), by the server's clock; the sums here are the same ones, for
those who read a document: when is it worth asking again, what does a person see.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

#: The limit behind ``acquire_ai()`` and the queue of the same name.
AI = "ai"

MAX_CONCURRENCY = 10_000
#: A permit counts as there when no more than this is missing: sums of floats are off by less.
EPSILON = 1e-6

#: Between two tries of one waiter, in seconds: the first pause, and the longest for the first and later ones.
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_BEHIND_S = 0.02, 0.1, 0.25

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*/\s*([smhd])", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rate:
    """A bucket that holds up to ``burst`` permits and gets ``count`` new ones in ``period_s``, steadily.

    So in any span of ``t`` seconds at most ``burst + t * count / period_s`` start. A bucket begins full; a
    ``burst`` of 1 spaces starts evenly. Providers count the same way, with a burst of a whole period's worth.
    """

    count: float
    period_s: float
    burst: float

    def __post_init__(self) -> None:
        if not (self.count > 0 and self.period_s > 0 and self.burst >= 1):
            raise ValueError(f"a rate needs count and period above 0 and a burst of at least 1, not {self!r}")

    @classmethod
    def of(cls, count: float, period_s: float, burst: float | None = None) -> Rate:
        """With ``burst`` left out, a whole period's worth (at least 1)."""
        return cls(count, period_s, max(count, 1.0) if burst is None else burst)

    @classmethod
    def parse(cls, text: str, burst: float | None = None) -> Rate:
        """From ``"60/m"`` (per s, m, h or d). Raises ValueError with what is allowed."""
        match = _RATE.fullmatch(text.strip())
        if match is None or float(match[1]) <= 0:
            raise ValueError(f'{text!r} is not a rate such as "60/m" (per s, m, h or d)')
        return cls.of(float(match[1]), _UNITS[match[2]], burst)

    def __str__(self) -> str:
        unit = next((name for name, seconds in _UNITS.items() if seconds == self.period_s), None)
        return f"{self.count:g}/{unit or f'{self.period_s:g}s'}"

    def level(self, bucket: Bucket | None, now: datetime) -> float:
        """How many permits are in the bucket at ``now``; below zero while a debt is paid off."""
        if bucket is None:
            return self.burst
        elapsed_s = max((now - bucket.at).total_seconds(), 0.0)
        return min(self.burst, bucket.level + elapsed_s * self.count / self.period_s)

    def wait_s(self, level: float, wanted: float) -> float:
        """Seconds until a bucket at ``level`` holds ``wanted`` permits."""
        return max(wanted - level, 0.0) * self.period_s / self.count


@dataclass(frozen=True, slots=True)
class Bucket:
    """How many permits were left (``level``) at the moment of the last start."""

    level: float
    at: datetime


@dataclass(frozen=True, slots=True)
class LimitSpec:
    """What a limit allows: ``concurrency`` None is any number at once, 0 nobody; ``rate`` None is any rate."""

    concurrency: int | None
    rate: Rate | None = None

    def __post_init__(self) -> None:
        at_once = self.concurrency
        if at_once is None:
            return
        if isinstance(at_once, bool) or not isinstance(at_once, int) or not 0 <= at_once <= MAX_CONCURRENCY:
            raise ValueError(
                f"concurrency is {at_once!r}, must be a whole number from 0 to {MAX_CONCURRENCY}, or None"
            )


@dataclass(frozen=True, slots=True)
class Slot:
    """One leased place. ``weight`` 1 counts against the concurrency; 0 is a mere permit of the rate."""

    id: str
    owner: str
    job_id: str | None
    weight: int
    since: datetime | None
    until: datetime


@dataclass(frozen=True, slots=True)
class Waiter:
    """Somebody who was refused and asks again; forgotten when it has not asked until ``until``."""

    id: str
    until: datetime


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit's document, read: what it allows, who holds slots and who waits, as of ``now`` (the server's).

    ``by_hand`` says that a person set it, so that settings of the workers do not count.
    """

    name: str
    concurrency: int | None
    rate: Rate | None
    by_hand: bool
    slots: tuple[Slot, ...]
    waiters: tuple[Waiter, ...]
    bucket: Bucket | None
    now: datetime

    @property
    def in_use(self) -> int:
        """How many slots are held."""
        return sum(slot.weight for slot in self.slots)

    @property
    def permits(self) -> float | None:
        """How many starts the rate allows at this moment; None without a rate."""
        return None if self.rate is None else self.rate.level(self.bucket, self.now)

    def ahead_of(self, waiter: str | None) -> int:
        """How many go first: those in the queue before this waiter, all of them when it is not in it."""
        ids = [other.id for other in self.waiters]
        return ids.index(waiter) if waiter in ids else len(ids)


@dataclass(frozen=True, slots=True)
class Answer:
    """What asking a limit came to. ``granted`` are the ids of the slots that the asker now holds.

    For one who was refused: ``ahead`` others go first, and ``wait_s`` is the time until the rate can allow
    it (None: slots are what lacks, and nobody knows when one is freed).
    """

    granted: tuple[str, ...]
    ahead: int
    wait_s: float | None
    limit: Limit


def answer(limit: Limit, wanted: Collection[str], waiter: str | None) -> Answer:
    """What the document, as the update left it, says to one who wanted these slots."""
    held = {slot.id for slot in limit.slots}
    granted = tuple(name for name in wanted if name in held)
    ahead = limit.ahead_of(waiter)
    wait_s = None
    if limit.rate is not None and limit.permits is not None and len(granted) < len(wanted):
        missing = ahead + 1
        if limit.permits + EPSILON < missing:
            wait_s = limit.rate.wait_s(limit.permits, missing)
    return Answer(granted, ahead, wait_s, limit)


def pause_s(tries: int, refusal: Answer, random: float) -> float:
    """How long a waiter that was refused for the ``tries``-th time in a row waits before it asks again.

    Until the rate can allow it, when that is known; else growing pauses, longer for those behind, with
    jitter (``random`` from 0 to 1) so that many do not ask at once.
    """
    longest_s = LONGEST_PAUSE_S if refusal.ahead == 0 else LONGEST_PAUSE_BEHIND_S
    if refusal.wait_s is not None:
        return min(refusal.wait_s + 0.002, longest_s * 2) if refusal.ahead == 0 else longest_s
    grown_s = min(FIRST_PAUSE_S * 1.5 ** min(tries, 20), longest_s)
    return float(grown_s * (0.75 + random / 2))


def as_rate(value: Any, burst: float | None = None) -> Rate | None:
    """A rate from what people write: a text such as ``"60/m"``, a :class:`Rate`, or None.

    Raises ValueError for anything else.
    """
    if value is None or isinstance(value, Rate):
        return value
    if isinstance(value, str):
        return Rate.parse(value, burst)
    raise ValueError(f'{value!r} is not a rate such as "60/m" (per s, m, h or d), nor None')


def oldest_first(slots: Sequence[Slot]) -> list[Slot]:
    """The slots in the order in which they were taken."""
    return sorted(slots, key=lambda slot: (slot.since is None, slot.since or slot.until))
