"""Wake-ups by change stream, on a real replica set and a real standalone."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pymongo
import pymongo.database
import pytest
from pymongo.monitoring import CommandListener

from relata_celery.store import watch as watch_module
from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs
from relata_celery.store.watch import Change, Watch
from tests.mongo import Mongod, open_streams, start_replica_set, with_database
from tests.store.builders import another_try, new_job
from tests.waiting import wait_until

Raw = pymongo.database.Database[dict[str, Any]]


class Heard:
    """What a watch reported, in order; of what may call for a look, the queue."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []
        self.changes: list[Change] = []

    def __call__(self, change: Change) -> None:
        self.changes.append(change)
        if not change.taken:
            self.names.append({change.queue} if change.queue else set())

    def clear(self) -> None:
        self.names.clear()
        self.changes.clear()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def watching(database_uri: str, heard: Heard) -> Iterator[Callable[..., Watch]]:
    """Start a watch on this test's database and return it when its stream is open."""
    database = connect(database_uri)
    started: list[Watch] = []

    def begin(kind: str, queues: set[str]) -> Watch:
        watch: Watch = getattr(Watch, kind)(database, lambda: queues, heard)
        started.append(watch)
        watch.start()
        wait_until(lambda: watch.healthy and heard.names == [set()], message="the stream is open")
        heard.clear()
        return watch

    yield begin
    for watch in started:
        watch.stop()
    database.close()


def _kill_streams(client: pymongo.MongoClient[Any], database_name: str) -> int:
    """Kill the cursors of change streams on this database, as an operator would; how many there were."""
    found = open_streams(client, database_name)
    for operation in found:
        collection = operation["ns"].partition(".")[2]
        client[database_name].command("killCursors", collection, cursors=[operation["cursor"]["cursorId"]])
    return len(found)


def test_an_insert_wakes_with_its_queue(watching: Any, database: Raw, heard: Heard) -> None:
    watching("jobs", {"default", "ai"})
    started = time.monotonic()
    database["relata_jobs"].insert_one({"queue": "ai", "state": "queued"})
    wait_until(lambda: heard.names == [{"ai"}], timeout=2, message="the insert is heard of")
    assert time.monotonic() - started < 1


def test_a_job_put_back_wakes_and_other_changes_do_not(watching: Any, database: Raw, heard: Heard) -> None:
    jobs = database["relata_jobs"]
    jobs.insert_one({"_id": 1, "queue": "default", "state": "running"})
    watching("jobs", {"default"})
    jobs.update_one({"_id": 1}, {"$set": {"progress": 1}})
    jobs.insert_one({"_id": 2, "queue": "elsewhere", "state": "queued"})
    database["relata_mailboxes"].insert_one({"queue": "default"})
    jobs.update_one({"_id": 1}, [{"$set": {"state": "queued"}}])
    wait_until(lambda: heard.names, timeout=2, message="the job put back is heard of")
    jobs.insert_one({"_id": 3, "queue": "default", "state": "queued"})
    wait_until(lambda: {"default"} in heard.names, timeout=2, message="the last insert is heard of")
    assert heard.names == [set(), {"default"}]


def test_a_message_wakes_its_mailbox(watching: Any, database: Raw, heard: Heard) -> None:
    watching("mailboxes", {"a"})
    database["relata_mailboxes"].insert_many([{"queue": "b"}, {"queue": "a"}])
    wait_until(lambda: heard.names == [{"a"}], timeout=2, message="the message is heard of")


def test_a_killed_cursor_is_opened_again_and_its_owner_looks_once(
    watching: Any, database: Raw, mongo_client: pymongo.MongoClient[Any], heard: Heard
) -> None:
    watch = watching("jobs", {"default"})
    assert _kill_streams(mongo_client, database.name) == 1
    wait_until(lambda: heard.names == [set()], timeout=15, message="the owner is told to look")
    wait_until(lambda: watch.healthy, message="the stream is open again")
    database["relata_jobs"].insert_one({"queue": "default"})
    wait_until(lambda: {"default"} in heard.names, timeout=2, message="inserts are heard of again")


