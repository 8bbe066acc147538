"""Documents that somebody edited by hand: no query over them fails, and none hides another job."""

from __future__ import annotations

from typing import Any

import pytest

from relata_celery.store.client import Database
from relata_celery.store.jobs import Jobs
from relata_celery.store.stats import Stats
from tests.store.builders import LEASE_S, document, edit, new_job

VALUES: dict[str, Any] = {
    "number": 5, "text": "soon", "null": None, "bool": True, "list": [1], "object": {"a": 1}, "NaN": float("nan"),
}  # fmt: skip
FIELDS = (
    "run_at", "attempts", "max_attempts", "fence", "started_at", "expires_at", "history", "history_skipped", "lease",
    "lease.until", "unique_key", "rank", "priority", "snoozes", "cancel_requested", "finished_at",
)  # fmt: skip


@pytest.mark.parametrize("value", [5, "soon", True, [1], {"a": 1}, None], ids=str)
def test_a_job_whose_due_time_is_no_date_is_claimed(jobs: Jobs, store: Database, value: Any) -> None:
    jobs.enqueue([new_job("edited")])
    edit(store, "edited", run_at=value)
    (taken,) = jobs.claim(["default"], 10, "w1", LEASE_S)
    assert taken.claim.id == "edited"


@pytest.mark.parametrize("value", [5, "soon", True, None], ids=str)
def test_it_does_not_hide_when_the_next_job_is_due(jobs: Jobs, store: Database, value: Any) -> None:
    jobs.enqueue([new_job("edited"), new_job("later", delay_s=100.0)])
    edit(store, "edited", run_at=value)
    wait_s = jobs.next_due_in(["default"])
    assert wait_s is not None
    assert 90 < wait_s <= 100
    (depth,) = Stats(store).depths()
    assert depth.oldest_due_s == 0.0


@pytest.mark.parametrize("field", FIELDS)
def test_no_query_fails_on_a_field_that_was_edited(jobs: Jobs, store: Database, field: str) -> None:
    states = ("queued", "running", "failed")
    jobs.enqueue([new_job(f"{state} {name}") for state in states for name in (*VALUES, "sound")])
    for state in states:
        lease = {"lease": {"owner": "w0", "until": store.clock.now()}} if state == "running" else {}
        for name in (*VALUES, "sound"):
            edited = {} if name == "sound" or (field == "lease.until" and not lease) else {field: VALUES[name]}
            edit(store, f"{state} {name}", state=state, **lease)
            store.collection("relata_jobs").update_one({"_id": f"{state} {name}"}, {"$set": edited or {"tags": []}})
    every = [f"{state} {name}" for state in states for name in VALUES]
    assert jobs.next_due_in(["default"]) == 0.0
    jobs.reap(100, 60.0)
    jobs.claim(["default"], 100, "w1", LEASE_S)
    jobs.stuck_followups(10)
    Stats(store).totals()
    jobs.cancel(every)
    jobs.retry(every)
    jobs.find()
    assert document(store, "running sound")["history"][0]["outcome"] == "lease_expired"
    assert document(store, "queued sound")["state"] == "running"


@pytest.mark.parametrize("odd", [{"a": 1}, 12345, b"x", None, 1.5], ids=str)
@pytest.mark.parametrize("contended", [False, True])
def test_an_id_that_is_no_text_stops_nobody(jobs: Jobs, store: Database, odd: Any, contended: bool) -> None:
    jobs.enqueue([new_job("sound"), new_job("running")])
    sound = document(store, "sound")
    collection = store.collection("relata_jobs")
    for number, state in enumerate(("queued", "running", "failed")):
        made = {"state": state, "lease": {"owner": "w0", "until": sound["run_at"]}, "followups": [{"queue": "q"}]}
        if state == "failed":
            made["finished_at"] = sound["run_at"].replace(year=2001)
        collection.insert_one({**sound, **made, "_id": {"of": odd, "state": state}})
        if number == 0:
            collection.insert_one({**sound, "_id": odd})
    edit(store, "running", state="running", lease={"owner": "w0", "until": sound["run_at"]}, attempts=1)
    jobs._contended = contended
    assert "sound" in {job.claim.id for job in jobs.claim(["default"], 10, "w1", LEASE_S)}
    assert {job.id for job in jobs.reap(10, 60.0, lambda job: [{"queue": "q"}])} >= {"running"}
    assert collection.find_one({"_id": odd})["state"] == "failed"  # type: ignore[index]
    jobs.clear_followups([job_id for job_id, _ in jobs.stuck_followups(10)])
    assert jobs.stuck_followups(10) == []
    assert len(jobs.find()) == 6
