"""Counting lost, doubled and recovered jobs, from jobs made by hand."""

from __future__ import annotations

import io
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from relata_celery.demo import journal as journals
from relata_celery.demo.display import Lines, console_for
from relata_celery.demo.journal import Journal
from relata_celery.demo.plan import Plan, PlannedDocument
from relata_celery.demo.render import render
from relata_celery.demo.report import Report, count, doubled, lost, recovered
from relata_celery.demo.results import summarise
from relata_celery.demo.watching import Watcher
from relata_celery.domain.errors import JobNotFound
from relata_celery.domain.job import Attempt, AttemptOutcome, ErrorClass, Job, JobState, Progress

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
PLAN = Plan((PlannedDocument("a.txt", Path("a.txt"), 2),))
IDS = ("extract:a.txt", "chunk:a.txt", "embed:a.txt:0", "embed:a.txt:1", "analyse:a.txt:0", "analyse:a.txt:1")


def make_job(id: str, state: str = "succeeded", *outcomes: str, **fields: Any) -> Job:
    attempts = tuple(
        Attempt(
            number=number,
            fence=number,
            started_at=NOW,
            ended_at=NOW,
            duration_ms=1,
            worker="w",
            outcome=AttemptOutcome(outcome),
            error_class=None if outcome == "succeeded" else ErrorClass.TRANSIENT,
        )
        for number, outcome in enumerate(outcomes or ("succeeded",), start=1)
    )
    known: dict[str, Any] = {"type": "demo", "queue": "default", "priority": 0, "run_at": NOW, "fence": 1}
    known |= {"attempts": len(attempts), "max_attempts": 5, "created_at": NOW, "message": {}}
    return Job(id=id, state=JobState(state), history=attempts, **{**known, **fields})


def all_done(**replaced: Job) -> dict[str, Job]:
    jobs = {id: make_job(id) for id in IDS}
    for job in replaced.values():
        jobs[job.id] = job
    return jobs


def test_nothing_is_lost_when_every_planned_job_has_ended() -> None:
    assert lost(PLAN.jobs(), all_done(), IDS) == []


def test_a_job_that_is_missing_or_unfinished_is_lost() -> None:
    jobs = all_done(one=make_job("embed:a.txt:1", "running"), two=make_job("analyse:a.txt:0", "queued"))
    assert lost(PLAN.jobs(), jobs) == ["analyse:a.txt:0", "embed:a.txt:1"]
    del jobs["chunk:a.txt"]
    assert "chunk:a.txt" in lost(PLAN.jobs(), jobs)


def test_nothing_is_expected_after_a_job_that_failed() -> None:
    jobs = {"extract:a.txt": make_job("extract:a.txt", "failed", "failed")}
    assert lost(PLAN.jobs(), jobs) == []


def test_no_jobs_at_all_is_a_loss_of_the_first() -> None:
    assert lost(PLAN.jobs(), {}) == ["extract:a.txt"]


def test_a_job_that_a_handler_says_it_published_is_missed_even_if_nobody_planned_it() -> None:
    assert lost(PLAN.jobs(), all_done(), [*IDS, "embed:a.txt:7"]) == ["embed:a.txt:7"]


@pytest.mark.parametrize(
    ("outcomes", "twice"),
    [
        (("succeeded",), False),
        (("retried", "lease_expired", "succeeded"), False),
        (("succeeded", "succeeded"), True),
        (("failed", "succeeded"), True),
        (("snoozed", "snoozed", "failed"), False),
    ],
)
def test_a_job_is_doubled_when_two_ends_were_accepted(outcomes: tuple[str, ...], twice: bool) -> None:
    assert doubled(make_job("x", "succeeded", *outcomes)) is twice


@pytest.mark.parametrize(
    ("state", "outcomes", "was_recovered"),
    [
        ("succeeded", ("lease_expired", "succeeded"), True),
        ("failed", ("worker_lost", "retried", "failed"), True),
        ("succeeded", ("succeeded",), False),
        ("queued", ("lease_expired",), False),
        ("failed", ("failed", "lease_expired"), False),
    ],
)
def test_recovered_is_taken_up_after_the_crash_and_brought_to_an_end(
    state: str, outcomes: tuple[str, ...], was_recovered: bool
) -> None:
    assert recovered(make_job("x", state, *outcomes)) is was_recovered


