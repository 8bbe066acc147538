"""The engine against a real MongoDB, without Celery: its promises when things go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

import pymongo
import pytest
from pymongo.database import Database

from relata_celery.domain.events import JobRefused, JobSettled
from relata_celery.domain.job import ErrorClass, JobState
from relata_celery.domain.outcome import (
    Encoded,
    ErrorInfo,
    Failed,
    LeaseForfeited,
    Settlement,
    Succeeded,
    Verdict,
)
from relata_celery.engine.claiming import MAX_AHEAD_PER_SLOT
from relata_celery.engine.held import HeldJob, StopReason
from relata_celery.engine.reaping import BATCH as REAPED_AT_ONCE
from tests.engine.bench import MESSAGE, Bench, Control
from tests.waiting import wait_until


@pytest.fixture
def bench(running: Callable[..., Bench]) -> Callable[..., Bench]:
    return partial(running, Bench)


@contextmanager
def failing(client: pymongo.MongoClient[Any], commands: list[str], times: int | str = "alwaysOn") -> Iterator[None]:
    """Have the server close the connection on these commands."""
    mode: Any = times if isinstance(times, str) else {"times": times}
    data = {"failCommands": commands, "closeConnection": True, "appName": "relata_celery"}
    client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})
    try:
        yield
    finally:
        client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


def test_an_outcome_is_settled_once_although_mongodb_fails_at_first(
    bench: Callable[..., Bench], mongo_client: pymongo.MongoClient[Any]
) -> None:
    b = bench(lease_s=10.0)
    b.publish("a")
    wait_until(lambda: b.delivered, message="the job is claimed")
    verdicts: list[Verdict] = []
    with failing(mongo_client, ["update"], times=5):
        b.service.settle(b.delivered[0], Succeeded(), lambda _s, verdict: verdicts.append(verdict))
        wait_until(lambda: verdicts, message="there is a verdict", timeout=60)
    assert [verdict.accepted for verdict in verdicts] == [True]
    job = b.jobs.get("a")
    assert job is not None
    assert (job.state, len(job.history)) == (JobState.SUCCEEDED, 1)


def test_a_failed_renewal_stops_no_attempt_before_the_lease_is_over(
    bench: Callable[..., Bench], mongo_client: pymongo.MongoClient[Any]
) -> None:
    b = bench(lease_s=3.0, heartbeat_s=0.2, reap_period_s=60.0)
    b.publish("a")
    wait_until(lambda: b.delivered, message="the job is claimed")
    held = b.delivered[0]
    control = b.begin(held)
    wait_until(lambda: control.lease_deadline > 0, message="a renewal was accepted")
    with failing(mongo_client, ["update"]):
        renewed_until = held.lease_deadline
        wait_until(lambda: monotonic() > renewed_until - 1.5, message="several renewals have failed")
        assert control.interrupted == []
        wait_until(lambda: control.interrupted, message="the attempt is told at the deadline")
        assert monotonic() >= renewed_until
    assert control.interrupted == [StopReason.LEASE_LOST]


def test_a_job_cancelled_by_hand_is_told_at_the_next_renewal_and_its_outcome_refused(
    bench: Callable[..., Bench],
) -> None:
    b = bench()
    b.publish("a")
    wait_until(lambda: b.delivered, message="the job is claimed")
    control = b.begin(b.delivered[0])
    b.jobs.cancel(["a"])
    wait_until(lambda: control.interrupted == [StopReason.CANCELLED], message="the attempt is told")
    wait_until(lambda: control.killed, message="and killed after the grace")
    assert not b.service.settle(b.delivered[0], Succeeded())
    assert b.state("a") is JobState.CANCELLED
    assert any(isinstance(event, JobRefused) for event in b.events)


def test_a_zombies_outcome_is_refused_and_the_replacements_stands(bench: Callable[..., Bench]) -> None:
    zombie = bench(heartbeat_s=60.0, lease_s=1.0, reap_period_s=60.0)
    zombie.publish("a")
    wait_until(lambda: zombie.delivered, message="the first claims")
    zombie.service.deadlines.stop()
    zombie.service.claimer.cancel("q")
    other = bench()
    wait_until(lambda: other.delivered, message="the second claims after the lease ran out")
    verdicts: list[Verdict] = []
    zombie.service.settle(zombie.delivered[0], Succeeded(), lambda _s, verdict: verdicts.append(verdict))
    wait_until(lambda: verdicts, message="the zombie has its verdict")
    assert not verdicts[0].accepted
    assert "bench" in str(verdicts[0].reason)
    other.service.settle(other.delivered[0], Succeeded())
    wait_until(lambda: other.state("a") is JobState.SUCCEEDED, message="the replacement's outcome is written")
    job = other.jobs.get("a")
    assert job is not None
    assert [str(attempt.outcome) for attempt in job.history] == ["lease_expired", "succeeded"]


def test_a_job_past_its_hard_deadline_is_ended_and_killed(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.publish("a")
    wait_until(lambda: b.delivered, message="the job is claimed")
    control = b.begin(b.delivered[0], soft=(0.1, StopReason.TIMEOUT), hard_s=0.5)
    wait_until(lambda: b.state("a") is JobState.FAILED, message="the job has failed")
    assert control.interrupted[0] is StopReason.TIMEOUT
    wait_until(lambda: control.killed, message="its process is killed")
    job = b.jobs.get("a")
    assert job is not None
    assert job.error_class is ErrorClass.TIMEOUT


def test_no_more_jobs_are_claimed_than_slots_are_free(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.publish(*(f"j{n}" for n in range(10)))
    wait_until(lambda: len(b.delivered) == 2, message="two are claimed")
    b.service.settle(b.delivered[0], Succeeded())
    wait_until(lambda: len(b.delivered) == 3, message="a third follows the first's end")
    assert b.jobs.queue_size("q") == 7


def test_the_slot_of_code_that_does_not_stop_is_not_filled_before_it_ends(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.slots = 1
    b.publish("stubborn", "next")
    wait_until(lambda: b.delivered, message="the first is claimed")
    held = b.delivered[0]
    b.begin(held, soft=(0.05, StopReason.TIMEOUT), hard_s=0.1)
    wait_until(lambda: b.state(held.claim.id) is JobState.FAILED, message="its time ran out")
    assert b.service.claimer.most() == b.service.held.occupying
    assert len(b.delivered) == 1
    b.service.end(held, Succeeded(), 5.0)
    wait_until(lambda: len(b.delivered) == 2, message="the next is claimed when the code has ended")


def test_short_jobs_are_claimed_ahead_and_none_behind_a_slow_one(bench: Callable[..., Bench]) -> None:
    b = bench(claim_ahead_s=0.1)
    claimer = b.service.claimer
    claimer.pace.observe(0.0005)
    assert claimer.most() == 2 + 2 * MAX_AHEAD_PER_SLOT
    claimer.pace.observe(0.0395)
    assert claimer.most() == 2 + 2 * 5  # of 20 ms each on average
    claimer.pace.observe(10.0)
    assert claimer.most() == 2


def test_draining_gives_back_what_never_began_at_once_and_the_rest_when_time_is_up(
    bench: Callable[..., Bench],
) -> None:
    b = bench(drain_s=0.3)
    b.publish("runs", "waits", priority=0)
    wait_until(lambda: len(b.delivered) == 2, message="both are claimed")
    control = b.begin(b.delivered[0])
    ran, waited = (held.claim.id for held in b.delivered)
    b.service.drain.begin()
    wait_until(lambda: b.state(waited) is JobState.QUEUED, message="the reserved job is queued again")
    assert b.state(ran) is JobState.RUNNING
    wait_until(lambda: b.state(ran) is JobState.QUEUED, message="the running one follows")
    job = b.jobs.get(ran)
    assert job is not None
    assert (job.attempts, job.history) == (0, ())
    wait_until(lambda: control.killed, message="its code is killed after that is written")
    b.publish("late")
    assert b.service.settler.flush(5)
    assert b.state("late") is JobState.QUEUED


class _Hasty(Control):
    """An attempt that hears of its end at once and gives up, before whoever told it goes on."""

    def __init__(self, b: Bench, held: HeldJob) -> None:
        super().__init__()
        self._b, self._held = b, held

    def interrupt(self, reason: StopReason) -> None:
        super().interrupt(reason)
        if len(self.interrupted) > 1:
            return
        self._b.service.begin(self._held, monotonic())
        self._b.service.end(self._held, LeaseForfeited("told to stop"), 0.0)


@pytest.mark.parametrize("way", ["connection closed", "drain", "drain, begun", "stranded"])
def test_a_job_given_back_is_free_at_once_though_its_attempt_gave_up_meanwhile(
    bench: Callable[..., Bench], way: str
) -> None:
    b = bench(lease_s=600.0, heartbeat_s=0.3)
    b.slots = 2 if way == "stranded" else 1
    b.publish("a", "b") if way == "stranded" else b.publish("a")
    wait_until(lambda: len(b.delivered) == b.slots)
    held = b.delivered[-1]
    control = _Hasty(b, held)
    b.service.adopt(held, control)
    if way == "connection closed":
        b.service.claimer.stop_claiming()
        b.service.give_back(held, "the connection was closed")
    elif way == "drain":
        b.service.drain.begin()
    elif way == "drain, begun":
        b.service.begin(held, monotonic())
        b.service.drain.now()
    else:
        slow = Control()
        b.service.adopt(b.delivered[0], slow)
        b.slots = 1
        b.service.begin(b.delivered[0], monotonic())
        wait_until(lambda: control.interrupted, 30, "the job behind the slow one is given back")
    wait_until(lambda: b.state(held.claim.id) is JobState.QUEUED, message="another worker may have the job")
    assert control.interrupted[0] is StopReason.DRAINED


def test_a_settlement_that_mongodb_cannot_take_becomes_a_permanent_failure_and_others_pass(
    bench: Callable[..., Bench],
) -> None:
    b = bench()
    b.publish("huge", "fine")
    wait_until(lambda: len(b.delivered) == 2, message="both are claimed")
    by_id = {held.claim.id: held for held in b.delivered}
    too_large = Encoded("application/json", "utf-8", "x" * 17_000_000)
    b.service.settle(by_id["huge"], Succeeded(too_large))
    b.service.settle(by_id["fine"], Succeeded())
    wait_until(lambda: b.state("huge") is JobState.FAILED, message="the huge one has failed", timeout=20)
    wait_until(lambda: b.state("fine") is JobState.SUCCEEDED, message="the other is done")
    job = b.jobs.get("huge")
    assert job is not None
    assert job.error_class is ErrorClass.PERMANENT


def test_followups_left_by_a_dead_worker_are_published_by_another(bench: Callable[..., Bench]) -> None:
    first = bench(reap_period_s=60.0)
    first.publish("a")
    wait_until(lambda: first.delivered, message="the job is claimed")
    followup = {"queue": "next", "message": {**MESSAGE, "headers": {"task": "t", "id": "b"}}}
    held = first.delivered[0]
    settlement = Settlement(held.claim, JobState.SUCCEEDED, recorded=None, attempt=1, followups=(followup,))
    assert first.jobs.settle([settlement])[0].accepted  # and the worker dies before it publishes
    assert first.jobs.get("b") is None
    first.jobs._jobs().update_one({"_id": "a"}, [{"$set": {"finished_at": {"$subtract": ["$$NOW", 60_000]}}}])
    bench()
    wait_until(lambda: first.jobs.get("b") is not None, message="the next step was published")
    wait_until(lambda: not first.jobs.get("a").followups, message="and is not pending any more")  # type: ignore[union-attr]


def test_a_retried_job_comes_back_when_its_delay_is_over_without_waiting_for_a_poll(
    bench: Callable[..., Bench],
) -> None:
    b = bench(poll_s=30.0)
    b.service.claimer.hint()
    b.publish("a")
    b.service.claimer.hint()
    wait_until(lambda: b.delivered, message="the job is claimed")
    error = ErrorInfo(ErrorClass.TRANSIENT, "not now")
    b.service.settle(b.delivered[0], Failed(error))
    wait_until(lambda: len(b.delivered) == 2, message="the second attempt is claimed", timeout=15)
    settled = [event for event in b.events if isinstance(event, JobSettled)]
    assert [str(event.outcome) for event in settled] == ["retried"]


def test_a_job_that_stays_reserved_for_longer_than_a_lease_is_given_back_uncounted(
    bench: Callable[..., Bench],
) -> None:
    b = bench(lease_s=1.0)
    b.publish("a")
    wait_until(lambda: b.delivered, message="the job is claimed")
    control = Control()
    b.service.adopt(b.delivered[0], control)
    again = wait_until(lambda: b.delivered[1:], message="it is claimed anew")[0]
    assert control.interrupted == [StopReason.DRAINED]
    assert (again.job.attempt, again.claim.fence) == (1, 2)
    assert not b.service.begin(b.delivered[0], monotonic())  # the first one comes too late


def test_an_outcome_that_waits_for_mongodb_keeps_its_lease_past_the_hard_deadline(
    bench: Callable[..., Bench], mongo_client: pymongo.MongoClient[Any], database_uri: str
) -> None:
    b = bench(lease_s=1.0)
    b.publish("a")
    wait_until(lambda: b.delivered, message="the job is claimed")
    held, verdicts = b.delivered[0], list[Verdict]()
    b.begin(held, hard_s=0.5)
    database = mongo_client[database_uri.partition("?")[0].rsplit("/", 1)[1]]
    # MongoDB takes claims and renewals, and no end of a job.
    database.command("collMod", "relata_jobs", validator={"state": {"$in": ["queued", "running"]}})
    b.service.settle(held, Succeeded(), lambda _s, verdict: verdicts.append(verdict))
    began = monotonic()
    wait_until(lambda: monotonic() > began + 4.0, message="four leases have gone by")
    assert verdicts == []
    database.command("collMod", "relata_jobs", validator={})
    wait_until(lambda: verdicts, message="there is a verdict", timeout=60)
    assert [verdict.accepted for verdict in verdicts] == [True]


def test_the_slot_of_a_slow_attempt_that_gave_up_by_itself_is_free(bench: Callable[..., Bench]) -> None:
    b = bench(lease_s=2.0)
    b.publish("a", "b", "c")
    wait_until(lambda: len(b.delivered) == 2, message="the slots are full")
    for held in b.delivered[:2]:
        b.begin(held)
        assert b.service.end(held, LeaseForfeited("its own clock said that the lease was over"), 5.0)
    assert b.service.held.occupying == 0
    wait_until(lambda: len(b.delivered) >= 3, message="the next is claimed")


def test_one_round_of_the_reaper_takes_back_however_many_there_are_of_types_nobody_knows(
    database_uri: str, database: Database[dict[str, Any]]
) -> None:
    b = Bench(database_uri)
    count = 2 * REAPED_AT_ONCE + 50
    b.publish(*(f"{n}" for n in range(count)))
    assert len(b.jobs.claim(["q"], count, "gone", 0.0)) == count
    b.service.reaper.step()
    states = {row["_id"]: row["count"] for row in database["relata_jobs"].aggregate([{"$sortByCount": "$state"}])}
    assert states == {"queued": count}
