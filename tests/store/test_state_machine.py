"""Any order of acts by three workers, their zombies, a reaper and a person keeps the queue's promises."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from relata_celery.domain.job import AttemptOutcome, Claim, ClaimedJob, Job, JobState
from relata_celery.domain.outcome import Settlement
from relata_celery.store.client import Database
from relata_celery.store.codec import COLLECTION
from relata_celery.store.jobs import Jobs
from tests.store.builders import (
    LEASE_S,
    another_try,
    expire_lease,
    failure,
    new_job,
    release,
    snooze,
    success,
)

WORKERS = st.sampled_from(["w1", "w2", "w3"])
IDS = st.sampled_from(["a", "b", "c"])


def ending(kind: str, job: ClaimedJob) -> Settlement:
    """The settlement that policy would make of this kind of outcome."""
    if kind == "succeed":
        return success(job)
    if kind == "release":
        return release(job)
    if kind == "snooze":
        return snooze(job)
    if kind == "retry" and job.attempt < job.max_attempts:
        return another_try(job)
    return failure(job)


class Queue(RuleBasedStateMachine):
    """The model knows, for each job, its fence, the one claim that is valid, and its terminal state."""

    store: Database

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.store.collection(COLLECTION).delete_many({})
        self.jobs = Jobs(self.store)
        self.fences: dict[str, int] = {}
        self.valid: dict[str, Claim] = {}
        self.ended: dict[str, JobState] = {}
        self.seen: dict[str, Job] = {}

    @rule(job_id=IDS, max_attempts=st.integers(1, 3))
    def enqueue(self, job_id: str, max_attempts: int) -> None:
        (inserted,) = self.jobs.enqueue([new_job(job_id, max_attempts=max_attempts)])
        assert inserted is (job_id not in self.fences)
        self.fences.setdefault(job_id, 0)

    @rule(target=claims, owner=WORKERS, limit=st.integers(1, 3))
    def claim(self, owner: str, limit: int) -> Any:
        waiting = [i for i in self.fences if i not in self.valid and i not in self.ended]
        taken = self.jobs.claim(["default"], limit, owner, LEASE_S)
        assert len(taken) == min(limit, len(waiting))
        for job in taken:
            assert job.claim.id in waiting
            assert job.claim.fence == self.fences[job.claim.id] + 1
            assert job.attempt <= job.max_attempts
            self.fences[job.claim.id] += 1
            self.valid[job.claim.id] = job.claim
        return multiple(*taken)

    @rule(job=claims)
    def renew(self, job: ClaimedJob) -> None:
        losses = self.jobs.renew([job.claim], LEASE_S)
        assert (losses == []) is (self.valid.get(job.claim.id) == job.claim)

    @rule(job=claims, kind=st.sampled_from(["succeed", "fail", "retry", "release", "snooze"]))
    def settle(self, job: ClaimedJob, kind: str) -> None:
        """Also by zombies: a claim stays in its bundle when it is no longer valid."""
        one, valid = ending(kind, job), self.valid.get(job.claim.id) == job.claim
        before = self.jobs.get(job.claim.id)
        assert before is not None
        (verdict,) = self.jobs.settle([one])
        if valid:
            assert verdict.accepted
            del self.valid[job.claim.id]
            if one.state.terminal:
                self.ended[job.claim.id] = one.state
        else:
            assert self.jobs.get(job.claim.id) == before
            assert verdict.accepted is self._already(before, one)
            assert verdict.accepted or verdict.reason

    def _already(self, job: Job, one: Settlement) -> bool:
        if one.recorded is None:
            return job.state is one.state and job.fence == one.claim.fence
        return any(
            (entry.fence, entry.worker, entry.outcome) == (one.claim.fence, one.claim.owner, one.recorded)
            for entry in job.history
        )

    @rule(job_id=IDS)
    def lease_runs_out_and_is_reaped(self, job_id: str) -> None:
        expire_lease(self.store, job_id)
        reaped = self.jobs.reap(10, None)
        assert [job.id for job in reaped] == ([job_id] if job_id in self.valid else [])
        for job in reaped:
            assert job.fence == self.valid.pop(job.id).fence
            if job.state.terminal:
                self.ended[job.id] = job.state

    @rule(job_id=IDS)
    def lease_runs_out_unnoticed(self, job_id: str) -> None:
        """Nobody reaps: the claim stays valid, and may still be renewed or settled."""
        expire_lease(self.store, job_id)
        if job_id in self.valid:
            assert self.jobs.renew([self.valid[job_id]], LEASE_S) == []

    @rule(job_id=IDS)
    def cancel(self, job_id: str) -> None:
        change = self.jobs.cancel([job_id])[job_id]
        live = job_id in self.fences and job_id not in self.ended
        assert change.changed is live
        if live:
            self.valid.pop(job_id, None)
            self.ended[job_id] = JobState.CANCELLED

    @rule(job_id=IDS)
    def retry_by_hand(self, job_id: str) -> None:
        change = self.jobs.retry([job_id])[job_id]
        assert change.changed is (self.ended.get(job_id) in (JobState.FAILED, JobState.CANCELLED))
        if change.changed:
            del self.ended[job_id]

    @invariant()
    def promises_hold(self) -> None:
        found = {job.id: job for job in self.jobs.find()}
        assert set(found) == set(self.fences)
        for job_id, job in found.items():
            self._check(job, self.seen.get(job_id))
        self.seen = found

    def _check(self, job: Job, before: Job | None) -> None:
        claim = self.valid.get(job.id)
        expected = self.ended.get(job.id, JobState.QUEUED if claim is None else JobState.RUNNING)
        assert job.state is expected
        assert job.fence == self.fences[job.id]
        assert before is None or before.fence <= job.fence <= before.fence + 1
        assert 0 <= job.attempts <= job.max_attempts
        assert (job.lease is None) is (claim is None)
        assert (job.finished_at is not None) is job.state.terminal
        if claim is not None:
            assert job.lease is not None
            assert (job.lease.owner, job.fence) == (claim.owner, claim.fence)
        fences = [entry.fence for entry in job.history]
        assert fences == sorted(set(fences))
        assert all(1 <= entry.number <= job.max_attempts for entry in job.history)
        ends = [e for e in job.history if e.outcome in (AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED)]
        if job.state is JobState.SUCCEEDED:
            assert job.history[-1].outcome is AttemptOutcome.SUCCEEDED
            assert len([e for e in ends if e.outcome is AttemptOutcome.SUCCEEDED]) == 1


def test_any_order_of_acts_keeps_the_promises(store: Database) -> None:
    machine = type("QueueOnThisDatabase", (Queue,), {"store": store})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
