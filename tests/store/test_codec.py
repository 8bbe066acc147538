"""The document: strict when written and claimed, tolerant when read, plain as JSON."""

from __future__ import annotations

import ast
import inspect
import json
import re
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from bson import Decimal128, Int64, ObjectId

from relata_celery.domain.errors import InvalidJob
from relata_celery.domain.job import JobState, NewJob
from relata_celery.store import by_hand_queries, job_queries, settle_queries
from relata_celery.store.client import Database
from relata_celery.store.codec import FIELDS, MAX_JOB_BYTES, job_from_document, job_to_json
from relata_celery.store.jobs import Jobs
from tests.store.builders import claimed, document, edit, failure, new_job, success

NONSENSE: list[Any] = [None, True, -1, 2**40, 1.5, float("nan"), "x", "", b"\x00", [], [1], {}, {"a": 1}]
NONSENSE += [ObjectId(), Decimal128("1.5"), datetime(1, 1, 1, tzinfo=timezone.utc)]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"body": "\ud800"}, "lone surrogate"),
        ({"headers": {"n": 2**63}}, "more than 64 bits"),
        ({"headers": {"a\x00b": 1}}, "NUL"),
        ({"headers": {"d": Decimal("1.5")}}, "decimal.Decimal"),
        ({"headers": {1: "x"}}, "cannot encode"),
        ({"body": "x" * MAX_JOB_BYTES}, r"15,72\d,\d+ bytes; the limit is 15,728,640 bytes"),
    ],
)
def test_a_job_that_bson_cannot_hold_is_refused_and_nothing_of_its_batch_is_written(
    jobs: Jobs, message: dict[str, Any], problem: str
) -> None:
    bad = new_job("bad", type="big.one", message=message)
    with pytest.raises(InvalidJob, match=rf"'big\.one'.*{problem}"):
        jobs.enqueue([new_job("good"), bad])
    assert jobs.count() == 0


@pytest.mark.parametrize(
    "fields",
    [{"priority": 10}, {"priority": -1}, {"max_attempts": 0}, {"delay_s": 1e300}, {"delay_s": float("nan")}],
)
def test_a_job_with_an_impossible_option_is_refused(jobs: Jobs, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match="job type 't'"):
        jobs.enqueue([new_job(**fields)])


def test_the_largest_job_taken_can_still_be_claimed_and_settled(jobs: Jobs) -> None:
    job = claimed(jobs, message={"body": "x" * (MAX_JOB_BYTES - 1000)})
    assert len(job.message["body"]) == MAX_JOB_BYTES - 1000
    assert jobs.settle([failure(job, "e" * 2000)])[0].accepted


def test_what_is_published_is_read_back(jobs: Jobs) -> None:
    soon = datetime(2100, 1, 2, 3, 4, 5, 678000, tzinfo=timezone.utc)
    message = {"body": b"\x00\xff", "headers": {"a.b": {"$set": "$x"}, "$where": "😀\x00", "when": soon}}
    job = NewJob(
        "🦊.$id",
        "$type.😀",
        "q.$ueue",
        message,
        priority=7,
        run_at=soon,
        expires_at=soon,
        max_attempts=2,
        item_id="$item",
        tags=("a", "b"),
        unique_key="k\x00",
        root_id="r",
    )
    jobs.enqueue([job])
    read = jobs.get("🦊.$id")
    assert read is not None
    assert (read.type, read.queue, read.priority, read.max_attempts) == ("$type.😀", "q.$ueue", 7, 2)
    assert (read.run_at, read.expires_at, read.tags, read.unique_key) == (soon, soon, ("a", "b"), "k\x00")
    assert read.message == message
    assert read.extra == {"root_id": "r"}
    assert (read.state, read.attempts, read.fence) == (JobState.QUEUED, 0, 0)


def test_names_that_look_like_expressions_survive_the_whole_life_of_a_job(jobs: Jobs) -> None:
    odd = "$state.🦊\x00"
    job = claimed(
        jobs, owner=odd, type=odd, queue=odd, message={"body": "$$NOW", "headers": {"$literal": {"$": 1}}}
    )
    assert jobs.record_progress(job.claim, 0.5, odd)
    assert jobs.set_custom_state(job.claim.id, odd, {"$add": [1, 2], "a.b": odd})
    running = jobs.get(job.claim.id)
    assert running is not None
    assert running.progress is not None
    assert running.progress.note == odd
    assert running.extra["custom"]["meta"] == {"$add": [1, 2], "a.b": odd}
    followup = {"$set": {"a.b": "$$ROOT"}}
    jobs.settle([failure(job, odd, message={"$set": "$x"}, type="$t", followups=(followup,))])
    ended = jobs.get(job.claim.id)
    assert ended is not None
    assert (ended.error, ended.type, ended.message) == (odd, "$t", {"$set": "$x"})
    assert ended.followups == (followup,)
    assert (ended.history[0].worker, ended.history[0].error) == (odd, odd)
    assert ended.lease is None
    assert set(ended.extra) == {"exception"}