def counted(jobs: dict[str, Job]) -> Report:
    counts = count(
        PLAN.jobs(), jobs, noted=IDS, interrupted=["analyse:a.txt:0"], begun={"analyse:a.txt:0": 2, "x": 1}
    )
    return Report(
        database="relata_demo_x",
        seconds=1.5,
        crashed=True,
        timed_out=False,
        counts=counts,
        documents=summarise(DOCUMENTS, CHUNKS),
        endpoint="local stand-in",
        endpoint_met={"answer": 2},
    )


DOCUMENTS = [
    {"_id": "a.txt", "format": "text", "title": "[A] title", "words": 9, "chunks": 2},
    {"_id": "b.txt", "format": "text", "title": "B", "words": 5, "chunks": 1},
    {"_id": "c.txt", "format": "text", "title": "C", "words": 5},
]
CHUNKS = [
    {
        "document": "a.txt",
        "number": 0,
        "embedding": [1.0, 0.0],
        "analysis": {"summary": "A said.", "keywords": ["light"], "language": "en"},
    },
    {"document": "a.txt", "number": 1, "embedding": [1.0, 0.0]},
    {"document": "b.txt", "number": 0, "embedding": [0.6, 0.8]},
]


def test_the_report_counts_states_retries_and_recoveries() -> None:
    jobs = all_done(
        crashed=make_job("analyse:a.txt:0", "succeeded", "lease_expired", "succeeded"),
        invalid=make_job(
            "analyse:a.txt:1",
            "failed",
            "retried",
            "failed",
            error_class=ErrorClass.INVALID,
            error="not [JSON]",
        ),
        snoozed=make_job("embed:a.txt:1", "succeeded", "snoozed", "succeeded", snoozes=1),
    )
    report = counted(jobs)
    shown = report.to_json()
    assert report.ok
    assert shown["by_state"] == {"succeeded": 5, "failed": 1}
    assert shown["by_step"]["analyse"] == {"succeeded": 1, "failed": 1}
    assert (shown["retries"], shown["snoozed"]) == ({"transient": 1}, 1)
    assert (shown["recovered_count"], shown["recovered"]) == (1, ["analyse:a.txt:0"])
    assert (shown["attempts"], shown["repeated"]) == (9, 3)
    out = io.StringIO()
    render(report, console_for(out))
    assert "9 (6 first ones, 3 more after an error or the kill)" in out.getvalue()
    assert (shown["lost_count"], shown["doubled_count"], shown["ran_again"]) == (0, 0, ["analyse:a.txt:0"])
    assert shown["failures"] == [{"id": "analyse:a.txt:1", "error_class": "invalid", "error": "not [JSON]"}]
    assert json.loads(json.dumps(shown))["documents"][0]["nearest"] == "b.txt"


def test_the_tables_show_the_counts_and_keep_brackets() -> None:
    out = io.StringIO()
    jobs = all_done(
        bad=make_job(
            "analyse:a.txt:1", "failed", "failed", error_class=ErrorClass.INVALID, error="not [b]JSON"
        )
    )
    render(counted(jobs), console_for(out))
    shown = out.getvalue()
    assert "[A] title" in shown
    assert "not [b]JSON" in shown
    assert "none lost, none accepted twice" in shown
    assert "a.txt (0.60)" in shown


def test_a_lost_or_doubled_job_or_the_time_limit_is_not_ok() -> None:
    missing = all_done()
    del missing["embed:a.txt:0"]
    twice = all_done(x=make_job("embed:a.txt:0", "succeeded", "succeeded", "succeeded"))
    assert not counted(missing).ok
    assert not counted(twice).ok
    out = io.StringIO()
    render(counted(twice), console_for(out))
    assert "1 accepted twice" in out.getvalue()


