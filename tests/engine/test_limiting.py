"""Admission at claim on a real MongoDB, one round at a time: who is let in, what it costs, what comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import pytest
from pymongo.database import Database

from relata_celery.domain.errors import StoreError, StoreUnavailable
from relata_celery.domain.job import JobState, NewJob
from relata_celery.domain.limits import Answer, LimitSpec, Rate
from relata_celery.domain.outcome import Succeeded
from relata_celery.engine.held import HeldJob, StopReason
from relata_celery.engine.limiting import Limited
from relata_celery.engine.service import EngineSettings, LeaseService
from relata_celery.engine.settling import Retention
from relata_celery.store.client import Database as Connection
from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs
from relata_celery.store.limits import Limits
from relata_celery.transport.envelope import followup_to_job
from tests.operations import counted
from tests.waiting import wait_until

MESSAGE = {"body": "[[], {}, {}]", "headers": {"task": "t", "id": "x"}, "properties": {"delivery_tag": "x"}}
LEASE_S, POLL_S = 30.0, 20.0
TWO = LimitSpec(2)


class Moody(Limits):
    """Limits that answer the next ask with this error, after having done it if ``late``."""

    def __init__(self, database: Connection) -> None:
        super().__init__(database)
        self.error: StoreError | None = None
        self.late = False

    def ask(self, *args: Any, **fields: Any) -> Answer:
        error, self.error = self.error, None
        if error is not None and not self.late:
            raise error
        answer = super().ask(*args, **fields)
        if error is not None:
            raise error
        return answer


class Worker:
    """An engine whose parts are run by the test, a round at a time."""

    def __init__(self, uri: str, owner: str, spec: LimitSpec, limited: bool) -> None:
        database = connect(uri)
        self.jobs, self.limits = Jobs(database), Moody(database)
        self.delivered: list[HeldJob] = []
        self.slots = 10
        self.service = LeaseService(
            self.jobs,
            EngineSettings(LEASE_S, 10.0, POLL_S, 0.0, 10.0, 0.5, 0.3, Retention(60.0, 60.0)),
            owner=owner,
            slots=lambda: self.slots,
            deliver=self.delivered.extend,
            followup_to_job=followup_to_job,
            emit=lambda _event: None,
            random=lambda: 0.5,
            limited=Limited(self.limits, {"ai": "ai"}, {"ai": spec}) if limited else None,
        )
        for queue in ("ai", "default"):
            self.service.claimer.consume(queue)

    def round(self) -> list[str]:
        """One round of the claimer; the ids of the jobs that it brought."""
        before = len(self.delivered)
        self.service.claimer.wake()
        self.pause = self.service.claimer.step()
        return [held.claim.id for held in self.delivered[before:]]

    def held(self, job_id: str) -> HeldJob:
        return next(held for held in reversed(self.delivered) if held.claim.id == job_id)

    def begin(self, *ids: str) -> None:
        for job_id in ids:
            self.service.begin(self.held(job_id), monotonic())

    def succeed(self, *ids: str) -> None:
        for job_id in ids:
            self.service.end(self.held(job_id), Succeeded(), 0.1)
        self.service.settler.step()

    def publish(self, queue: str, *ids: str, **fields: Any) -> None:
        self.jobs.enqueue([NewJob(id=i, type="t", queue=queue, message=MESSAGE, **fields) for i in ids])

    def in_use(self) -> int:
        found = self.limits.get("ai")
        return 0 if found is None else found.in_use


StartWorker = Callable[..., Worker]


@pytest.fixture
def worker(database_uri: str) -> Iterator[StartWorker]:
    workers: list[Worker] = []

    def start(spec: LimitSpec = TWO, owner: str = "w1", limited: bool = True) -> Worker:
        workers.append(Worker(database_uri, owner, spec, limited))
        return workers[-1]

    yield start
    for started in workers:
        started.service.stop(0.0)


@pytest.fixture
def count(database: Database[dict[str, Any]]) -> Callable[[Callable[[], Any]], Counter[str]]:
    """How many operations on which collection a piece of work takes, as the server saw it."""

    def counting(work: Callable[[], Any]) -> Counter[str]:
        with counted(database) as operations:
            work()
        return operations.by_collection()

    return counting


def test_no_more_jobs_are_claimed_than_slots_are_free_and_the_rest_stays_queued(worker: StartWorker) -> None:
    w = worker()
    w.publish("ai", "a", "b", "c", "d")
    assert w.round() == ["a", "b"]
    assert w.in_use() == 2
    for job_id in ("c", "d"):
        job = w.jobs.get(job_id)
        assert job is not None
        assert (job.state, job.attempts, job.fence) == (JobState.QUEUED, 0, 0)
    assert w.round() == []


def test_two_workers_share_the_slots_and_one_takes_over_what_the_other_frees(worker: StartWorker) -> None:
    one, two = worker(), worker(owner="w2")
    one.publish("ai", *"abcdef")
    one.slots = 1
    assert one.round() == ["a"]
    assert two.round() == ["b"]
    two.succeed("b")
    assert two.round() == ["c"]
    one.succeed("a")
    assert one.round() == ["d"]
    assert one.in_use() == 2


def test_a_refused_backlog_holds_up_no_other_queue(worker: StartWorker) -> None:
    w = worker(LimitSpec(1))
    w.slots = 4
    w.publish("ai", *(f"ai-{n}" for n in range(10)), priority=9)
    w.publish("default", "p", "q", "r", "s")
    assert w.round() == ["ai-0", "p", "q", "r"]
    w.succeed("p", "q", "r")
    assert w.round() == ["s"]


def test_jobs_of_all_queues_come_in_their_order(worker: StartWorker) -> None:
    w = worker()
    w.publish("ai", "low")
    w.publish("default", "middle", priority=5)
    w.publish("ai", "high", priority=9)
    assert w.round() == ["high", "middle", "low"]


def test_a_worker_that_is_refused_waits_for_the_poll_or_for_a_slot_of_its_own(worker: StartWorker) -> None:
    one, two = worker(LimitSpec(1)), worker(LimitSpec(1), owner="w2")
    one.publish("ai", *"abc")
    assert one.round() == ["a"]
    assert two.round() == []
    assert two.pause is not None
    assert POLL_S * 0.8 < two.pause < POLL_S * 1.2, "a refused worker spins"
    one.succeed("a")
    assert one.round() == ["b"]


def test_the_rate_refuses_until_its_next_permit(worker: StartWorker) -> None:
    w = worker(LimitSpec(None, Rate.parse("10/s", burst=1)))
    w.publish("ai", *"abc")
    assert w.round() == ["a"]
    assert w.pause is not None
    assert w.pause < 0.15
    assert wait_until(w.round, interval=0.01) == ["b"]


def test_slots_granted_for_jobs_that_others_took_are_given_back_with_their_permits(
    worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LimitSpec(5, Rate.parse("5/d"))
    w, other = worker(spec), Jobs(connect(worker(spec, owner="w2").jobs.database.uri))
    w.publish("ai", *"abcd")
    gate = w.service.gate
    assert gate is not None
    admit = gate.admit

    def admit_late(queues: Sequence[str]) -> list[bool]:
        other.claim(["ai"], 3, "w2", LEASE_S)
        return admit(queues)

    monkeypatch.setattr(gate, "admit", admit_late)
    assert w.round() == ["d"]
    found = w.limits.get("ai")
    assert found is not None
    assert found.in_use == 1
    assert found.permits == pytest.approx(4.0, abs=0.01)


def test_the_slot_of_an_attempt_that_was_taken_away_stays_until_its_code_has_ended(worker: StartWorker) -> None:
    w = worker(LimitSpec(1))
    w.publish("ai", "a", "b")
    w.round()
    w.begin("a")
    w.service.lose(w.held("a"), StopReason.LEASE_LOST, "a test")
    assert w.round() == []
    assert w.in_use() == 1
    w.service.end(w.held("a"), Succeeded(), 0.1)
    assert w.round() == ["b"]


def test_the_slot_of_a_job_that_never_began_comes_back_when_it_is_given_back(worker: StartWorker) -> None:
    w = worker(LimitSpec(1))
    w.publish("ai", "a", "b")
    w.round()
    w.service.lose(w.held("a"), StopReason.LEASE_LOST, "a test")
    assert w.round() == ["b"]


def test_slots_are_renewed_with_the_leases_of_their_jobs(
    worker: StartWorker, database: Database[dict[str, Any]]
) -> None:
    w = worker()
    w.publish("ai", "a")
    w.round()
    database["relata_limits"].update_one({}, [{"$set": {"slots.until": {"$add": ["$$NOW", 1000]}}}])
    w.service.renewer.step()
    found = w.limits.get("ai")
    assert found is not None
    assert (found.slots[0].until - found.now).total_seconds() > LEASE_S - 5


def test_a_worker_that_stops_gives_all_slots_back(worker: StartWorker) -> None:
    w = worker()
    w.publish("ai", *"abc")
    w.round()
    w.begin("a", "b")
    w.service.stop(0.0)
    assert w.in_use() == 0


def test_a_slot_granted_in_an_answer_that_was_lost_is_not_leaked(worker: StartWorker) -> None:
    w = worker(LimitSpec(1))
    w.publish("ai", "a")
    w.limits.error, w.limits.late = StoreUnavailable("the connection was lost"), True
    with pytest.raises(StoreUnavailable):
        w.round()
    assert w.in_use() == 1
    assert w.round() == ["a"]
    assert w.in_use() == 1


def test_a_limit_that_cannot_be_asked_closes_its_own_queue_only(worker: StartWorker) -> None:
    w = worker()
    w.publish("ai", "a")
    w.publish("default", "p")
    w.limits.error = StoreError("refused")
    assert w.round() == ["p"]


def test_inner_waiters_go_first(worker: StartWorker) -> None:
    w = worker(LimitSpec(1))
    w.publish("ai", "a", "b")
    w.round()
    w.limits.ask("ai", LimitSpec(1), want=["x"], owner="job", lease_s=LEASE_S, waiter="x")
    w.succeed("a")
    assert w.round() == []
    assert w.limits.ask("ai", LimitSpec(1), want=["x"], owner="job", lease_s=LEASE_S, waiter="x").granted == ("x",)


# ---------------------------------------------------------------- what it costs


def test_jobs_of_other_queues_cost_nothing_more(worker: StartWorker, count: Any) -> None:
    without, limited = worker(limited=False), worker(owner="w2")
    costs = []
    for w in (without, limited):
        w.publish("default", *(f"{w.service.owner}-{n}" for n in range(3)))
        costs.append(count(w.round))
        w.succeed(*(held.claim.id for held in w.delivered))
        costs.append(count(w.round))
    assert costs[0] == costs[2] == {"jobs": 2}
    assert costs[1] == costs[3] == {"jobs": 1}


def test_a_batch_of_admitted_jobs_costs_one_operation_more(worker: StartWorker, count: Any) -> None:
    w = worker(LimitSpec(5))
    w.publish("ai", *(f"ai-{n}" for n in range(15)))
    w.slots = 5
    assert count(w.round) == {"jobs": 2, "limits": 1}
    assert len(w.delivered) == 5
    w.succeed(*(held.claim.id for held in w.delivered))
    # Returned and taken in one.
    assert count(w.round) == {"jobs": 2, "limits": 1}
    assert len(w.delivered) == 10


def test_the_last_slots_cost_one_operation_to_return(worker: StartWorker, count: Any) -> None:
    w = worker()
    w.publish("ai", "a", "b")
    w.round()
    w.succeed("a", "b")
    assert count(w.round) == {"jobs": 1, "limits": 1}
    assert count(w.round) == {"jobs": 1}


def test_a_refused_backlog_costs_two_operations_more_in_a_poll_and_none_between(
    worker: StartWorker, count: Any
) -> None:
    one, two = worker(), worker(owner="w2")
    two.round()  # the first one also looks how long it may rest
    one.publish("ai", *(f"ai-{n}" for n in range(10)))
    one.round()
    assert count(two.round) == {"jobs": 2, "limits": 1}
    assert count(two.round) == {"jobs": 1}
    two.publish("default", "p")
    assert count(two.round) == {"jobs": 2}


def test_renewal_of_all_slots_is_one_operation(worker: StartWorker, count: Any) -> None:
    w = worker(LimitSpec(5))
    w.publish("ai", *"abcde")
    w.round()
    assert count(w.service.renewer.step) == {"jobs": 1, "limits": 1}
    w.succeed(*"abcde")
    w.round()
    assert count(w.service.renewer.step) == {}
