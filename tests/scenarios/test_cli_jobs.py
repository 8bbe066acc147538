"""``relata jobs``: list, show, retry, cancel, purge, against real jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from relata_celery.domain.job import JobState
from relata_celery.store.client import Database, connect
from relata_celery.store.jobs import Jobs
from tests.commands import relata
from tests.store.builders import claim_one, claimed, edit, failure, new_job, success
from tests.waiting import wait_until
from tests.workers import running_worker

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")

HANDLERS = """
from relata_celery import PermanentError, current_job, job

@job(queue="default", max_attempts=3)
def measure(words, unit="cm"):
    current_job().progress(0.5, "half-way")
    return {"count": len(words), "unit": unit}

@job(queue="default")
def refuse(what):
    raise PermanentError(f"there is no {what}")
"""


@pytest.fixture
def store(database_uri: str) -> Iterator[Database]:
    database = connect(database_uri)
    yield database
    database.close()


@pytest.fixture
def jobs(store: Database) -> Jobs:
    return Jobs(store, retention_failed_s=3600.0)


def ids(listed: list[dict[str, str]]) -> list[str]:
    return [job["id"] for job in listed]


def test_a_listing_is_newest_first_and_every_filter_restricts_it(
    jobs: Jobs, store: Database, database_uri: str
) -> None:
    jobs.settle([failure(claimed(jobs, job_id="bad", type="shop.bill", item_id="order-7", tags=("vip",)))])
    jobs.settle([success(claimed(jobs, job_id="good", type="shop.ship"))])
    jobs.enqueue([new_job("slow", queue="other", delay_s=3600)])
    now = datetime.now(timezone.utc)
    for age, job_id in enumerate(("slow", "good", "bad")):
        edit(store, job_id, created_at=now - timedelta(days=age, minutes=1))

    def listed(*options: str) -> list[str]:
        done = relata(database_uri, "jobs", "list", "--json", *options)
        assert (done.code, done.err) == (0, "")
        return ids(done.json)

    assert listed() == ["slow", "good", "bad"]
    assert listed("--state", "failed,succeeded", "--sort", "created_at") == ["bad", "good"]
    assert listed("--type", "shop.bill", "--type", "shop.ship", "--limit", "1") == ["good"]
    assert listed("--queue", "other") == ["slow"]
    assert listed("--error-class", "permanent", "--item", "order-7", "--tag", "vip", "--text", "BOOM") == [
        "bad"
    ]
    assert listed("--since", "36h", "--until", (now - timedelta(hours=12)).isoformat()) == ["good"]
    assert listed("--state", "running") == []


def test_a_listed_job_in_json_has_the_documents_names_and_iso_times(jobs: Jobs, database_uri: str) -> None:
    jobs.settle([success(claimed(jobs, job_id="a"), body='{"n": 1}')])
    (job,) = relata(database_uri, "jobs", "list", "--json").json
    assert "_id" not in job
    assert (job["id"], job["state"], job["attempts"], job["fence"], job["result"]) == (
        "a",
        "succeeded",
        1,
        1,
        {"n": 1},
    )
    assert TIME.fullmatch(job["created_at"])
    assert TIME.fullmatch(job["history"][0]["ended_at"])
    assert job["message"]["headers"] == {"task": "t"}


def test_the_table_says_what_there_is_and_that_there_is_more(jobs: Jobs, database_uri: str) -> None:
    assert relata(database_uri, "jobs", "list").out == "No jobs yet.\n"
    jobs.enqueue([new_job(f"job-{number}-{'x' * 60}", type="shop.ship") for number in range(3)])
    table = relata(database_uri, "jobs", "list", "--limit", "2").out.splitlines()
    assert table[0].split()[:4] == ["ID", "TYPE", "QUEUE", "STATE"]
    assert len(table[1].split()[0]) == 66
    assert table[-1] == "There are more than these 2 jobs: restrict them, or give --limit."
    nothing = relata(database_uri, "jobs", "list", "--queue", "nowhere")
    assert (nothing.code, nothing.out) == (0, "No job matches.\n")


def test_what_documents_hold_is_neither_markup_nor_a_command_to_the_terminal(
    jobs: Jobs, database_uri: str
) -> None:
    forged = "\x1b[2J[red]late[/red]\nsucceeded\u202e\x9b31m"
    hostile = claimed(jobs, job_id="[bold]id[/bold]", type=forged, item_id=forged, tags=(forged,))
    jobs.record_progress(hostile.claim, 0.5, forged)
    jobs.settle([failure(hostile, text=forged)])
    for command in (("list",), ("show", "[bold]id[/bold]")):
        shown = relata(database_uri, "jobs", *command).out
        assert "[bold]id[/bold]" in shown
        assert "[red]late[/red]" in shown
        assert not {"\x1b", "\x9b", "\u202e"} & set(shown)
    retried = relata(database_uri, "jobs", "retry", "\x1b[2J").out
    assert retried == "\\x1b[2J: not changed: there is no such job\n"


def test_a_real_workers_job_is_shown_with_arguments_history_progress_result_and_error(
    database_uri: str, jobs: Jobs, tmp_path: Path
) -> None:
    (tmp_path / "cli_handlers.py").write_text(HANDLERS)
    env = {"RELATA_IMPORTS": "cli_handlers"}
    with running_worker("relata_celery", database_uri, tmp_path, "-c", "1", env=env):
        publish = (
            "import cli_handlers as h; h.measure.apply_async((['a', 'b'],), {'unit': 'µm'}, task_id='m');"
        )
        publish += "h.refuse.apply_async(('unicorn',), task_id='r')"
        subprocess.run(
            [sys.executable, "-c", publish],
            cwd=tmp_path,
            env={**os.environ, "RELATA_MONGODB_URI": database_uri},
            check=True,
            timeout=60,
        )
        wait_until(
            lambda: all((job := jobs.get(job_id)) and job.state.terminal for job_id in "mr"),
            timeout=30,
            message="both jobs have ended",
        )
    measured = relata(database_uri, "jobs", "show", "m", "--json").json
    assert measured["payload"] == {"args": [["a", "b"]], "kwargs": {"unit": "µm"}, "unread": None}
    assert measured["result"] == {"count": 2, "unit": "µm"}
    assert measured["progress"]["note"] == "half-way"
    assert [attempt["outcome"] for attempt in measured["history"]] == ["succeeded"]
    page = relata(database_uri, "jobs", "show", "m").out
    for line in (
        'args .*"a", "b"',
        "kwargs .*µm",
        'result .*"count": 2',
        "progress .*50% half-way",
        "state .*succeeded",
    ):
        assert re.search(rf"(?m)^{line}", page), line
    page = relata(database_uri, "jobs", "show", "r").out
    assert re.search(r"(?m)^error +there is no unicorn$", page)
    assert re.search(r"(?m)^error class +permanent$", page)
    assert re.search(r"(?m)^ +1 .* failed +permanent .*there is no unicorn$", page)


def test_a_payload_that_is_not_json_is_named_but_never_decoded(jobs: Jobs, database_uri: str) -> None:
    message = {
        "body": b"\x80\x04.",
        "headers": {"task": "t"},
        "content-type": "application/x-python-serialize",
    }
    jobs.enqueue([new_job("pickled", message=message)])
    shown = relata(database_uri, "jobs", "show", "pickled")
    assert "the body is application/x-python-serialize, and only JSON is decoded" in shown.out
    assert relata(database_uri, "jobs", "show", "pickled", "--json").json["payload"]["args"] is None


def test_a_document_edited_into_nonsense_is_still_shown(
    jobs: Jobs, store: Database, database_uri: str
) -> None:
    jobs.enqueue([new_job("odd")])
    edit(store, "odd", state="bored", history="none", run_at="soon", note=float("nan"))
    assert relata(database_uri, "jobs", "show", "odd").code == 0
    assert relata(database_uri, "jobs", "show", "odd", "--json").json["note"] == "nan"


def test_retry_queues_again_what_can_be_and_says_why_the_rest_was_not(jobs: Jobs, database_uri: str) -> None:
    jobs.settle([failure(claimed(jobs, job_id="failed"))])
    jobs.settle([success(claimed(jobs, job_id="done"))])
    done = relata(database_uri, "jobs", "retry", "failed", "done", "failed")
    assert done.out.splitlines() == [
        "failed: queued again (was failed)",
        "done: not changed: job is succeeded",
    ]
    assert done.code == 0
    again = jobs.get("failed")
    assert again is not None
    assert (again.state, again.attempts, len(again.history)) == (JobState.QUEUED, 0, 1)
    assert relata(database_uri, "jobs", "retry", "done").code == 1
    claim_one(jobs)
    mixed = relata(database_uri, "jobs", "cancel", "failed", "nobody", "--json")
    assert mixed.code == 1
    assert mixed.json == [
        {"id": "failed", "changed": True, "before": "running", "reason": None},
        {"id": "nobody", "changed": False, "before": None, "reason": "there is no such job"},
    ]


def test_purge_counts_first_and_removes_waiting_jobs_of_that_queue_only_when_told(
    jobs: Jobs, database_uri: str
) -> None:
    running = claimed(jobs, job_id="running")
    jobs.enqueue([new_job("a"), new_job("b"), new_job("c", queue="other")])
    message = relata(database_uri, "jobs", "purge", "--queue", "default").refused()
    assert message == "Error: 2 queued jobs of queue default would be removed for good; say --yes to do it"
    assert jobs.queue_size("default") == 2
    purged = relata(database_uri, "jobs", "purge", "--queue", "default", "--yes", "--json")
    assert (purged.code, purged.json) == (0, {"queue": "default", "removed": 2})
    assert {job.id for job in jobs.find()} == {running.claim.id, "c"}
    nothing = relata(database_uri, "jobs", "purge", "--queue", "default", "--yes")
    assert (nothing.code, nothing.out[:34]) == (0, "No job waits in queue default; `re")
