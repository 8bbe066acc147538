"""Pauses with real workers: nobody begins what is paused, what runs goes on, and a restart forgets nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from celery import Celery
from celery.result import AsyncResult

from relata_celery import JobStore
from relata_celery.domain.job import JobState
from tests.celery.apps_limits import make_app
from tests.waiting import wait_until
from tests.workers import Worker, running_worker

APP = "tests.celery.apps_limits"
PATIENCE_S = 60

StartWorker = Callable[..., Worker]


@pytest.fixture(params=["replica set", "standalone"])
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    """An app on a database of its own: with change streams, and without."""
    if request.param == "replica set":
        uri = request.getfixturevalue("database_uri")
    else:
        from tests.mongo import with_database

        uri = with_database(request.getfixturevalue("standalone_uri"), f"relata_pause_{request.node.name[:20]}")
    app = make_app(uri)
    yield app
    store = JobStore.from_app(app)
    if request.param == "standalone":
        store.jobs.database.client.drop_database(store.jobs.database.name)
    app.close()


@pytest.fixture
def store(app: Celery) -> JobStore:
    return JobStore.from_app(app)


@pytest.fixture
def worker(store: JobStore, tmp_path: Path) -> Iterator[StartWorker]:
    with ExitStack() as stack:

        def start(*arguments: str, name: str = "w1") -> Worker:
            env = {"RELATA_TEST_FOLDER": str(tmp_path), "RELATA_POLL_INTERVAL": "1"}
            uri = store.jobs.database.uri
            return stack.enter_context(
                running_worker(APP, uri, tmp_path, "-c", "2", *arguments, env=env, name=name)
            )

        yield start


def send(app: Celery, name: str, queue: str = "default", *args: float) -> AsyncResult:
    return app.tasks[name].apply_async(args, queue=queue)


def wait_state(store: JobStore, result: AsyncResult, state: JobState, worker: Worker) -> None:
    wait_until(
        lambda: (job := store.get(result.id)) is not None and job.state is state,
        timeout=PATIENCE_S,
        message=f"{result.id} is {state}\n{worker.log[-2000:]}",
    )


def knows(worker: Worker, line: str) -> None:
    wait_until(lambda: line in worker.log, timeout=PATIENCE_S, message=f"the worker knows: {line}")


def state(store: JobStore, result: AsyncResult) -> JobState:
    job = store.get(result.id)
    assert job is not None
    return job.state


def test_a_paused_queue_waits_while_others_and_what_runs_go_on(
    app: Celery, store: JobStore, worker: StartWorker
) -> None:
    one = worker("-Q", "default,other")
    running = send(app, "plain", "default", 3.0)
    wait_state(store, running, JobState.RUNNING, one)
    assert store.pause_queue("default") == {"default": True}
    knows(one, "paused queues: default; paused types: none")
    waiting = send(app, "plain")
    others = [send(app, "plain", "other") for _ in range(3)]
    for result in (*others, running):
        wait_state(store, result, JobState.SUCCEEDED, one)
    assert state(store, waiting) is JobState.QUEUED
    assert set(store.paused().queues) == set(store.stats().paused.queues) == {"default"}
    store.resume_queue("default")
    wait_state(store, waiting, JobState.SUCCEEDED, one)


def test_a_worker_that_starts_later_obeys_a_pause(app: Celery, store: JobStore, worker: StartWorker) -> None:
    store.pause_queue(["default"])
    store.pause_type("with_slot")
    waiting = send(app, "plain"), send(app, "with_slot", "other", 0.0)
    one = worker("-Q", "default,other")
    marker = send(app, "plain", "other")
    wait_state(store, marker, JobState.SUCCEEDED, one)
    assert [state(store, result) for result in waiting] == [JobState.QUEUED] * 2
    store.resume_queue("default")
    store.resume_type("with_slot")
    for result in waiting:
        wait_state(store, result, JobState.SUCCEEDED, one)


def test_a_paused_type_waits_while_others_behind_it_in_its_queue_are_done(
    app: Celery, store: JobStore, worker: StartWorker
) -> None:
    one = worker("-Q", "default")
    assert store.pause_type("with_slot") == {"with_slot": True}
    knows(one, "paused queues: none; paused types: with_slot")
    waiting = [send(app, "with_slot", "default", 0.0) for _ in range(5)]
    others = [send(app, "plain") for _ in range(5)]
    for result in others:
        wait_state(store, result, JobState.SUCCEEDED, one)
    assert [state(store, result) for result in waiting] == [JobState.QUEUED] * 5
    store.resume_type("with_slot")
    for result in waiting:
        wait_state(store, result, JobState.SUCCEEDED, one)


@pytest.mark.parametrize("app", ["replica set"], indirect=True)
def test_a_job_shelved_by_a_worker_that_had_not_heard_of_the_resume_is_done_all_the_same(
    app: Celery, store: JobStore, worker: StartWorker
) -> None:
    forgotten = send(app, "plain")
    store.jobs.claim(["default"], 1, "late", 1.0, paused_types=["plain"])
    one = worker("-Q", "default")
    wait_state(store, forgotten, JobState.SUCCEEDED, one)


@pytest.mark.parametrize("app", ["replica set"], indirect=True)
def test_a_plain_consumer_obeys_a_pause_too(app: Celery, store: JobStore) -> None:
    store.pause_queue("default")
    send(app, "plain")
    with app.connection_for_read() as connection:
        simple = connection.channel()
        assert simple.basic_get("default") is None
        store.resume_queue("default")
        wait_until(lambda: simple.basic_get("default"), timeout=PATIENCE_S, message="the job is got")
