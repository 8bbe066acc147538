"""Which jobs there will be: known beforehand, because ids and pieces are deterministic.

The plan is made in the demo's own process, without the queue, by the same pure functions that the
jobs use. What the queue did is then held against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relata_celery.demo import chunking, extraction
from relata_celery.domain.errors import PermanentError

STEPS = ("extract", "chunk", "embed", "analyse")


def job_id(step: str, name: str, number: int | None = None) -> str:
    """The fixed id of a step's job: ``embed:notes/a.txt:3``."""
    return f"{step}:{name}" if number is None else f"{step}:{name}:{number}"


def step_of(id: str) -> str:
    """The step that an id made by :func:`job_id` names."""
    return id.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Planned:
    """One job that is to be; it can exist only once ``after`` has succeeded (None: from the start)."""

    id: str
    after: str | None


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """A document, its pieces, and why it cannot be read, if so."""

    name: str
    path: Path
    pieces: int
    problem: str | None = None

    def jobs(self) -> list[Planned]:
        first = job_id("extract", self.name)
        second = job_id("chunk", self.name)
        planned = [Planned(first, None), Planned(second, first)]
        for number in range(self.pieces):
            embed = job_id("embed", self.name, number)
            planned += [Planned(embed, second), Planned(job_id("analyse", self.name, number), embed)]
        return planned


@dataclass(frozen=True, slots=True)
class Plan:
    """All documents and, in order, all jobs."""

    documents: tuple[PlannedDocument, ...]

    def jobs(self) -> list[Planned]:
        return [planned for document in self.documents for planned in document.jobs()]

    def expected(self) -> int:
        """How many jobs will come to an end if only unreadable documents fail."""
        return sum(1 if document.problem else len(document.jobs()) for document in self.documents)


def make_plan(documents: Sequence[tuple[str, Path]]) -> Plan:
    """Read every document once to count its pieces."""
    return Plan(tuple(_planned(name, path) for name, path in documents))


def _planned(name: str, path: Path) -> PlannedDocument:
    try:
        text = extraction.extract(path).text
    except PermanentError as problem:
        return PlannedDocument(name, path, 0, str(problem))
    return PlannedDocument(name, path, len(chunking.split(text)))
