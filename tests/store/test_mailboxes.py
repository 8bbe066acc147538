"""Mailboxes and bindings on a real server."""

from __future__ import annotations

import threading
from typing import Any

import pymongo.database
import pytest

from relata_celery.store.client import connect
from relata_celery.store.mailboxes import BINDINGS, MESSAGES, Binding, Mailboxes
from tests.waiting import wait_until

Raw = pymongo.database.Database[dict[str, Any]]


@pytest.fixture
def mailboxes(database_uri: str) -> Any:
    database = connect(database_uri)
    mailboxes = Mailboxes(database)
    mailboxes.ensure_indexes()
    yield mailboxes
    database.close()


def _numbers(taken: list[tuple[str, dict[str, Any]]]) -> list[int]:
    return [message["n"] for _queue, message in taken]


def test_messages_come_out_once_and_oldest_first(mailboxes: Mailboxes) -> None:
    for n in range(5):
        mailboxes.put(["a"], {"n": n, "headers": {"$x.y": b"\0"}}, 60)
    assert mailboxes.size("a") == 5
    assert _numbers(mailboxes.take(["a"], 1)) == [0]
    assert _numbers(mailboxes.take(["a"], 3)) == [1, 2, 3]
    [(queue, message)] = mailboxes.take(["a"], 10)
    assert (queue, message) == ("a", {"n": 4, "headers": {"$x.y": b"\0"}})
    assert mailboxes.take(["a"], 10) == []
    assert mailboxes.size("a") == 0


def test_one_put_reaches_each_queue_and_only_those(mailboxes: Mailboxes) -> None:
    mailboxes.put(["a", "b"], {"n": 1}, 60)
    mailboxes.put([], {"n": 2}, 60)
    assert mailboxes.take(["c"], 10) == []
    assert mailboxes.take([], 10) == []
    assert sorted(mailboxes.take(["a", "b", "c"], 10)) == [("a", {"n": 1}), ("b", {"n": 1})]


def test_expired_messages_are_skipped_and_removed_before_the_server_prunes_them(
    mailboxes: Mailboxes, database: Raw
) -> None:
    for n in range(5):
        mailboxes.put(["a"], {"n": n}, -1)
    mailboxes.put(["a"], {"n": 5}, 60)
    assert mailboxes.size("a") == 1
    assert _numbers(mailboxes.take(["a"], 2)) == [5]
    assert database[MESSAGES].count_documents({}) == 0


def test_two_readers_of_one_mailbox_get_each_message_once(mailboxes: Mailboxes) -> None:
    for _ in range(10):
        mailboxes.put(["a"] * 40, {"n": 0}, 60)
    barrier = threading.Barrier(4)
    counts = []

    def read() -> None:
        barrier.wait(10)
        while taken := mailboxes.take(["a"], 7):
            counts.append(len(taken))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert sum(counts) + len(mailboxes.take(["a"], 1000)) == 400


def test_a_mailbox_that_nobody_reads_keeps_its_newest_messages_only(database_uri: str) -> None:
    database = connect(database_uri)
    mailboxes = Mailboxes(database, cap=20)
    for n in range(200):
        mailboxes.put(["a"], {"n": n}, 60)
    assert 20 <= mailboxes.size("a") <= 22
    assert mailboxes.dropped == 200 - mailboxes.size("a")
    assert _numbers(mailboxes.take(["a"], 100))[-20:] == list(range(180, 200))
    database.close()


def test_a_late_reader_is_cut_back_to_the_newest_messages(database_uri: str) -> None:
    database = connect(database_uri)
    for n in range(50):
        Mailboxes(database).put(["a"], {"n": n}, 60)
    late = Mailboxes(database, cap=10)
    assert _numbers(late.take(["a"], 45)) == [40, 41, 42, 43, 44]
    assert _numbers(late.take(["a"], 45)) == [45, 46, 47, 48, 49]
    assert late.dropped == 40
    database.close()


def test_bindings_of_an_exchange(mailboxes: Mailboxes) -> None:
    mailboxes.bind("x", "$key.#", "^.*$", "a", True, 60)
    mailboxes.bind("x", "", None, "b", False, None)
    mailboxes.bind("y", "", None, "c", True, None)
    assert sorted(mailboxes.bindings("x"), key=lambda binding: binding.queue) == [
        Binding("$key.#", "^.*$", "a", True),
        Binding("", None, "b", False),
    ]
    assert mailboxes.is_mailbox("a")
    assert not mailboxes.is_mailbox("b")
    assert not mailboxes.is_mailbox("unknown")
    mailboxes.unbind_queue("a")
    assert [binding.queue for binding in mailboxes.bindings("x")] == ["b"]


def test_the_same_binding_again_is_one_binding(mailboxes: Mailboxes, database: Raw) -> None:
    for _ in range(2):
        mailboxes.bind("x", "k", None, "a", True, 60)
    assert database[BINDINGS].count_documents({}) == 1


def test_bindings_expire_by_the_servers_clock_and_live_on_when_touched(mailboxes: Mailboxes) -> None:
    mailboxes.bind("x", "k", None, "short", True, 0.3)
    mailboxes.bind("x", "k", None, "touched", True, 0.3)
    mailboxes.bind("x", "k", None, "for ever", True, None)
    mailboxes.touch(["touched", "for ever"], 60)
    wait_until(
        lambda: sorted(b.queue for b in mailboxes.bindings("x")) == ["for ever", "touched"],
        message="the short binding is gone",
    )
    mailboxes.touch(["for ever"], -1)
    assert "for ever" in [b.queue for b in mailboxes.bindings("x")]


def test_purge_counts_and_delete_queue_removes_all(mailboxes: Mailboxes, database: Raw) -> None:
    mailboxes.bind("x", "k", None, "a", True, None)
    mailboxes.put(["a", "a", "b"], {"n": 1}, 60)
    assert mailboxes.purge("a") == 2
    assert mailboxes.purge("a") == 0
    mailboxes.put(["a"], {"n": 1}, 60)
    mailboxes.delete_queue("a")
    assert mailboxes.bindings("x") == []
    assert [doc["queue"] for doc in database[MESSAGES].find()] == ["b"]


def test_indexes_can_be_asked_for_twice_and_serve_a_take(mailboxes: Mailboxes, database: Raw) -> None:
    mailboxes.ensure_indexes()
    mailboxes.put(["a", "b", "c"] * 50, {"n": 1}, 60)
    plan = (
        database[MESSAGES]
        .find({"queue": {"$in": ["a", "b"]}, "reader": None})
        .sort("_id", 1)
        .limit(10)
        .explain()
    )
    assert "SORT_MERGE" in str(plan["queryPlanner"]["winningPlan"])
    assert plan["executionStats"]["totalDocsExamined"] <= 12
    ttl = [index for index in database[MESSAGES].list_indexes() if "expireAfterSeconds" in index]
    assert [index["key"].to_dict() for index in ttl] == [{"expire_at": 1}]
