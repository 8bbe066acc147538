"""The limits of the fleet, with real workers: never too many at once, nothing lost, nobody held up."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult
from pymongo.database import Database

from relata_celery import LimitTimeout, acquire_ai
from relata_celery.store.client import connect
from relata_celery.store.limits import Limits
from tests.celery.apps_limits import make_app
from tests.waiting import wait_until
from tests.workers import Worker, running_worker

APP = "tests.celery.apps_limits"
PATIENCE_S = 90

StartWorker = Callable[..., Worker]


@pytest.fixture
def app(database_uri: str) -> Iterator[Celery]:
    app = make_app(database_uri)
    yield app
    app.close()


@pytest.fixture
def limits(database_uri: str) -> Iterator[Limits]:
    database = connect(database_uri)
    yield Limits(database)
    database.close()


@pytest.fixture
def worker(database_uri: str, tmp_path: Path) -> Iterator[StartWorker]:
    with ExitStack() as stack:

        def start(*arguments: str, name: str = "w1", **settings: str) -> Worker:
            env = {"RELATA_TEST_FOLDER": str(tmp_path), "RELATA_AI_CONCURRENCY": "2", **settings}
            given = arguments or ("-c", "4")
            return stack.enter_context(running_worker(APP, database_uri, tmp_path, *given, env=env, name=name))

        yield start


def send(app: Celery, name: str, number: int, *args: Any) -> list[AsyncResult]:
    return [app.tasks[name].delay(*args) for _ in range(number)]


def documents(database: Database[dict[str, Any]], results: list[AsyncResult]) -> list[dict[str, Any]]:
    return list(database["relata_jobs"].find({"_id": {"$in": [result.id for result in results]}}))


def wait_done(database: Database[dict[str, Any]], results: list[AsyncResult], timeout: float = PATIENCE_S) -> None:
    def ended() -> bool:
        return all(found["state"] == "succeeded" for found in documents(database, results))

    wait_until(ended, timeout=timeout, message="all jobs succeed")


def notes(folder: Path, *groups: str) -> list[tuple[float, str]]:
    """Beginnings and ends of the work of these groups, in order of time."""
    lines = [line.split() for file in folder.glob("*.notes") for line in file.read_text().splitlines()]
    return sorted((float(at), what) for what, group, _job, at in lines if group in groups)


def most_at_once(moments: list[tuple[float, str]]) -> int:
    running = most = 0
    for _at, what in moments:
        running += 1 if what == "begin" else -1
        most = max(most, running)
    return most


def test_no_more_ai_jobs_run_at_once_than_the_fleet_may_and_other_queues_go_on(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], tmp_path: Path, limits: Limits
) -> None:
    worker(name="w1")
    worker(name="w2")
    ai_jobs = send(app, "ask_model", 30, 0.2)
    plain_jobs = send(app, "plain", 20)
    wait_done(database, plain_jobs)
    assert any(found["state"] != "succeeded" for found in documents(database, ai_jobs)), "it was held up"
    wait_done(database, ai_jobs)
    moments = notes(tmp_path, "ai")
    assert len(moments) == 60
    assert most_at_once(moments) == 2
    assert {(found["attempts"], found.get("snoozes", 0)) for found in documents(database, ai_jobs)} == {(1, 0)}
    wait_until(lambda: _in_use(limits) == 0, message="all slots are given back")
    # Thirty jobs of 0.2 s two at a time: three seconds, and not much is lost between them.
    assert moments[-1][0] - moments[0][0] < 10


def test_slots_of_a_killed_worker_come_back_with_its_lease(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], tmp_path: Path, limits: Limits
) -> None:
    victim = worker(name="victim")
    running = send(app, "ask_model_long_once", 2, 600.0)
    wait_until(lambda: len(notes(tmp_path, "ai")) == 2, message="both jobs run")
    assert _in_use(limits) == 2
    worker(name="w2")
    victim.kill_group()
    following = send(app, "ask_model", 4, 0.1)
    wait_done(database, following + running, timeout=90)
    wait_until(lambda: _in_use(limits) == 0, message="all slots are given back")


def test_a_worker_that_stops_gives_its_slots_back(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], tmp_path: Path, limits: Limits
) -> None:
    stopped = worker(RELATA_LEASE_DURATION="60", RELATA_HEARTBEAT_PERIOD="10", RELATA_DRAIN_TIMEOUT="0.5")
    send(app, "ask_model", 2, 600.0)
    wait_until(lambda: len(notes(tmp_path, "ai")) == 2, message="both jobs run")
    stopped.terminate()
    assert _in_use(limits) == 0


def test_a_cancelled_ai_job_keeps_its_slot_until_its_code_has_ended(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], tmp_path: Path, limits: Limits
) -> None:
    worker(RELATA_AI_CONCURRENCY="1")
    (running,) = send(app, "ask_model", 1, 600.0)
    wait_until(lambda: len(notes(tmp_path, "ai")) == 1, message="it runs")
    following = send(app, "ask_model", 1, 0.0)
    database["relata_jobs"].update_one({"_id": running.id}, {"$set": {"cancel_requested": True}})
    wait_done(database, following)


@pytest.mark.parametrize("pool", [("-c", "4"), ("-P", "threads", "-c", "4")], ids=["prefork", "threads"])
def test_acquire_ai_bounds_jobs_of_any_queue(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], tmp_path: Path, limits: Limits, pool: Any
) -> None:
    worker(*pool)
    results = send(app, "with_slot", 10, 0.1)
    ai_jobs = send(app, "ask_model", 5, 0.1)
    wait_done(database, results + ai_jobs)
    moments = notes(tmp_path, "slot", "ai")
    assert len(moments) == 30
    assert most_at_once(moments) == 2
    wait_until(lambda: _in_use(limits) == 0, message="all slots are given back")


@pytest.mark.parametrize("pool", [("-c", "2"), ("-P", "solo")], ids=["prefork", "solo"])
def test_acquire_ai_inside_an_admitted_job_uses_the_slot_that_the_job_has(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], tmp_path: Path, pool: Any
) -> None:
    worker(*pool, RELATA_AI_CONCURRENCY="1")
    wait_done(database, send(app, "nested", 5))
    assert most_at_once(notes(tmp_path, "nested")) == 1


def test_a_job_that_waited_in_vain_is_put_back_and_no_attempt_is_spent(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], limits: Limits
) -> None:
    limits.set("ai", 0)
    worker()
    (waiting,) = send(app, "impatient", 1, 0.2)

    def put_back() -> dict[str, Any] | None:
        (found,) = documents(database, [waiting])
        return found if found.get("snoozes") else None

    found = wait_until(put_back, timeout=PATIENCE_S, message="it is put back")
    assert found["attempts"] <= 1
    assert "limit 'ai'" in found["history"][0]["error"]
    limits.set("ai", 1)
    database["relata_jobs"].update_one({"_id": waiting.id}, [{"$set": {"run_at": "$$NOW"}}])
    wait_done(database, [waiting])


def test_a_slot_that_a_handler_forgets_ends_with_its_job(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], limits: Limits
) -> None:
    worker("-P", "threads", "-c", "1", RELATA_LEASE_DURATION="60", RELATA_HEARTBEAT_PERIOD="10")
    wait_done(database, send(app, "forgetful", 3))
    assert _in_use(limits) == 0


def test_the_slot_of_a_killed_pool_process_comes_back_with_its_lease(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], tmp_path: Path, limits: Limits
) -> None:
    serving = worker("-c", "2", RELATA_AI_CONCURRENCY="1")
    (running,) = send(app, "with_slot", 1, 600.0)
    wait_until(lambda: len(notes(tmp_path, "slot")) == 1, message="it runs")
    (pid,) = [int(file.stem) for file in tmp_path.glob("*.notes")]
    assert pid in serving.children()
    os.kill(pid, signal.SIGKILL)
    app.control.revoke(running.id)
    wait_done(database, send(app, "with_slot", 1, 0.0), timeout=90)


def test_the_rate_holds_for_the_whole_fleet(
    app: Celery, worker: StartWorker, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"RELATA_AI_CONCURRENCY": "10", "RELATA_AI_RATE": "5/s"}
    worker("-c", "2", name="w1", **settings)
    worker("-c", "2", name="w2", **settings)
    wait_done(database, send(app, "ask_model", 20, 0.0))
    begun = [at for at, what in notes(tmp_path, "ai") if what == "begin"]
    assert len(begun) == 20
    # Five at once from the full bucket, then five a second: the twentieth not before three seconds.
    assert begun[-1] - begun[0] > 2.7


# ---------------------------------------------------------------- without a worker


def test_acquire_ai_works_outside_of_jobs(app: Celery, limits: Limits) -> None:
    with acquire_ai(app=app) as slot:
        assert slot.held
        assert _in_use(limits) == 1
        with pytest.raises(LimitTimeout):
            acquire_ai(app=app, timeout=0)
        assert acquire_ai("openai", app=app, timeout=0).held, "another name has slots of its own"
        slot.release()
        assert _in_use(limits) == 0
        slot.release()
    assert not slot.held


def test_a_slot_is_renewed_while_it_is_held(app: Celery, limits: Limits) -> None:
    app.conf.relata_lease_duration = 1.0

    def until() -> Any:
        found = limits.get("ai")
        assert found is not None
        assert found.in_use == 1
        return found.slots[0].until

    with acquire_ai(app=app):
        first = until()
        wait_until(lambda: (until() - first).total_seconds() > 1.5, message="it outlives its first lease")
    assert _in_use(limits) == 0


def test_a_slot_that_its_holder_forgot_is_given_back(app: Celery, limits: Limits) -> None:
    slot = acquire_ai(app=app)
    assert _in_use(limits) == 1
    del slot
    wait_until(lambda: _in_use(limits) == 0)


def test_a_job_applied_without_a_worker_takes_one_slot_however_deep(app: Celery, limits: Limits) -> None:
    def inner() -> int:
        with acquire_ai(timeout=0, app=app), acquire_ai(timeout=0, app=app):
            return _in_use(limits)

    assert app.task(name="inner")(inner).apply().get() == 1
    assert _in_use(limits) == 0


@pytest.mark.parametrize("wrong", [{"timeout": -1}, {"tokens": -1}, {"tokens": 1.5}, {"name": ""}, {"name": 5}])
def test_wrong_arguments_are_refused(app: Celery, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        acquire_ai(app=app, **wrong)


def _in_use(limits: Limits) -> int:
    found = limits.get("ai")
    return 0 if found is None else found.in_use