def test_a_document_without_analysis_or_vector_is_shown_without() -> None:
    by_name = {result.name: result for result in summarise(DOCUMENTS, CHUNKS)}
    assert (by_name["c.txt"].chunks, by_name["c.txt"].nearest, by_name["c.txt"].language) == (0, None, "")
    assert (by_name["a.txt"].analysed, by_name["a.txt"].keywords) == (1, ("light",))
    assert by_name["b.txt"].similarity == 0.6


def test_the_journal_tells_what_was_begun_and_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(journals.ENVIRONMENT, str(tmp_path))
    with journals.attempt("done", 1):
        pass
    with pytest.raises(ValueError, match="broken"), journals.attempt("raised", 1):
        raise ValueError("broken")
    journals.write("begin", "killed", 2)
    journals.write("enqueue", "published")
    journal = Journal(tmp_path)
    assert len(journal.read()) == 6
    assert journal.read() == []
    assert journal.running() == {"killed"}
    assert journal.ids() == {"done", "raised", "killed", "published"}


def test_half_a_line_of_the_journal_is_read_when_it_is_whole(tmp_path: Path) -> None:
    line = json.dumps({"event": "begin", "id": "a", "attempt": 1, "pid": 1, "at": 0.0}) + "\n"
    file = tmp_path / "1.jsonl"
    file.write_text(line + line[:10], "utf-8")
    journal = Journal(tmp_path)
    assert len(journal.read()) == 1
    file.write_text(line + line, "utf-8")
    assert len(journal.read()) == 1


def test_without_a_folder_the_journal_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(journals.ENVIRONMENT, raising=False)
    with journals.attempt("a", 1):
        pass


class JobsById:
    """A job store of a dict, that counts what is read."""

    def __init__(self, jobs: dict[str, Job]) -> None:
        self.jobs = jobs
        self.read: list[str] = []

    def get(self, job_id: str, /) -> Job:
        self.read.append(job_id)
        if job_id not in self.jobs:
            raise JobNotFound(job_id)
        return self.jobs[job_id]


def test_the_watcher_follows_steps_as_they_end_and_reads_ended_jobs_once(tmp_path: Path) -> None:
    store = JobsById({"extract:a.txt": make_job("extract:a.txt", "running")})
    watcher = Watcher(store, PLAN, Journal(tmp_path))
    watcher.look()
    assert watcher.running() == ["extract:a.txt"]
    store.jobs = all_done()
    for _ in range(5):
        watcher.look()
    assert watcher.unfinished() == []
    assert watcher.done_by_step() == {"extract": 1, "chunk": 1, "embed": 2, "analyse": 2}
    store.read.clear()
    watcher.look()
    assert store.read == []
    watcher.look(everything=True)
    assert sorted(store.read) == sorted(IDS)


def test_how_far_a_job_says_it_is_stands_beside_its_name(tmp_path: Path) -> None:
    progress = Progress(0.1, "page 1 of 38", NOW)
    store = JobsById({"extract:a.txt": make_job("extract:a.txt", "running", "retried", progress=progress)})
    watcher = Watcher(store, PLAN, Journal(tmp_path))
    watcher.look()
    assert watcher.note() == "retried 1, extract:a.txt: page 1 of 38"


def test_the_final_look_forgets_a_job_that_vanished(tmp_path: Path) -> None:
    store = JobsById(all_done())
    watcher = Watcher(store, PLAN, Journal(tmp_path))
    watcher.look(everything=True)
    del store.jobs["embed:a.txt:1"]
    watcher.look(everything=True)
    assert watcher.unfinished() == ["embed:a.txt:1"]


def test_without_a_terminal_progress_is_plain_lines() -> None:
    out = io.StringIO()
    lines = Lines(console_for(out), {"extract": 2, "chunk": 2})
    lines.update({"extract": 1}, "retried 1")
    lines.update({"extract": 1}, "retried 1")
    lines.close()
    assert out.getvalue() == "extract 1/2, chunk 0/2  retried 1\n"
