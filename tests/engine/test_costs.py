"""What jobs cost MongoDB, counted in operations and never in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from random import Random
from time import sleep
from typing import Any

import pymongo.database
import pytest

from relata_celery.bootstrap import open_stores
from relata_celery.domain.job import JobState, NewJob
from relata_celery.domain.outcome import Succeeded
from relata_celery.engine import claiming
from relata_celery.engine.held import HeldJob
from tests.engine.bench import MESSAGE, Bench
from tests.operations import counted
from tests.waiting import wait_until

Raw = pymongo.database.Database[dict[str, Any]]


class Quick(Bench):
    """A worker whose handlers return at once."""

    def _deliver(self, jobs: Sequence[HeldJob]) -> None:
        for held in jobs:
            self.begin(held)
            self.service.end(held, Succeeded(), 0.0)
        super()._deliver(jobs)


@pytest.fixture
def stop() -> Iterator[list[Any]]:
    """Services and watches to be stopped at the end."""
    started: list[Any] = []
    yield started
    threads = [threading.Thread(target=part.stop) for part in started]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_backlog_costs_an_operation_for_many_jobs(database_uri: str, database: Raw, stop: list[Any]) -> None:
    worker = Quick(database_uri, poll_s=30.0, claim_ahead_s=0.1)
    worker.publish(*(f"{n}" for n in range(1000)))
    stop.append(worker.service)
    with counted(database) as operations:
        worker.service.start()
        worker.service.claimer.consume("q")
        wait_until(lambda: worker.jobs.count(states=[JobState.SUCCEEDED]) == 1000, message="all have run")
    # What the test asks itself is a command.
    assert operations.total("query", "update", "insert") <= 1000 * 0.25, operations.seen


@pytest.mark.parametrize("jobs", [1, 500])
def test_renewing_costs_an_update_however_many_jobs_are_held(
    database_uri: str, database: Raw, stop: list[Any], jobs: int
) -> None:
    worker = Bench(database_uri, poll_s=30.0, heartbeat_s=30.0, lease_s=100.0)
    worker.slots = jobs
    worker.publish(*(f"{n}" for n in range(jobs)))
    stop.append(worker.service)
    worker.service.start()
    worker.service.claimer.consume("q")
    wait_until(lambda: len(worker.delivered) == jobs, message="all are claimed")
    for held in worker.delivered:
        worker.begin(held)
    worker.service.reaper.stop()
    with counted(database) as operations:
        for _ in range(3):
            worker.service.renewer.step()
    assert operations.seen == {("update", "jobs"): 3}


def test_a_job_that_an_idle_worker_hears_of_costs_one_claim_and_one_settlement(
    database_uri: str, database: Raw, stop: list[Any]
) -> None:
    worker = Quick(database_uri, poll_s=60.0, reap_period_s=60.0)
    watch = open_stores(database_uri).watch_jobs(worker.service.claimer)
    stop.extend((watch, worker.service))
    worker.service.start()
    worker.service.claimer.consume("q")
    watch.start()
    wait_until(lambda: watch.healthy, timeout=60, message="the stream is open")
    worker.publish("first")
    wait_until(lambda: worker.jobs.count(states=[JobState.SUCCEEDED]) == 1, message="it has run")
    with counted(database) as operations:
        for n in range(20):
            worker.publish(f"{n}")
            wait_until(lambda: len(worker.delivered) == n + 2, message="it is claimed")  # noqa: B023
    wait_until(lambda: worker.jobs.count(states=[JobState.SUCCEEDED]) == 21, message="all have run")
    assert operations.total("query") <= 6, operations.seen  # two that are heard of together are claimed by a look
    assert operations.total("command") <= 22, operations.seen
    assert operations.total("update") <= 21, operations.seen


def test_ten_idle_workers_do_not_stampede_when_a_job_comes(
    database_uri: str, database: Raw, stop: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ten in one process hear of a claim much later than on machines of their own.
    monkeypatch.setattr(claiming, "LONGEST_SPREAD_S", 0.5)
    fleet = [Quick(database_uri, poll_s=60.0, reap_period_s=60.0) for _ in range(10)]
    for number, worker in enumerate(fleet):
        worker.service.claimer._random = Random(number).random
        watch = open_stores(database_uri).watch_jobs(worker.service.claimer)
        stop.extend((watch, worker.service))
        worker.service.start()
        worker.service.claimer.consume("q")
        watch.start()
    wait_until(lambda: all(part.healthy for part in stop[::2]), timeout=60, message="all streams are open")
    jobs = fleet[0].jobs

    def publish(first: int, count: int) -> None:
        for n in range(first, first + count):
            jobs.enqueue([NewJob(id=f"{n}", type="t", queue="q", message=MESSAGE)])
            wait_until(lambda: sum(len(w.delivered) for w in fleet) > n, message="it is claimed")  # noqa: B023
            sleep(0.05)  # the rate is part of what is asked: twenty jobs a second

    publish(0, 30)  # they find out that they are many
    with counted(database) as operations:
        publish(30, 40)
    assert operations.total("query", "update", "command") <= 40 * 7, operations.seen
