"""What a person has paused for the whole fleet: queues, and job types.

Paused is what nobody begins. What runs goes on, and what is published waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

#: Names are shown in tables, and read by every worker again and again.
MAX_NAME = 200
MAX_NAMES = 1000


@dataclass(frozen=True, slots=True)
class Paused:
    """The paused queues and job types by name, each with the moment since when (the server's; None: unknown)."""

    queues: Mapping[str, datetime | None] = field(default_factory=dict)
    types: Mapping[str, datetime | None] = field(default_factory=dict)

    def same_names(self, other: Paused) -> bool:
        """Whether the two let the same be claimed."""
        return set(self.queues) == set(other.queues) and set(self.types) == set(other.types)


def checked_name(name: object) -> str:
    """The name of a queue or type, if it can be one; else ValueError."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or "\0" in name:
        raise ValueError(f"the name of what is paused is a text of 1 to {MAX_NAME} characters, not {name!r:.80}")
    return name
