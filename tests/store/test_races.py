"""Races, told from the side of who loses them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from relata_celery.domain.job import ClaimedJob, JobState
from relata_celery.store.client import Database
from relata_celery.store.jobs import Jobs
from tests.store.builders import LEASE_S, another_try, claim_one, claimed, expire_lease, new_job, success

ROUNDS = 15


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """Run these at the same moment, each in a thread; their answers in order."""
    barrier = threading.Barrier(len(acts))

    def run(act: Callable[[], Any]) -> Any:
        barrier.wait()
        return act()

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(run, acts))


@pytest.mark.parametrize("owners", [16, 1], ids=["16 workers", "one worker's 16 threads"])
def test_sixteen_threads_claim_two_thousand_jobs_none_twice_none_lost(store: Database, owners: int) -> None:
    total = 2000
    Jobs(store).enqueue([new_job(f"{n}", priority=n % 3) for n in range(total)])

    def work(number: int) -> list[str]:
        mine, jobs = [], Jobs(store)
        while taken := jobs.claim(["default"], 10, f"w{number % owners}", LEASE_S):
            mine += [job.claim.id for job in taken]
            assert all(verdict.accepted for verdict in jobs.settle([success(job) for job in taken]))
        return mine

    won = Counter(job_id for ids in at_once(*(partial(work, n) for n in range(16))) for job_id in ids)
    jobs = Jobs(store)
    # A thread stops when it won nothing, even if others took all that it saw: the rest still waits.
    while taken := jobs.claim(["default"], 100, "last", LEASE_S):
        won.update(job.claim.id for job in taken)
        jobs.settle([success(job) for job in taken])
    assert set(won) == {f"{n}" for n in range(total)}
    assert set(won.values()) == {1}
    assert jobs.count(states=[JobState.SUCCEEDED]) == total


def test_of_two_who_claim_one_job_by_its_id_one_gets_nothing(jobs: Jobs) -> None:
    for n in range(ROUNDS):
        jobs.enqueue([new_job(f"{n}")])
        claim = partial(jobs.claim_by_id, f"{n}", ["default"])
        answers = at_once(*(partial(claim, owner, LEASE_S) for owner in ("a", "b", "c")))
        assert sum(answer is not None for answer in answers) == 1


def test_of_a_reaper_and_a_late_settle_exactly_one_has_its_way(jobs: Jobs, store: Database) -> None:
    for _ in range(ROUNDS):
        job = claimed(jobs)
        expire_lease(store, job.claim.id)
        verdicts, reaped = at_once(partial(jobs.settle, [success(job)]), partial(jobs.reap, 10, None))
        assert verdicts[0].accepted is (reaped == [])
        read = jobs.get(job.claim.id)
        assert read is not None
        assert len(read.history) == 1
        assert read.state is (JobState.SUCCEEDED if verdicts[0].accepted else JobState.QUEUED)
        jobs.delete(job.claim.id)


def test_of_a_reaper_and_a_late_renewal_exactly_one_has_its_way(jobs: Jobs, store: Database) -> None:
    for _ in range(ROUNDS):
        job = claimed(jobs)
        expire_lease(store, job.claim.id)
        losses, reaped = at_once(partial(jobs.renew, [job.claim], LEASE_S), partial(jobs.reap, 10, None))
        assert len(losses) == len(reaped)
        jobs.delete(job.claim.id)


def test_of_a_cancel_and_a_settle_exactly_one_has_its_way(jobs: Jobs) -> None:
    for _ in range(ROUNDS):
        job = claimed(jobs)
        changes, verdicts = at_once(
            partial(jobs.cancel, [job.claim.id]), partial(jobs.settle, [success(job)])
        )
        assert changes[job.claim.id].changed is not verdicts[0].accepted
        read = jobs.get(job.claim.id)
        assert read is not None
        assert read.state is (JobState.SUCCEEDED if verdicts[0].accepted else JobState.CANCELLED)


def test_of_several_reapers_each_job_is_reported_by_one(jobs: Jobs, store: Database) -> None:
    jobs.enqueue([new_job(f"{n}") for n in range(60)])
    for job in jobs.claim(["default"], 60, "w1", LEASE_S):
        expire_lease(store, job.claim.id)
    reports = at_once(*(partial(jobs.reap, 60, None) for _ in range(4)))
    assert sorted(job.id for report in reports for job in report) == sorted(f"{n}" for n in range(60))


def test_of_two_publishers_of_one_id_one_is_told_it_existed(jobs: Jobs) -> None:
    for n in range(ROUNDS):
        answers = at_once(*(partial(jobs.enqueue, [new_job(f"{n}")]) for _ in range(3)))
        assert sorted(answers) == [[False], [False], [True]]


def test_one_settle_sent_by_two_threads_is_written_once_and_accepted_for_both(jobs: Jobs) -> None:
    for _ in range(ROUNDS):
        job = claimed(jobs)
        verdicts = at_once(*(partial(jobs.settle, [another_try(job)]) for _ in range(2)))
        assert [verdict.accepted for (verdict,) in verdicts] == [True, True]
        read = jobs.get(job.claim.id)
        assert read is not None
        assert len(read.history) == 1
        claim_one(jobs)


def test_a_claim_after_contention_still_takes_every_priority_in_order(jobs: Jobs) -> None:
    jobs.enqueue([new_job(f"{p}-{n}", priority=p) for p in (1, 5, 9) for n in range(4)])
    jobs._contended = True
    taken = jobs.claim(["default"], 6, "w1", LEASE_S)
    assert [job.priority for job in taken] == [9, 9, 9, 9, 5, 5]
    assert jobs._contended is False


@pytest.mark.parametrize("contended", [False, True])
def test_a_claim_says_that_more_wait_although_others_got_what_it_found(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, contended: bool
) -> None:
    jobs.enqueue([new_job(f"{n}") for n in range(8)])
    jobs._contended = contended
    find, rival = jobs._take, Jobs(jobs.database)

    def too_late(seen: Sequence[dict[str, Any]], owner: str, lease_s: float) -> list[ClaimedJob]:
        rival.claim(["default"], 8, "rival", LEASE_S)
        return find(seen, owner, lease_s)

    monkeypatch.setattr(jobs, "_take", too_late)
    claimed = jobs.claim(["default"], 4, "w1", LEASE_S)
    assert (list(claimed), claimed.more) == ([], True)
    monkeypatch.undo()
    claimed = jobs.claim(["default"], 4, "w1", LEASE_S)
    assert (list(claimed), claimed.more) == ([], False)