def test_a_result_is_decoded_and_nonsense_in_it_is_shown_as_it_is(jobs: Jobs, store: Database) -> None:
    job = claimed(jobs)
    jobs.settle([success(job, '{"a": [1]}')])

    def result() -> Any:
        read = jobs.get(job.claim.id)
        assert read is not None
        return read.result

    assert result() == {"a": [1]}
    for stored, shown in [
        ({"content_type": "application/json", "body": "{"}, "{"),
        ({"content_type": "application/json", "body": 3}, 3),
        ({"content_type": "application/x-yaml", "body": "a: 1"}, "a: 1"),
        ("text", "text"),
    ]:
        edit(store, job.claim.id, result=stored)
        assert result() == shown


@pytest.mark.parametrize("field", sorted(FIELDS.keys() - {"_id"}))
def test_a_field_edited_into_nonsense_still_reads_as_a_job(field: str) -> None:
    for value in NONSENSE:
        job = job_from_document({"_id": "a", "type": "t", "queue": "q", "state": "failed", field: value})
        assert job.id == "a"
        json.dumps(job_to_json(job))


def test_what_could_not_be_understood_is_kept_under_its_name() -> None:
    history = ["x", {"number": 1}]
    job = job_from_document({"_id": 7, "state": "asleep", "attempts": "many", "history": history, "mine": 1})
    assert job.id == "7"
    assert job.state is JobState.FAILED
    assert job.extra == {"_id": 7, "state": "asleep", "attempts": "many", "history": history, "mine": 1}


def test_dates_beyond_the_calendar_and_broken_documents_do_not_end_a_listing(
    jobs: Jobs, store: Database
) -> None:
    jobs.enqueue([new_job("good"), new_job("odd")])
    millennia = [{"$set": {"expires_at": {"$toDate": Int64(9 * 10**15)}}}]
    store.collection("relata_jobs").update_one({"_id": "odd"}, millennia)
    edit(store, "odd", message=5, lease="x", run_at="never", tags=[1], history="none")
    found = {job.id: job for job in jobs.find()}
    assert set(found) == {"good", "odd"}
    assert {"message", "lease", "run_at", "tags", "history", "expires_at"} <= set(found["odd"].extra)


def test_a_job_in_json_has_the_documents_names_and_iso_times(jobs: Jobs, store: Database) -> None:
    job = claimed(jobs, message={"body": b"\x00\x01"}, item_id="i", tags=("a",))
    jobs.record_progress(job.claim, 0.25, "quarter")
    jobs.settle([failure(job, "boom", retention_s=60.0)])
    read = jobs.get(job.claim.id)
    assert read is not None
    shown = job_to_json(read)
    json.dumps(shown)
    assert shown["id"] == job.claim.id
    assert "_id" not in shown
    assert shown["message"] == {"body": "AAE="}
    assert shown["error_class"] == "permanent"
    assert shown["exception"] == {"type": "ValueError", "module": "builtins"}
    assert shown["history"][0]["outcome"] == "failed"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", shown["created_at"])
    assert shown.keys() - {"id"} <= FIELDS.keys()
    stored = set(document(store, job.claim.id)) - {"schema", "rank", "_id"}
    assert stored <= shown.keys()


def test_every_field_that_a_pipeline_names_is_in_the_table() -> None:
    names = set()
    for room in (job_queries, by_hand_queries, settle_queries):
        for node in ast.walk(ast.parse(inspect.getsource(room))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= set(re.findall(r"^\$([a-z_]+)(?:\.\w+)*$", node.value))
    operators = {"set", "unset", "add", "max", "subtract", "literal", "cond", "size", "slice", "type"}
    operators |= {"eq", "gt", "lt", "lte", "gte", "in", "or", "and", "not", "ne", "expr", "exists", "regex", "options"}
    operators |= {"match", "sort", "skip", "limit", "floor", "min", "inc", "nin"}
    assert names - operators <= FIELDS.keys()
    assert {"run_at", "lease", "history"} <= names


def test_a_due_time_may_be_absolute_or_a_delay_by_the_servers_clock(jobs: Jobs) -> None:
    jobs.enqueue(
        [new_job("a", delay_s=3600.0, run_at=datetime(2000, 1, 1, tzinfo=timezone.utc)), new_job("b")]
    )
    a, b = jobs.get("a"), jobs.get("b")
    assert a is not None
    assert b is not None
    assert a.run_at == a.created_at + timedelta(hours=1)
    assert b.run_at == b.created_at
