from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relata_celery.domain.events import (
    Event,
    JobClaimed,
    JobEnqueued,
    JobReaped,
    JobRefused,
    JobSettled,
    LeasesRenewed,
    StoreTrouble,
)
from relata_celery.domain.job import AttemptOutcome, ErrorClass, JobState

hostile = st.text(st.characters(exclude_categories=()))


def settled(**changes: Any) -> JobSettled:
    fields: dict[str, Any] = {
        "job_id": "id-1",
        "type": "app.work",
        "queue": "default",
        "attempt": 2,
        "item_id": None,
        "outcome": AttemptOutcome.SUCCEEDED,
        "state": JobState.SUCCEEDED,
        "error_class": None,
        "error": None,
        "duration_ms": 1234,
        "worker": "w",
    }
    return JobSettled(**{**fields, **changes})


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (settled(), "info", "app.work[id-1] attempt 2 succeeded in 1.234 s"),
        (
            settled(
                outcome=AttemptOutcome.RETRIED,
                state=JobState.QUEUED,
                error_class=ErrorClass.TRANSIENT,
                error="down\nnow",
                item_id="doc-7",
            ),
            "warning",
            "app.work[id-1] attempt 2 retried in 1.234 s, now queued, item doc-7: transient: down\\nnow",
        ),
        (
            settled(
                outcome=AttemptOutcome.FAILED,
                state=JobState.FAILED,
                error_class=ErrorClass.INVALID,
                error="x",
            ),
            "error",
            "app.work[id-1] attempt 2 failed in 1.234 s: invalid: x",
        ),
        (
            settled(outcome=None, state=JobState.QUEUED, duration_ms=None),
            "info",
            "app.work[id-1] attempt 2 released, now queued",
        ),
        (JobEnqueued("i", "t", "q"), "debug", "t[i] enqueued on q"),
        (JobClaimed(1), "debug", "1 job claimed"),
        (
            JobRefused("i", "t", "q", 3, "w2 has it"),
            "warning",
            "t[i] attempt 3: outcome not kept, lease lost: w2 has it",
        ),
        (
            JobReaped("i", "t", "q", 3, JobState.QUEUED, "w1"),
            "warning",
            "t[i] attempt 3: lease of w1 ran out, now queued",
        ),
        (LeasesRenewed(5, 0), "debug", "5 leases renewed, 0 lost"),
        (LeasesRenewed(1, 2), "warning", "1 lease renewed, 2 lost"),
        (StoreTrouble("claim", "no primary"), "warning", "claim: MongoDB trouble: no primary"),
    ],
)
def test_lines_and_levels(event: Event, level: str, line: str) -> None:
    assert (event.level, event.line()) == (level, line)


@given(hostile, hostile, hostile)
def test_no_value_can_end_a_line_or_forge_another(one: str, two: str, three: str) -> None:
    for event in (
        JobEnqueued(one, two, three),
        settled(job_id=one, type=two, error=three, item_id=one),
        JobRefused(one, two, three, 1, three),
        JobReaped(one, two, three, 1, JobState.FAILED, three),
        StoreTrouble(one, two),
    ):
        line = event.line()
        assert len(line.splitlines()) == 1
        assert "\x1b" not in line
        line.encode()
