"""The transport under plain kombu, and under a worker without an event loop."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import kombu
import pytest
from celery import Celery

from relata_celery import LeasedTask
from relata_celery.domain.errors import InvalidJob
from relata_celery.domain.job import JobState, NewJob
from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs
from tests.waiting import wait_until
from tests.workers import QUICK, ROOT


@pytest.fixture
def connection(database_uri: str) -> Any:
    with kombu.Connection(f"relata+{database_uri}") as connection:
        yield connection


def test_a_simple_queue_gives_back_what_was_put_and_removes_it_when_acknowledged(
    connection: Any, database_uri: str
) -> None:
    simple = connection.SimpleQueue("letters")
    simple.put({"a": 1})
    simple.put("two")
    assert simple.qsize() == 2
    first = simple.get(timeout=10)
    assert first.payload == {"a": 1}
    assert Jobs(connect(database_uri)).count() == 2  # leased, not gone
    first.ack()
    second = simple.get(timeout=10)
    assert second.payload == "two"
    second.ack()
    wait_until(lambda: Jobs(connect(database_uri)).count() == 0, message="both are removed")
    with pytest.raises(queue.Empty):
        simple.get(timeout=0.5)
    simple.close()


def test_whoever_waits_and_whoever_delivers_first_use_one_wakeup(connection: Any) -> None:
    transport, together = connection.transport, threading.Barrier(8)
    seen: list[Any] = []

    def use() -> None:
        together.wait()
        seen.append(transport.wakeup)

    for _ in range(200):
        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made, seen[:] = {id(wakeup): wakeup for wakeup in seen}, []
        for wakeup in made.values():
            wakeup.close()
        transport._wakeup = None
        assert len(made) == 1


def test_a_message_that_its_consumer_rejects_for_redelivery_comes_again(connection: Any) -> None:
    simple = connection.SimpleQueue("letters")
    simple.put("again")
    message = simple.get(timeout=10)
    message.requeue()
    message = simple.get(timeout=10)
    assert (message.payload, message.delivery_info["redelivered"]) == ("again", True)
    message.ack()
    simple.close()


def test_basic_get_and_purge(connection: Any) -> None:
    channel = connection.default_channel
    producer = kombu.Producer(channel)
    letters = kombu.Queue("letters", kombu.Exchange("letters", type="direct"), routing_key="letters")
    for number in range(3):
        producer.publish({"n": number}, exchange=letters.exchange, routing_key="letters", declare=[letters])
    message = letters(channel).get()
    assert message.payload == {"n": 0}
    message.ack()
    assert letters(channel).purge() == 2
    assert letters(channel).get() is None


def test_basic_get_hands_out_no_expired_job(connection: Any, database_uri: str) -> None:
    jobs = Jobs(connect(database_uri))
    message = {"body": '"late"', "content-type": "application/json", "content-encoding": "utf-8", "headers": {}}
    past = datetime.now(timezone.utc) - timedelta(hours=1)
    for job_id, expires_at in (("late", past), ("good", None)):
        stored = {**message, "properties": {"delivery_tag": job_id}}
        jobs.enqueue([NewJob(id=job_id, type="t", queue="letters", message=stored, expires_at=expires_at)])
    got = connection.default_channel.basic_get("letters")
    assert got is not None
    assert got.held.claim.id == "good"
    wait_until(lambda: jobs.count(states=[JobState.CANCELLED]) == 1, message="the expired one is cancelled")
    got.ack()


def test_basic_get_keeps_to_the_limit_of_the_ai_queue(connection: Any) -> None:
    producer, ai = kombu.Producer(connection.default_channel), kombu.Queue("ai", kombu.Exchange("ai"), routing_key="ai")
    for number in range(2):
        producer.publish(number, exchange=ai.exchange, routing_key="ai", declare=[ai])
    first = ai(connection.default_channel).get()
    assert first.payload == 0
    assert ai(connection.default_channel).get() is None  # one at once, by default
    first.ack()
    second = wait_until(lambda: ai(connection.default_channel).get(), message="its slot is free again")
    assert second.payload == 1
    second.ack()


@pytest.mark.parametrize(
    "options", [{"task_id": 5}, {"headers": {"id": None}}, {"headers": {"id": ""}}, {"headers": {"id": ["a"]}}]
)
@pytest.mark.parametrize("leased", [True, False])
def test_an_id_that_is_no_text_is_refused_at_the_caller(leased: bool, options: Any, database_uri: str) -> None:
    app = Celery("ids", broker=f"relata+{database_uri}", set_as_current=False)

    def add() -> None:
        """Never run."""

    task = app.task(name="ids.add", shared=False, **({"base": LeasedTask} if leased else {}))(add)
    with pytest.raises(InvalidJob, match=r'job type "ids.add": its id \(task_id\) must be text'):
        task.apply_async(**options)
    assert Jobs(connect(database_uri)).count() == 0
    app.close()


def test_a_broadcast_reaches_each_listener_that_was_declared_before_it(connection: Any, database_uri: str) -> None:
    news = kombu.Exchange("news", type="fanout")
    heard: dict[str, list[Any]] = {"one": [], "two": []}

    def listener(name: str) -> Any:
        return kombu.Consumer(
            connection.channel(),
            [kombu.Queue(name, news, auto_delete=True)],
            callbacks=[lambda body, message: heard[name].append(body)],
            no_ack=True,
        )

    with kombu.Connection(f"relata+{database_uri}") as other, listener("one"), listener("two"):
        kombu.Producer(other.default_channel).publish("hello", exchange=news, declare=[news])
        while not all(heard.values()):
            connection.drain_events(timeout=10)
    assert heard == {"one": ["hello"], "two": ["hello"]}


def test_priorities_out_of_range_are_refused_at_the_caller(connection: Any) -> None:
    producer = kombu.Producer(connection.default_channel)
    with pytest.raises(InvalidJob, match="priority"):
        producer.publish("x", routing_key="letters", priority=50)


def test_the_uri_is_shown_without_its_password() -> None:
    shown = kombu.Connection("relata+mongodb://u:p%40ss@h1,h2:27018/db?replicaSet=rs0").as_uri()
    assert "p%40ss" not in shown
    assert shown.startswith("relata+mongodb://u:")
    assert "h1,h2:27018/db?replicaSet=rs0" in shown


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_worker_without_an_event_loop_runs_jobs_and_answers(
    pool: str, database_uri: str, tmp_path: Path
) -> None:
    environment = {**os.environ, **QUICK, "RELATA_TEST_URI": database_uri, "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.celery.sync_worker", pool],
            stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
    try:
        assert process.wait(60) == 0, log.read_text()
        shown = log.read_text()
        assert "loop: synloop" in shown
        assert "results: [1, 2, 3, 4, 5, 6, 7, 8]" in shown
        assert "later: 30" in shown
        assert "pong" in shown
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