def test_all_sessions_killed(
    watching: Any, database: Raw, mongo_client: pymongo.MongoClient[Any], heard: Heard
) -> None:
    watching("jobs", {"default"})
    mongo_client.admin.command("killAllSessions", [])
    wait_until(lambda: set() in heard.names, timeout=10, message="the owner is told to look")
    database["relata_jobs"].insert_one({"queue": "default"})
    wait_until(lambda: {"default"} in heard.names, timeout=10, message="inserts are heard of again")


def test_a_dropped_collection_ends_no_watch(watching: Any, database: Raw, heard: Heard) -> None:
    database["relata_jobs"].insert_one({"queue": "default"})
    watching("jobs", {"default"})
    database["relata_jobs"].drop()
    wait_until(lambda: set() in heard.names, timeout=10, message="the owner is told to look")
    database["relata_jobs"].insert_one({"queue": "default"})
    wait_until(lambda: {"default"} in heard.names, timeout=10, message="inserts are heard of again")


def test_a_new_queue_is_heard_of_after_a_while_and_at_once_after_refresh(
    watching: Any, database: Raw, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "AWAIT_S", 1.0)
    queues = {"a"}
    watch = watching("mailboxes", queues)
    queues.add("b")
    wait_until(lambda: set() in heard.names, message="the new queue was noticed by itself")
    monkeypatch.setattr(watch_module, "AWAIT_S", 600.0)
    queues.add("c")
    wait_until(lambda: "c" in watch._followed, message="the stream is opened anew, to wait for long")
    heard.clear()
    queues.add("d")
    watch.refresh()
    database["relata_mailboxes"].insert_one({"queue": "d"})
    wait_until(lambda: heard.names, message="the message in the new queue is heard of")
    wait_until(lambda: watch.healthy, message="the stream is open again")
    database["relata_mailboxes"].insert_one({"queue": "c"})
    wait_until(lambda: {"c"} in heard.names, message="the new queue is heard of")


