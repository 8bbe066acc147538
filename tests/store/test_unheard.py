"""A claim that MongoDB granted while the network swallowed its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest

from relata_celery.domain.errors import StoreUnavailable
from relata_celery.domain.job import JobState, NewJob
from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs
from tests.chaos.proxy import Mode, Proxy
from tests.engine.bench import MESSAGE, Bench
from tests.store.builders import new_job
from tests.waiting import wait_until


@pytest.fixture
def proxy(database_uri: str) -> Iterator[Proxy]:
    proxy = Proxy(urlsplit(database_uri).port or 0)
    yield proxy
    proxy.close()


def through(proxy: Proxy, uri: str) -> str:
    return f"mongodb://127.0.0.1:{proxy.port}{urlsplit(uri).path}?directConnection=true"


def muting(proxy: Proxy) -> Callable[[Sequence[str]], Sequence[bool]]:
    """Lets all in, and has the network swallow what the server says from then on."""

    def admit(queues: Sequence[str]) -> Sequence[bool]:
        proxy.spoil(Mode.MUTE)
        return [True] * len(queues)

    return admit


def test_what_it_leased_is_told_once_and_nothing_that_it_did_not(
    database_uri: str, proxy: Proxy, jobs: Jobs
) -> None:
    jobs.enqueue([new_job("a"), new_job("b"), new_job("c", queue="other")])
    worker = Jobs(connect(through(proxy, database_uri)))
    with pytest.raises(StoreUnavailable):
        worker.claim(["default"], 10, "me", 60.0, muting(proxy))
    proxy.spoil(Mode.RESET)
    with pytest.raises(StoreUnavailable):  # and it is asked again
        worker.unheard()
    proxy.spoil(Mode.PASS)
    told = {job.claim.id: job for job in worker.unheard()}
    assert set(told) == {"a", "b"}
    assert {(job.claim.fence, job.claim.owner, job.attempt) for job in told.values()} == {(1, "me", 1)}
    assert worker.unheard() == []
    assert worker.renew([job.claim for job in told.values()], 60.0) == []


def test_a_claim_by_id_too(database_uri: str, proxy: Proxy, jobs: Jobs) -> None:
    jobs.enqueue([new_job("a")])
    worker = Jobs(connect(through(proxy, database_uri)))
    assert worker.next_due_in(["default"]) == 0.0  # connected
    proxy.spoil(Mode.MUTE)
    with pytest.raises(StoreUnavailable):
        worker.claim_by_id("a", ["default"], "me", 60.0)
    proxy.spoil(Mode.PASS)
    assert [(job.claim.id, job.claim.fence) for job in worker.unheard()] == [("a", 1)]


class _Muted(Bench):
    """Its first claim's answer is lost."""

    def __init__(self, uri: str, proxy: Proxy, **times: Any) -> None:
        super().__init__(through(proxy, uri), **times)
        self._claim, self._admit = self.jobs.claim, muting(proxy)
        self.jobs.claim = self._claim_unheard  # type: ignore[method-assign]

    def _claim_unheard(self, *args: Any) -> Any:
        try:
            return self._claim(*args[:4], self._admit, *args[5:])
        finally:
            self._admit = lambda queues: [True] * len(queues)


def test_an_engine_has_such_jobs_run_without_waiting_for_the_lease(
    database_uri: str, proxy: Proxy, jobs: Jobs
) -> None:
    jobs.enqueue([NewJob(id=name, type="t", queue="q", message=MESSAGE) for name in "ab"])
    bench = _Muted(database_uri, proxy, lease_s=600.0)
    try:
        bench.service.start()
        bench.service.claimer.consume("q")
        wait_until(lambda: proxy.mode is Mode.MUTE, 30)
        wait_until(lambda: {job.state for job in jobs.find()} == {JobState.RUNNING}, 30)
        assert bench.delivered == []
        proxy.spoil(Mode.RESET)
        proxy.spoil(Mode.PASS)
        wait_until(lambda: len(bench.delivered) == 2, 60, "both were claimed again")
        assert {(held.claim.fence, held.job.attempt) for held in bench.delivered} == {(2, 1)}
    finally:
        bench.service.stop(1.0)
