"""What knowing of pauses costs, counted; and what stays known while MongoDB does not answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pymongo
import pytest

from relata_celery.domain.errors import StoreUnavailable
from relata_celery.domain.pauses import Paused
from relata_celery.engine import pausing
from relata_celery.engine.pausing import Pausing
from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs
from relata_celery.store.pauses import Pauses
from tests.store.builders import new_job

UNAUTHORIZED, NOT_PRIMARY = 13, 10107


class Counting(Pauses):
    """The store, and how often it was asked."""

    reads = tidied = 0

    def paused(self) -> Paused:
        self.reads += 1
        return super().paused()

    def bring_back(self, queues: Collection[str], paused_types: Collection[str]) -> int:
        self.tidied += 1
        return super().bring_back(queues, paused_types)


@contextmanager
def refusing(client: pymongo.MongoClient[Any], code: int) -> Iterator[None]:
    """Have the server answer every find with this error."""
    data = {"failCommands": ["find"], "errorCode": code, "appName": "relata_celery"}
    client.admin.command({"configureFailPoint": "failCommand", "mode": "alwaysOn", "data": data})
    try:
        yield
    finally:
        client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


@pytest.fixture
def store(database_uri: str) -> Iterator[Counting]:
    database = connect(database_uri)
    yield Counting(database)
    database.close()


@pytest.fixture
def changes() -> list[int]:
    return []


@pytest.fixture
def part(store: Counting, changes: list[int]) -> Pausing:
    return Pausing(store, lambda: ["default"], lambda: changes.append(1), Random(1).random)


def test_while_changes_are_told_the_document_is_read_once_and_again_when_told(part: Pausing, store: Counting) -> None:
    part.heard = lambda: True
    for _ in range(15):
        part.step()
    assert store.reads == 1
    part.wake()
    part.step()
    assert store.reads == 2


def test_while_nobody_tells_it_is_read_at_every_step(part: Pausing, store: Counting) -> None:
    assert [part.step() for _ in range(3)] == [pausing.PERIOD_S] * 3
    assert store.reads == 3
    assert pausing.PERIOD_S < 1


def test_only_a_change_of_what_may_be_claimed_is_reported(part: Pausing, store: Counting, changes: list[int]) -> None:
    def steps() -> int:
        before = len(changes)
        part.step()
        part.step()
        return len(changes) - before

    assert steps() == 1, "the first answer"
    store.pause("queues", ["q"])
    assert steps() == 1
    store.pause("queues", ["q"])
    assert steps() == 0
    store.resume("queues", ["q"])
    assert steps() == 1


def test_while_mongodb_does_not_answer_nothing_is_known_and_what_was_stays(
    part: Pausing, store: Counting, mongo_client: pymongo.MongoClient[Any]
) -> None:
    store.pause("types", ["t"])
    for known in (set(), {"t"}):
        with refusing(mongo_client, NOT_PRIMARY), pytest.raises(StoreUnavailable):
            part.step()
        assert set(part.known.types if part.known else ()) == known
        part.step()
    with refusing(mongo_client, UNAUTHORIZED):
        part.step()
    assert part.known is not None
    assert set(part.known.types) == {"t"}


def test_one_who_may_not_read_the_document_goes_on_without(
    part: Pausing, mongo_client: pymongo.MongoClient[Any]
) -> None:
    with refusing(mongo_client, UNAUTHORIZED):
        part.step()
    assert part.known == Paused()


def test_the_shelf_is_tidied_after_a_change_and_not_again(
    part: Pausing, store: Counting, changes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pausing, "TIDY_AFTER_S", 0.0)
    jobs = Jobs(store.database)
    jobs.enqueue([new_job("a", type="t")])
    assert not jobs.claim(["default"], 1, "late", 10, paused_types=["t"])
    for _ in range(4):
        part.step()
    assert store.tidied == 2, "until nothing was left"
    assert len(changes) == 2, "the first answer, and what came off the shelf"
    assert jobs.claim(["default"], 1, "w1", 10)