def test_a_listener_that_fails_does_not_end_the_watch(
    database_uri: str, database: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    ours = connect(database_uri)
    calls = Counter[str]()

    def fail(change: Change) -> None:
        calls.update([change.queue or "look"])
        raise RuntimeError("boom")

    watch = Watch.jobs(ours, lambda: {"default"}, fail)
    watch.start()
    wait_until(lambda: calls["look"], message="the stream is open")
    database["relata_jobs"].insert_many([{"queue": "default"}, {"queue": "default"}])
    wait_until(lambda: calls["default"] == 2, message="both inserts are heard of")
    watch.stop()
    ours.close()
    assert "a listener to changes of relata_jobs failed" in caplog.text


def test_stop_returns_soon_however_often_and_whenever_it_is_called(
    database_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "AWAIT_S", 2.0)
    database = connect(database_uri)
    never = Watch.jobs(database, set, lambda change: None)
    never.stop()
    never.start()
    assert not never.healthy

    opened = threading.Event()
    watch = Watch.jobs(database, set, lambda change: opened.set())
    watch.start()
    watch.start()
    assert opened.wait(10)
    threads = [thread for thread in threading.enumerate() if thread.name == "relata-watch-relata_jobs"]
    assert len(threads) == 1
    started = time.monotonic()
    watch.stop()
    watch.stop()
    assert time.monotonic() - started < 1
    wait_until(lambda: not threads[0].is_alive(), timeout=3, message="the thread has ended")
    assert not watch.healthy
    database.close()


class _Commands(CommandListener):
    def __init__(self) -> None:
        self.names: list[str] = []

    def started(self, event: Any) -> None:
        self.names.append(event.command_name)

    def succeeded(self, event: Any) -> None:
        pass

    def failed(self, event: Any) -> None:
        pass


def test_an_idle_watch_costs_one_request_in_five_seconds(
    database_uri: str, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    assert watch_module.AWAIT_S >= 4
    monkeypatch.setattr(watch_module, "AWAIT_S", 0.5)
    database, commands = connect(database_uri), _Commands()
    counted = pymongo.MongoClient[dict[str, Any]](database_uri, event_listeners=[commands])
    monkeypatch.setattr(type(database), "client", counted)
    watch = Watch.jobs(database, set, heard)
    watch.start()
    wait_until(lambda: commands.names.count("getMore") == 3, message="three empty waits")
    assert set(commands.names) == {"aggregate", "getMore"}
    assert commands.names.count("aggregate") == 1
    watch.stop()
    counted.close()


def test_a_standalone_is_said_to_have_no_change_streams(
    standalone_uri: str, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relata_celery")
    database = connect(with_database(standalone_uri, "relata_test_watch"))
    watch = Watch.jobs(database, lambda: {"default"}, heard)
    assert watch.available
    watch.start()
    wait_until(lambda: not watch.available, message="the watch knows")
    assert not watch.healthy
    assert heard.names == []
    watch.stop()
    database.close()
    assert [record.levelname for record in caplog.records if "no change streams" in record.message] == [
        "INFO"
    ]


def test_a_server_that_comes_back_is_watched_again(tmp_path: Any, heard: Heard) -> None:
    replica_set = start_replica_set(tmp_path)
    server: Mongod = replica_set.members[0]
    database = connect(with_database(replica_set.uri, "relata_test"))
    watch = Watch.jobs(database, lambda: {"default"}, heard)
    try:
        watch.start()
        wait_until(lambda: watch.healthy, message="the stream is open")
        server.kill()
        wait_until(lambda: not watch.healthy, timeout=20, message="the loss is noticed")
        heard.clear()
        server.start()
        wait_until(lambda: watch.healthy, timeout=40, message="the stream is open again")
        assert heard.names[0] == set()
        database.client["relata_test"]["relata_jobs"].insert_one({"queue": "default"})
        wait_until(lambda: {"default"} in heard.names, message="inserts are heard of again")
    finally:
        watch.stop()
        database.close()
        replica_set.stop()


def test_a_job_is_told_with_its_time_and_that_it_was_taken(
    watching: Any, database_uri: str, heard: Heard
) -> None:
    jobs = Jobs(connect(database_uri))
    watching("jobs", {"default"})
    jobs.enqueue([new_job("a", queue="default"), new_job("b", queue="elsewhere")])
    jobs.claim(["default"], 1, "w1", 60.0)
    (taken,) = jobs.claim(["elsewhere"], 1, "w1", 60.0)
    jobs.renew([taken.claim], 60.0)
    jobs.settle([another_try(taken, delay_s=30.0)])
    wait_until(lambda: len(heard.changes) == 3, timeout=3, message="three changes are heard of")
    added, claimed, back = heard.changes
    assert (added.id, added.queue, added.taken) == ("a", "default", False)
    assert (claimed.id, claimed.taken) == ("a", True)
    assert (back.id, back.queue, back.taken) == ("b", None, False)
    job, other = jobs.get("a"), jobs.get("b")
    assert job is not None
    assert other is not None
    assert (added.run_at, back.run_at) == (job.run_at, other.run_at)
    jobs.database.close()


def test_a_watch_that_rests_has_no_stream_and_looks_once_when_it_goes_on(
    watching: Any, database: Raw, mongo_client: pymongo.MongoClient[Any], heard: Heard
) -> None:
    watch = watching("jobs", {"default"})
    watch.rest(True)
    wait_until(lambda: not watch.healthy, timeout=15, message="the stream is closed")
    wait_until(lambda: _kill_streams(mongo_client, database.name) == 0, message="the server has none")
    database["relata_jobs"].insert_one({"queue": "default"})
    heard.clear()
    watch.rest(False)
    wait_until(lambda: heard.names == [set()], timeout=5, message="its owner is told to look")
    database["relata_jobs"].insert_one({"queue": "default"})
    wait_until(lambda: {"default"} in heard.names, timeout=5, message="inserts are heard of again")
    watch.rest(True)
    watch.stop()
    watch.stop()
