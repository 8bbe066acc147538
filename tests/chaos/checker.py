"""Judges a storm by two witnesses: the job documents, and what the handlers wrote down themselves.

What is checked (each finding names the job):

- *kept*: whatever ``delay()`` returned an id for is there, and has ended;
- *one end*: a job has one attempt that ended it, the last of its history, and its state says the same;
- *fences*: they rise along the history, and no attempt began before the one before it had ended;
- *alone*: a handler's attempt whose lease held to its end was over before another one began;
- *seen*: an attempt that a handler brought to its end, and that no other one followed, stands in the history
  (those without an entry were given back by a draining worker, uncounted);
- *followed*: a chain's next step is there if its step succeeded, and runs only then; no follow-up is left;
- *within limits*: no more handlers were inside a limited part at any moment than there are slots, those
  left out whose lease was lost meanwhile.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

#: Outcomes under which an attempt's code may go on although another one has begun.
_TAKEN_AWAY = frozenset({"lease_expired", "worker_lost", "cancelled"})
_ENDS = {"succeeded": "succeeded", "failed": "failed", "cancelled": "cancelled", "lease_expired": "failed"}


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    id: str
    attempt: int
    fence: int
    at: int


@dataclass
class Findings:
    """What is wrong, by kind, and what was counted."""

    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counted: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __str__(self) -> str:
        kinds = [f"{kind}: {len(texts)}, e.g. {'; '.join(texts[:3])}" for kind, texts in self.wrong.items()]
        return "\n".join(kinds) or "nothing"


def read_journal(folder: Path) -> list[Line]:
    lines = []
    for path in folder.glob("*.journal"):
        lines += [Line(**json.loads(text)) for text in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line.at)


def check(
    acknowledged: Mapping[str, str | None], documents: Iterable[Mapping[str, Any]], journal: list[Line], slots: int
) -> Findings:
    """Judge. ``acknowledged``: the ids that calls returned, each with that of its chain's first step, if any."""
    found = Findings()
    jobs = {document["_id"]: document for document in documents}
    _kept(found, acknowledged, jobs)
    for document in jobs.values():
        _history(found, document)
    _handlers(found, jobs, journal)
    _limits(found, jobs, journal, slots)
    return found


def _kept(found: Findings, acknowledged: Mapping[str, str | None], jobs: Mapping[str, Mapping[str, Any]]) -> None:
    found.counted["acknowledged"] = len(acknowledged)
    for job_id, first in acknowledged.items():
        document = jobs.get(job_id)
        if document is None:
            if first is None or jobs.get(first, {}).get("state") == "succeeded":
                found.wrong["lost"].append(job_id)
            continue
        if document["state"] not in ("succeeded", "failed", "cancelled"):
            found.wrong["not ended"].append(f"{job_id} is {document['state']}")
        if first is not None and document["history"] and jobs[first]["state"] != "succeeded":
            found.wrong["followed a step that failed"].append(job_id)
    for document in jobs.values():
        found.counted[document["state"]] += 1
        if document.get("followups"):
            found.wrong["follow-ups left"].append(document["_id"])


def _history(found: Findings, document: Mapping[str, Any]) -> None:
    history = document.get("history") or []
    found.counted["attempts"] += len(history)
    for entry in history:
        found.counted[f"attempts {entry['outcome']}"] += 1
    fences = [entry["fence"] for entry in history]
    if fences != sorted(set(fences)):
        found.wrong["fences out of order"].append(f"{document['_id']}: {fences}")
    for before, after in pairwise(history):
        if _moment(after["started_at"]) < _moment(before["ended_at"]):
            found.wrong["attempts overlap"].append(f"{document['_id']}: {before['number']} and {after['number']}")
    accepted = [entry for entry in history if entry["outcome"] in ("succeeded", "failed")]
    if len(accepted) > 1 or (accepted and accepted[0] is not history[-1]):
        found.wrong["more than one end"].append(f"{document['_id']}: {[entry['outcome'] for entry in history]}")
    if history and document["state"] != _ENDS.get(history[-1]["outcome"], document["state"]):
        found.wrong["state is not the last outcome"].append(document["_id"])


def _handlers(found: Findings, jobs: Mapping[str, Mapping[str, Any]], journal: list[Line]) -> None:
    runs: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for line in journal:
        if line.what in runs[line.id][line.fence]:
            found.wrong["begun twice under one fence"].append(f"{line.id} {line.fence} {line.what}")
        runs[line.id][line.fence][line.what] = line.at
    for job_id, by_fence in runs.items():
        if job_id not in jobs:
            found.wrong["ran and is not there"].append(job_id)
            continue
        outcomes = _outcomes(jobs[job_id])
        skipped = jobs[job_id].get("history_skipped") or 0
        found.counted["executions"] += len(by_fence)
        found.counted["ran to the end more than once"] += sum("end" in run for run in by_fence.values()) > 1
        for fence, run in sorted(by_fence.items()):
            outcome = outcomes.get(fence)
            if outcome is None:
                # Given back by a draining worker: not counted, and not on record.
                found.counted["given back"] += 1
                if "end" in run and not skipped and fence == max(by_fence):
                    found.wrong["ran to the end and is not on record"].append(f"{job_id} fence {fence}")
            elif outcome not in _TAKEN_AWAY and "end" in run:
                later = [other["begin"] for number, other in by_fence.items() if number > fence]
                if any(begin < run["end"] for begin in later):
                    found.wrong["ran at the same time as another attempt"].append(f"{job_id} fence {fence}")
        missing = [f for f, outcome in outcomes.items() if outcome == "succeeded" and "end" not in by_fence.get(f, {})]
        if missing:
            found.wrong["succeeded and its handler did not end"].append(f"{job_id} {missing}")


def _limits(found: Findings, jobs: Mapping[str, Mapping[str, Any]], journal: list[Line], slots: int) -> None:
    kept = {(job_id, fence) for job_id, job in jobs.items() for fence, outcome in _outcomes(job).items()
            if outcome not in _TAKEN_AWAY}  # fmt: skip
    inside = most = 0
    for line in journal:
        if line.what in ("enter", "leave") and (line.id, line.fence) in kept:
            inside += 1 if line.what == "enter" else -1
            most = max(most, inside)
    found.counted["most at once in a limited part"] = most
    if most > slots:
        found.wrong["limit exceeded"].append(f"{most} of {slots}")


def _outcomes(document: Mapping[str, Any]) -> dict[int, str]:
    return {entry["fence"]: entry["outcome"] for entry in document.get("history") or []}


def _moment(value: Any) -> float:
    assert isinstance(value, datetime)
    return value.timestamp()
