"""Counting what a piece of work costs MongoDB: its own profiler sees every operation of every process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo.database import Database

#: Room for some hundred thousand operations; the default of 1 MB forgets after a few thousand.
PROFILE_BYTES = 64 * 1024 * 1024


class Operations:
    """The operations on one database's collections, by kind and collection: ``seen["update", "jobs"]``."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()

    def total(self, *kinds: str) -> int:
        """All operations of these kinds; of all kinds when none is named."""
        return sum(count for (kind, _name), count in self.seen.items() if not kinds or kind in kinds)

    def by_collection(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for (kind, name), count in self.seen.items():
            if kind != "getmore":
                counts[name] += count
        return counts


@contextmanager
def counted(database: Database[dict[str, Any]]) -> Iterator[Operations]:
    """Count the operations on our collections of this database until the block ends."""
    database.command("profile", 0)
    database.drop_collection("system.profile")
    database.create_collection("system.profile", capped=True, size=PROFILE_BYTES)
    database.command("profile", 2)
    operations = Operations()
    try:
        yield operations
    finally:
        database.command("profile", 0)
        for entry in database["system.profile"].find({}, {"op": 1, "ns": 1}):
            name = entry["ns"].partition(".")[2]
            if name.startswith("relata_"):
                operations.seen[entry["op"], name.removeprefix("relata_")] += 1
