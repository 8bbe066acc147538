"""The checker finds each kind of wrong history, and nothing in a right one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.chaos.checker import Line, check

BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
Case = tuple[list[dict[str, Any]], list[Line]]


def entry(fence: int, outcome: str, begin_s: float, end_s: float) -> dict[str, Any]:
    at = [BEGIN + timedelta(seconds=seconds) for seconds in (begin_s, end_s)]
    return {"number": fence, "fence": fence, "outcome": outcome, "started_at": at[0], "ended_at": at[1]}


def right() -> Case:
    """A job that lost its lease, while its code went on, and succeeded; and the next step of its chain."""
    history = [entry(1, "lease_expired", 0, 3), entry(2, "succeeded", 4, 5)]
    jobs = [
        {"_id": "a", "state": "succeeded", "history": history},
        {"_id": "b", "state": "succeeded", "history": [entry(1, "succeeded", 6, 7)]},
    ]
    lines = [Line("begin", "a", 1, 1, 1), Line("begin", "a", 2, 2, 4), Line("end", "a", 1, 1, 5)]
    lines += [Line("end", "a", 2, 2, 6), Line("begin", "b", 1, 1, 7), Line("enter", "b", 1, 1, 8)]
    return jobs, [*lines, Line("leave", "b", 1, 1, 9), Line("end", "b", 1, 1, 10)]


def lost(case: Case) -> None:
    del case[0][1]


def not_ended(case: Case) -> None:
    case[0][1]["state"] = "queued"


def two_ends(case: Case) -> None:
    case[0][0]["history"][0]["outcome"] = "succeeded"


def fences(case: Case) -> None:
    case[0][0]["history"][0]["fence"] = 2


def overlap(case: Case) -> None:
    case[0][0]["history"][1]["started_at"] = BEGIN + timedelta(seconds=2)


def together(case: Case) -> None:
    case[0][0]["history"][0]["outcome"] = "retried"


def unrecorded(case: Case) -> None:
    case[1].extend([Line("begin", "b", 2, 2, 11), Line("end", "b", 2, 2, 12)])


def left(case: Case) -> None:
    case[0][0]["followups"] = [{"queue": "q"}]


def crowded(case: Case) -> None:
    case[0].append({"_id": "c", "state": "succeeded", "history": [entry(1, "succeeded", 6, 7)]})
    case[1].insert(6, Line("enter", "c", 1, 1, 8))


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lost, "lost"),
        (not_ended, "not ended"),
        (two_ends, "more than one end"),
        (fences, "fences out of order"),
        (overlap, "attempts overlap"),
        (together, "ran at the same time as another attempt"),
        (unrecorded, "ran to the end and is not on record"),
        (left, "follow-ups left"),
        (crowded, "limit exceeded"),
    ],
)
def test_each_kind_of_wrong_is_found(spoil: Callable[[Case], None], kind: str) -> None:
    case = copy.deepcopy(right())
    spoil(case)
    assert kind in check({"a": None, "b": "a"}, *case, slots=1).wrong


def test_nothing_is_found_in_a_right_history() -> None:
    assert not check({"a": None, "b": "a"}, *right(), slots=1).wrong
