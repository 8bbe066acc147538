"""A revoke is a write, whoever sends it; and the database decides what is revoked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pymongo.database import Database

from relata_celery.domain.job import JobState
from tests.celery.apps_recovery import Stage
from tests.waiting import wait_until
from tests.workers import ROOT, running_worker

CLIENT = "tests.celery.apps_plain_client"


def run(uri: str, *command: str, env: Mapping[str, str] | None = None) -> None:
    environment = {**os.environ, "RELATA_TEST_URI": uri, "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 69), done.stderr  # Celery's command ends with 69 when no worker answers


def run_python(uri: str, code: str, **env: str) -> None:
    run(uri, sys.executable, "-c", f"from {CLIENT} import add, app\n{code}", env=env)


REVOKES = {
    "control": "app.control.revoke('{0}')",
    "control of several": "app.control.revoke(['{0}', 'another'])",
    "result": "app.AsyncResult('{0}').revoke()",
    "finalized": "app.finalize(); app.control.revoke('{0}')",
    "terminate": "app.control.terminate('{0}')",
    "to one worker": "app.control.revoke('{0}', destination=['w1@nowhere'])",
}


@pytest.mark.parametrize("how", list(REVOKES))
def test_every_client_revokes_by_a_write(how: str, database_uri: str, database: Database[dict[str, Any]]) -> None:
    run_python(database_uri, "add.apply_async((1, 2), task_id='one', countdown=1000)")
    run_python(database_uri, REVOKES[how].format("one"))
    assert database["relata_jobs"].find_one()["state"] == "cancelled"  # type: ignore[index]


def test_the_command_line_revokes_by_a_write(database_uri: str, database: Database[dict[str, Any]]) -> None:
    run_python(database_uri, "add.apply_async((1, 2), task_id='one', countdown=1000)")
    run(database_uri, sys.executable, "-m", "celery", "-A", CLIENT, "control", "revoke", "one")
    assert database["relata_jobs"].find_one()["state"] == "cancelled"  # type: ignore[index]


def test_other_broadcasts_cancel_nothing(database_uri: str, database: Database[dict[str, Any]]) -> None:
    run_python(database_uri, "add.apply_async((1, 2), task_id='one', countdown=1000)")
    run_python(database_uri, "app.control.broadcast('query_task', arguments={'ids': ['one'], 'task_id': 'one'})")
    assert database["relata_jobs"].find_one()["state"] == "queued"  # type: ignore[index]


@pytest.mark.parametrize("brokers", ["list", "two", "semicolon"])
def test_several_broker_urls_work_like_one(
    brokers: str, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    run_python(database_uri, "add.apply_async((1, 2), task_id='late', countdown=1000)", RELATA_TEST_BROKERS=brokers)
    run_python(database_uri, "app.control.revoke('late')", RELATA_TEST_BROKERS=brokers)
    jobs = database["relata_jobs"]
    assert jobs.find_one({"_id": "late"})["state"] == "cancelled"  # type: ignore[index]
    with running_worker(CLIENT, database_uri, tmp_path, "-c", "1", env={"RELATA_TEST_BROKERS": brokers}) as worker:
        run_python(database_uri, "assert add.delay(1, 2).get(timeout=30) == 3", RELATA_TEST_BROKERS=brokers)
        assert worker.terminate() == 0


def test_a_revoked_job_that_is_retried_by_hand_runs(database_uri: str, tmp_path: Path) -> None:
    with Stage(database_uri, tmp_path) as stage:
        worker = stage.worker("-c", "1")
        job_id = stage.send("work", countdown=1000)
        stage.app.control.revoke(job_id)
        wait_until(lambda: "Tasks flagged as revoked" in worker.log, 30, "the worker remembers the revoke")
        assert stage.job(job_id).state is JobState.CANCELLED
        assert stage.store.retry(job_id)
        stage.wait_state(job_id, JobState.SUCCEEDED)
        assert len(stage.journal("begin", job_id)) == 1
