"""What is paused, on a real server: durable, read with tolerance, and a shelf that nobody is forgotten on."""

from __future__ import annotations

from typing import Any

import pytest

from relata_celery.domain.job import JobState
from relata_celery.domain.pauses import MAX_NAMES, Paused
from relata_celery.store.client import Database
from relata_celery.store.codec import COLLECTION as JOBS
from relata_celery.store.jobs import Jobs
from relata_celery.store.pause_queries import COLLECTION, SHELVED
from relata_celery.store.pauses import Pauses
from tests.store.builders import LEASE_S, document, new_job


@pytest.fixture
def jobs(store: Database) -> Jobs:
    return Jobs(store)


@pytest.fixture
def pauses(store: Database) -> Pauses:
    return Pauses(store)


def take(jobs: Jobs, limit: int = 10, paused: Paused | None = None) -> list[str]:
    types = () if paused is None else paused.types
    return [job.claim.id for job in jobs.claim(["default"], limit, "w1", LEASE_S, paused_types=types)]


def ranks(store: Database) -> dict[Any, int]:
    return {found["_id"]: found["rank"] for found in store.collection(JOBS).find({}, {"rank": 1})}


def test_a_pause_tells_what_is_new_and_keeps_the_moment_of_what_is_not(pauses: Pauses) -> None:
    assert pauses.pause("queues", ["a", "$b"]) == {"a": True, "$b": True}
    since = pauses.paused().queues["a"]
    assert since is not None
    assert pauses.pause("queues", ["a", "c"]) == {"a": False, "c": True}
    assert set(pauses.paused().queues) == {"a", "$b", "c"}
    assert pauses.paused().queues["a"] == since
    assert pauses.resume("queues", ["a", "nobody"]) == {"a": True, "nobody": False}
    assert set(pauses.paused().queues) == {"$b", "c"}
    assert pauses.paused().types == {}


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b"])
def test_what_can_be_no_name_is_refused(pauses: Pauses, name: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 characters"):
        pauses.pause("queues", [name])
    assert pauses.paused() == Paused()


def test_no_more_than_a_thousand_names_are_kept(pauses: Pauses) -> None:
    pauses.pause("queues", [f"q{n}" for n in range(MAX_NAMES)])
    with pytest.raises(ValueError, match="more than 1000"):
        pauses.pause("queues", ["one more"])
    assert pauses.pause("queues", ["q1"]) == {"q1": False}


@pytest.mark.parametrize("edited", ["no list", [1, {"name": 5}, {"at": 1}], None])
def test_a_document_edited_into_nonsense_pauses_nothing_and_can_be_used_again(
    pauses: Pauses, store: Database, edited: Any
) -> None:
    store.collection(COLLECTION).insert_one({"_id": "paused", "queues": edited, "types": edited})
    assert pauses.paused() == Paused()
    assert pauses.pause("queues", ["a"]) == {"a": True}
    assert set(pauses.paused().queues) == {"a"}


def test_waiting_jobs_of_a_paused_type_are_passed_over_and_come_back_in_their_order(
    pauses: Pauses, jobs: Jobs, store: Database
) -> None:
    jobs.enqueue([new_job(f"p{n}", type="paused", priority=n) for n in range(3)])
    jobs.enqueue([new_job("other", type="other")])
    assert pauses.pause("types", ["paused"]) == {"paused": True}
    jobs.enqueue([new_job("late", type="paused", priority=9)])  # met by a claim, and put aside by it
    assert take(jobs, paused=pauses.paused()) == ["other"]
    assert take(jobs, paused=pauses.paused()) == []
    assert take(jobs) == []  # on the shelf also for one who does not know of the pause
    assert ranks(store)["late"] == SHELVED
    assert jobs.count(states=[JobState.QUEUED]) == jobs.queue_size("default") == 4
    assert jobs.next_due_in(["default"]) is None
    assert pauses.resume("types", ["paused"]) == {"paused": True}
    assert take(jobs, paused=pauses.paused()) == ["late", "p2", "p1", "p0"]


def test_a_job_of_a_paused_type_is_not_claimed_by_its_id(pauses: Pauses, jobs: Jobs) -> None:
    jobs.enqueue([new_job("a", type="paused")])
    assert jobs.claim_by_id("a", ["default"], "w1", LEASE_S, ["paused"]) is None
    assert jobs.claim_by_id("a", ["default"], "w1", LEASE_S, ["another"]) is not None


def test_a_job_that_was_shelved_after_the_resume_is_brought_back(pauses: Pauses, jobs: Jobs) -> None:
    jobs.enqueue([new_job("a", type="paused"), new_job("b", type="still")])
    assert take(jobs, paused=Paused(types={"paused": None, "still": None})) == []  # a worker that had not heard of it
    assert pauses.bring_back(["elsewhere"], []) == 0
    assert pauses.bring_back(["default"], ["still"]) == 1
    assert pauses.bring_back(["default"], ["still"]) == 0
    assert take(jobs) == ["a"]


def test_a_job_that_was_cancelled_on_the_shelf_can_be_retried_after_the_resume(pauses: Pauses, jobs: Jobs) -> None:
    jobs.enqueue([new_job("a", type="paused", priority=3)])
    pauses.pause("types", ["paused"])
    jobs.cancel("a")
    pauses.resume("types", ["paused"])
    jobs.retry("a")
    assert document(jobs.database, "a")["rank"] == 6
    assert take(jobs) == ["a"]


def test_pausing_a_type_again_puts_nothing_aside_twice(pauses: Pauses, jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job("a", type="paused", priority=9)])
    for _ in range(2):
        pauses.pause("types", ["paused"])
    assert ranks(store) == {"a": SHELVED}
    for _ in range(2):
        pauses.resume("types", ["paused"])
    assert ranks(store) == {"a": 0}
