"""When a worker looks for jobs: what it hears of, what others take, and when it need hear of nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from time import sleep
from typing import Any

import pytest

from relata_celery.domain.job import ClaimedJob, NewJob
from relata_celery.engine import claiming
from relata_celery.engine.service import LeaseService
from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs
from relata_celery.transport.envelope import followup_to_job
from tests.engine.bench import MESSAGE, Bench
from tests.waiting import wait_until


class Counting(Jobs):
    """The store, with its claims counted."""

    claims = 0

    def claim(self, queues: Collection[str], limit: int, *args: Any, **kwargs: Any) -> list[ClaimedJob]:
        self.claims += 1
        return super().claim(queues, limit, *args, **kwargs)

    def claim_by_id(self, *args: Any, **kwargs: Any) -> ClaimedJob | None:
        self.claims += 1
        return super().claim_by_id(*args, **kwargs)


class Fleet(Bench):
    """One worker that polls hardly ever, so that only what it hears of makes it look."""

    def __init__(self, uri: str, **times: Any) -> None:
        super().__init__(uri, poll_s=60.0, **times)
        self.busy: list[bool] = []
        self.store = Counting(connect(uri))
        self.service = LeaseService(
            self.store,
            self.service.settings,
            owner="bench",
            slots=self._slots,
            deliver=self._deliver,
            followup_to_job=followup_to_job,
            emit=self.events.append,
            random=lambda: 1.0,
        )
        self.claimer.on_busy = self.busy.append
        self.rounds = 0

    def _slots(self) -> int:
        """Asked once in every round of the claimer."""
        self.rounds += 1
        return self.slots

    @property
    def claimer(self) -> claiming.Claimer:
        return self.service.claimer

    def settled(self) -> int:
        """Let the claimer come to rest; how many claims it has sent."""
        before = -1
        while before != self.store.claims:
            before = self.store.claims
            sleep(0.25)
        return before


@pytest.fixture
def worker(running: Callable[..., Fleet]) -> Callable[..., Fleet]:
    def start(**times: Any) -> Fleet:
        fleet = running(Fleet, **times)
        wait_until(lambda: fleet.store.claims, message="the first look")
        fleet.settled()
        return fleet

    return start


def test_a_lone_worker_looks_at_once_for_what_it_hears_of(worker: Callable[..., Fleet]) -> None:
    w = worker()
    claims = w.settled()
    w.publish("a")
    w.claimer.added("a", -0.001)
    wait_until(lambda: w.delivered, message="the job is claimed")
    assert w.settled() == claims + 1
    assert w.claimer._spread_s == 0.0


def test_a_worker_that_comes_too_late_waits_longer_each_time_and_looks_not_at_all_for_what_was_taken(
    worker: Callable[..., Fleet],
) -> None:
    w = worker()
    spreads = []
    for n in range(8):
        claims = w.settled()
        w.claimer.added(f"elsewhere-{n}", 0.0)
        assert w.settled() == claims + 1
        spreads.append(w.claimer._spread_s)
    assert spreads == sorted(spreads)
    assert spreads[0] == claiming.LEAST_SPREAD_S
    assert spreads[-1] == claiming.LONGEST_SPREAD_S

    claims = w.settled()
    for n in range(20):
        w.claimer.added(f"contended-{n}", 0.0)
        w.claimer.taken(f"contended-{n}")
    assert w.settled() == claims

    w.publish("a")
    w.claimer.added("a", 0.0)
    wait_until(lambda: w.delivered, message="the job is claimed")
    wait_until(lambda: w.claimer._spread_s == claiming.LONGEST_SPREAD_S / 2, message="the spread is narrower")


@pytest.mark.parametrize("delay_s", [0.05, 0.6], ids=["soon", "later"])
def test_a_job_that_is_due_later_is_looked_for_then(worker: Callable[..., Fleet], delay_s: float) -> None:
    w = worker()
    claims = w.settled()
    w.jobs.enqueue([NewJob(id="a", type="t", queue="q", message=MESSAGE, delay_s=delay_s)])
    w.claimer.added("a", delay_s)
    wait_until(lambda: w.delivered, message="the job is claimed")
    assert w.settled() <= claims + 3


def test_a_worker_with_more_jobs_than_room_need_hear_of_none(
    worker: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "BUSY_S", 0.0)
    w = worker()
    w.publish("a", "b", "c", "d", "e")
    w.claimer.hint()
    wait_until(lambda: len(w.delivered) == 2, message="the slots are full")
    w.claimer.added("e", 0.0)
    wait_until(lambda: w.busy == [True], message="it wants to hear of no more")
    for done in range(5):
        wait_until(partial(lambda n: len(w.delivered) > n, done), message="the next job is claimed")
        w.service.acknowledge(w.delivered[done])
    wait_until(lambda: w.busy == [True, False], message="it wants to hear of jobs again")


def test_a_full_worker_does_not_look_again_and_again_for_a_job_that_has_come_due(
    worker: Callable[..., Fleet],
) -> None:
    w = worker()
    w.publish("a", "b")
    w.claimer.hint()
    wait_until(lambda: len(w.delivered) == 2, message="the slots are full")
    w.settled()
    rounds = w.rounds
    w.jobs.enqueue([NewJob(id="c", type="t", queue="q", message=MESSAGE, delay_s=0.3)])
    w.claimer.added("c", 0.3)
    wait_until(lambda: w.rounds > rounds, message="its time has come")
    w.settled()
    assert w.rounds <= rounds + 2
    w.service.acknowledge(w.delivered[0])
    w.service.acknowledge(w.delivered[1])
    wait_until(lambda: len(w.delivered) == 3, message="it is claimed when there is room")
