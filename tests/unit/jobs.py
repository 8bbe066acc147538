"""Jobs for tests of rules: claimed, with only what the test says."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from relata_celery.domain.job import Claim, ClaimedJob


def claimed(attempt: int = 1, max_attempts: int = 5, **fields: Any) -> ClaimedJob:
    return ClaimedJob(
        claim=Claim("job-1", fence=7, owner="worker-1"),
        type="app.work",
        queue="default",
        priority=0,
        message={"body": "", "headers": {"task": "app.work"}},
        attempt=attempt,
        max_attempts=max_attempts,
        claimed_at=datetime(2025, 1, 1, tzinfo=timezone.utc),
        **fields,
    )
