"""What the server examines for each call of a worker, with 110,000 queued jobs beside.

The numbers are the server's own record (its profiler) of the commands that the package really sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relata_celery.domain.job import ClaimedJob, JobState
from relata_celery.store.client import Database, connect
from relata_celery.store.codec import COLLECTION
from relata_celery.store.jobs import Jobs
from relata_celery.store.pauses import Pauses
from relata_celery.store.stats import Stats
from tests.mongo import with_database
from tests.store.builders import LEASE_S, expire_lease, failure, new_job, success

QUEUES = ("a", "b", "c", "d")
FEW = 60  # keys beyond those returned: one seek per queue and rank, and one per id


@pytest.fixture(scope="module")
def crowded(mongo_uri: str) -> Iterator[Database]:
    """100,000 due jobs in four queues and three priorities, and 10,000 that are due in a day."""
    database = connect(with_database(mongo_uri, f"relata_test_{secrets.token_hex(6)}"))
    jobs = Jobs(database)
    message = {"body": "x"}
    for start in range(0, 110_000, 10_000):
        later = {"delay_s": 86_400.0, "priority": 9} if start == 0 else {}
        jobs.enqueue(
            [
                new_job(f"{n}", queue=QUEUES[n % 4], message=message, **{"priority": n % 3, **later})
                for n in range(start, start + 10_000)
            ]
        )
    yield database
    database.client.drop_database(database.name)
    database.close()


def examined(database: Database, act: Callable[[], Any]) -> list[dict[str, Any]]:
    """The server's record of what ``act`` sent to the jobs' collection."""
    database.client[database.name]["system.profile"].drop()
    database.command({"profile": 2})
    try:
        act()
    finally:
        database.command({"profile": 0})
    jobs = {"ns": f"{database.name}.{COLLECTION}"}
    return list(database.client[database.name]["system.profile"].find(jobs))


def assert_cheap(records: list[dict[str, Any]], documents: int) -> None:
    assert records
    for record in records:
        assert "COLLSCAN" not in record.get("planSummary", "")
        assert not record.get("hasSortStage")
        assert record.get("docsExamined", 0) <= documents + 1, record
        assert record.get("keysExamined", 0) <= documents + FEW, record


def take(database: Database, queues: tuple[str, ...], limit: int = 20) -> list[ClaimedJob]:
    return Jobs(database).claim(list(queues), limit, "w1", LEASE_S)


@pytest.mark.parametrize("queues", [("a",), QUEUES], ids=["one queue", "four queues"])
def test_a_claim_examines_no_more_than_it_takes(crowded: Database, queues: tuple[str, ...]) -> None:
    jobs = Jobs(crowded)
    jobs.next_due_in(["a"])
    records = examined(crowded, lambda: jobs.claim(list(queues), 20, "w1", LEASE_S))
    assert [record["op"] for record in records] == ["query", "update"]
    assert_cheap(records, 20)
    assert records[0]["nreturned"] == 20


def test_a_claim_passes_by_ten_thousand_future_jobs_of_a_higher_priority(crowded: Database) -> None:
    (job,) = take(crowded, ("a",), 1)
    assert job.priority < 9


def test_a_claim_after_contention_examines_a_few_times_what_it_takes(crowded: Database) -> None:
    jobs = Jobs(crowded)
    jobs.next_due_in(["a"])
    jobs._contended = True
    assert_cheap(examined(crowded, lambda: jobs.claim(list(QUEUES), 20, "w1", LEASE_S)), 80)


def test_a_claim_of_a_queue_without_due_jobs_examines_nothing(crowded: Database) -> None:
    jobs = Jobs(crowded)
    jobs.enqueue([new_job(queue="idle", delay_s=999.0) for _ in range(50)])
    assert_cheap(examined(crowded, lambda: jobs.claim(["idle", "nobody"], 20, "w1", LEASE_S)), 0)


def test_renewing_and_settling_examine_the_jobs_held(crowded: Database) -> None:
    jobs = Jobs(crowded)
    held = [job for _ in range(2) for job in take(crowded, QUEUES)]
    assert_cheap(examined(crowded, lambda: jobs.renew([job.claim for job in held], LEASE_S)), 40)
    assert_cheap(examined(crowded, lambda: jobs.settle([success(job) for job in held])), 40)
    assert_cheap(examined(crowded, lambda: jobs.settle([success(job) for job in held])), 40)


def test_reaping_examines_the_expired_jobs_only(crowded: Database) -> None:
    jobs = Jobs(crowded)
    taken = take(crowded, QUEUES)
    for job in taken[:5]:
        expire_lease(crowded, job.claim.id)
    assert_cheap(examined(crowded, lambda: jobs.reap(100, None)), 5)
    assert_cheap(examined(crowded, lambda: jobs.reap(100, None)), 0)


def test_asking_when_the_next_job_is_due_examines_a_key_per_queue_and_priority(crowded: Database) -> None:
    jobs = Jobs(crowded)
    assert_cheap(examined(crowded, lambda: jobs.next_due_in(QUEUES)), 10)


def test_the_newest_jobs_are_listed_without_a_sort(crowded: Database) -> None:
    jobs = Jobs(crowded)
    assert_cheap(examined(crowded, lambda: jobs.find(limit=30)), 30)


@pytest.mark.parametrize(
    "states",
    [
        (JobState.FAILED,),
        (JobState.FAILED, JobState.CANCELLED),
        (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED),
    ],
    ids=["one state", "two states", "three states"],
)
def test_ended_jobs_are_listed_without_a_look_at_the_others(
    crowded: Database, states: tuple[JobState, ...]
) -> None:
    jobs = Jobs(crowded)
    for _ in range(3):
        a, b, c = take(crowded, QUEUES, 3)
        jobs.settle([success(a), failure(b)])
        jobs.cancel(c.claim.id)
    for record in examined(crowded, lambda: jobs.find(states=states, limit=5)):
        assert record["docsExamined"] <= 15, record
    for record in examined(crowded, lambda: jobs.find(states=states, types=["nobody's"], limit=5)):
        assert record["docsExamined"] <= 200, record


def test_counting_by_state_reads_keys_and_no_documents(crowded: Database) -> None:
    take(crowded, QUEUES, 3)
    for record in examined(crowded, lambda: Stats(crowded).totals()):
        assert record.get("docsExamined", 0) == 0, record
        assert "COLLSCAN" not in record["planSummary"]


def test_stuck_followups_are_found_without_a_scan(crowded: Database) -> None:
    jobs = Jobs(crowded)
    assert_cheap(examined(crowded, lambda: jobs.stuck_followups(10)), 0)


def test_counting_a_queue_reads_keys_and_no_documents(crowded: Database) -> None:
    jobs = Jobs(crowded)
    jobs.next_due_in(["a"])
    (record,) = examined(crowded, lambda: jobs.queue_size("a"))
    assert record["docsExamined"] == 0
    for record in examined(crowded, lambda: Stats(crowded).depths()):
        assert record.get("docsExamined", 0) <= 200


def test_a_claim_passes_by_the_backlog_of_a_paused_type(crowded: Database) -> None:
    jobs, pauses = Jobs(crowded), Pauses(crowded)
    jobs.enqueue([new_job(queue="a", type="paused", priority=9) for _ in range(5000)])
    pauses.pause("types", ["paused"])
    try:
        for _ in range(2):
            records = examined(
                crowded, lambda: jobs.claim(["a", "b"], 20, "w1", LEASE_S, paused_types=["paused"])
            )
            assert_cheap(records, 20)
            assert records[0]["nreturned"] == 20
        assert_cheap(examined(crowded, lambda: jobs.next_due_in(["a"])), 10)
    finally:
        pauses.resume("types", ["paused"])
        jobs.delete([job.id for job in jobs.find(types=["paused"], limit=5000)])
