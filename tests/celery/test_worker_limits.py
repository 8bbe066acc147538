"""Time limits of the worker's own command line hold in every pool."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import Celery

from relata_celery import JobState
from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs
from tests.waiting import wait_until
from tests.workers import running_worker


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_soft_limit_given_to_the_worker_ends_a_job_that_has_none_of_its_own(
    pool: str, database_uri: str, tmp_path: Path
) -> None:
    url = f"relata+{database_uri}"
    app = Celery("caller", broker=url, backend=url, set_as_current=False)
    jobs = Jobs(connect(database_uri))
    with running_worker(
        "tests.celery.apps_behaviour", database_uri, tmp_path, "-P", pool, "-c", "1", "--soft-time-limit", "1"
    ):
        result = app.send_task("hold", (str(tmp_path / "never"), 60))
        wait_until(
            lambda: (job := jobs.get(result.id)) is not None and job.state is JobState.FAILED,
            timeout=30,
            message="the job's time ran out",
        )
    job = jobs.get(result.id)
    assert job is not None
    assert str(job.error_class) == "timeout"
