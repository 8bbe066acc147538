"""The outbox of a worker's event loop: what waits, what goes, and what it costs."""

from __future__ import annotations

from typing import Any

import pymongo
import pytest
from pymongo.database import Database

from relata_celery import bootstrap
from relata_celery.transport.outbox import Letter, Outbox
from tests.engine.test_engine import failing
from tests.waiting import wait_until


@pytest.fixture
def stores(database_uri: str) -> bootstrap.Stores:
    return bootstrap.open_stores(database_uri)


def letter(number: int, remembered: bool = False) -> Letter:
    message = {"body": str(number), "headers": {}, "properties": {"delivery_tag": str(number)}}
    return Letter("news", lambda table: {queue for _key, _pattern, queue in table}, message, 60.0, remembered)


def bodies(stores: bootstrap.Stores, queue: str) -> list[str]:
    return [message["body"] for _queue, message in stores.mailboxes.take([queue], 1000)]


def test_letters_wait_for_mongodb_in_order_and_the_oldest_go(
    stores: bootstrap.Stores, mongo_client: pymongo.MongoClient[Any]
) -> None:
    stores.mailboxes.bind("news", "", "", "reader", True, 60.0)
    outbox = Outbox(stores, capacity=50)
    with failing(mongo_client, ["find", "insert"]):
        for number in range(80):
            outbox.post(letter(number))
        assert not outbox.flush(0.2)
    assert outbox.flush(20)
    numbers = [int(body) for body in bodies(stores, "reader")]
    assert numbers == sorted(numbers)
    assert numbers[-50:] == list(range(30, 80))
    assert len(numbers) + outbox.dropped == 80
    outbox.stop()


def test_a_letter_that_mongodb_refuses_is_dropped_and_the_others_go(stores: bootstrap.Stores) -> None:
    stores.mailboxes.bind("news", "", "", "reader", True, 60.0)
    outbox = Outbox(stores)
    bad = Letter("news", letter(0).route, {"body": object(), "headers": {}, "properties": {}}, 60.0, False)
    for one in (letter(1), bad, letter(2)):
        outbox.post(one)
    assert outbox.flush(20)
    assert bodies(stores, "reader") == ["1", "2"]
    assert outbox.dropped == 1
    outbox.stop()


def test_what_is_bound_to_a_queue_of_jobs_becomes_a_job(stores: bootstrap.Stores) -> None:
    stores.mailboxes.bind("news", "", "", "audit", False, None)
    outbox = Outbox(stores)
    outbox.post(letter(1))
    assert outbox.flush(20)
    assert stores.jobs.queue_size("audit") == 1
    outbox.stop()


def test_heartbeats_that_nobody_hears_cost_one_read_and_no_write(
    stores: bootstrap.Stores, database: Database[dict[str, Any]]
) -> None:
    database.command({"profile": 2})
    outbox = Outbox(stores)
    for number in range(20):
        outbox.post(letter(number, remembered=True))
        assert outbox.flush(20)
    database.command({"profile": 0})
    done = list(database["system.profile"].find({"ns": {"$regex": "relata_(bindings|mailboxes)$"}}))
    assert [entry["op"] for entry in done] == ["query"]
    # A listener that came meanwhile hears what is looked up, at once.
    stores.mailboxes.bind("news", "", "", "reader", True, 60.0)
    outbox.post(letter(99))
    assert outbox.flush(20)
    wait_until(lambda: bodies(stores, "reader") == ["99"])
    outbox.stop()
