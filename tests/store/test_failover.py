"""The loss of the primary: calls are repeated until one is answered, and nothing is done twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from relata_celery.domain.errors import StoreUnavailable
from relata_celery.domain.job import JobState
from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs
from tests.mongo import start_replica_set, with_database
from tests.store.builders import LEASE_S, new_job, success
from tests.waiting import wait_until

T = TypeVar("T")


def until_answered(act: Callable[[], T]) -> T:
    """Repeat a call while the server cannot be reached, as the engine does."""

    def attempt() -> list[T]:
        try:
            return [act()]
        except StoreUnavailable:
            return []

    return wait_until(attempt, timeout=60.0, message="a primary answers")[0]


def test_jobs_survive_the_loss_of_the_primary_each_ending_once(tmp_path: Path) -> None:
    replica_set = start_replica_set(tmp_path, members=3)
    database = connect(with_database(replica_set.uri, "relata"))
    jobs, killed = Jobs(database), threading.Event()
    try:
        until_answered(lambda: jobs.enqueue([new_job(f"{n}") for n in range(300)]))
        ended: list[str] = []
        published = 0

        def kill() -> None:
            replica_set.primary().kill()
            killed.set()

        killer = threading.Thread(target=kill)
        while len(ended) < 250:
            if len(ended) >= 50 and not killer.is_alive() and not killed.is_set():
                killer.start()
            taken = until_answered(partial(jobs.claim, ["default"], 5, "w1", LEASE_S))
            assert until_answered(partial(jobs.renew, [job.claim for job in taken], LEASE_S)) == []
            verdicts = until_answered(partial(jobs.settle, [success(job) for job in taken]))
            assert all(verdict.accepted for verdict in verdicts)
            ended += [job.claim.id for job in taken]
            until_answered(partial(jobs.enqueue, [new_job(f"new-{published}", queue="other")]))
            published += 1
        killer.join()
        assert killed.is_set()
        assert len(set(ended)) == len(ended)
        found = until_answered(lambda: jobs.find(states=[JobState.SUCCEEDED], limit=1000))
        assert {job.id for job in found} == set(ended)
        assert all(len(job.history) == 1 for job in found)
        assert until_answered(lambda: jobs.queue_size("other")) == published
    finally:
        database.close()
        replica_set.stop()
