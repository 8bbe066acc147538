"""``relata queues pause|resume`` and ``relata types pause|resume``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from relata_celery.store.client import Database, connect
from relata_celery.store.jobs import Jobs
from relata_celery.store.pauses import Pauses
from tests.commands import relata
from tests.store.builders import new_job


@pytest.fixture
def store(database_uri: str) -> Iterator[Database]:
    database = connect(database_uri)
    yield database
    database.close()


def test_queues_are_paused_shown_and_resumed(store: Database, database_uri: str) -> None:
    first = relata(database_uri, "queues", "pause", "ai", "mail")
    assert (first.code, first.out) == (0, "queue ai: paused\nqueue mail: paused\n")
    again = relata(database_uri, "queues", "pause", "ai", "--json")
    assert again.code == 0
    (row,) = again.json
    assert (row["queue"], row["changed"], row["paused"]) == ("ai", False, True)
    listed = {row["queue"]: row for row in relata(database_uri, "queues", "list", "--json").json}
    assert (listed["ai"]["paused"], listed["default"]["paused"]) == (True, False)
    assert listed["ai"]["paused_since"] == row["paused_since"]
    assert listed["default"]["paused_since"] is None
    assert re.search(r"(?m)^mail +0 +0 +- +since \d{4}-", relata(database_uri, "queues", "list").out)
    assert "paused queues: ai, mail" in relata(database_uri, "stats").out
    assert relata(database_uri, "stats", "--json").json["paused"] == {"queues": ["ai", "mail"], "types": []}
    done = relata(database_uri, "queues", "resume", "ai", "nobody")
    assert (done.code, done.out) == (0, "queue ai: resumed\nqueue nobody: was not paused\n")
    assert relata(database_uri, "queues", "resume", "ai").code == 1
    assert set(Pauses(store).paused().queues) == {"mail"}


def test_types_are_paused_shown_and_resumed(store: Database, database_uri: str) -> None:
    jobs = Jobs(store)
    jobs.enqueue([new_job("a", type="shop.bill")])
    assert relata(database_uri, "types", "pause", "shop.bill").out == "type shop.bill: paused\n"
    assert not jobs.claim(["default"], 1, "w1", 10)
    stats = relata(database_uri, "stats").out
    assert "paused types: shop.bill" in stats
    resumed = relata(database_uri, "types", "resume", "shop.bill", "--json").json
    assert resumed == [{"type": "shop.bill", "changed": True, "paused": False, "paused_since": None}]
    assert jobs.claim(["default"], 1, "w1", 10)


@pytest.mark.parametrize("noun", ["queues", "types"])
def test_what_can_be_no_name_is_status_2(database_uri: str, noun: str) -> None:
    assert "1 to 200 characters" in relata(database_uri, noun, "pause", "").refused(2)
    assert "Missing argument" in relata(database_uri, noun, "pause").refused(2)
