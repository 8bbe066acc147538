"""The servers that all other store tests rely on are what they claim to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pymongo
import pytest
from pymongo.database import Database

from tests.mongo import start_replica_set, with_database
from tests.waiting import wait_until


def test_each_test_gets_an_empty_database(database: Database[dict[str, Any]]) -> None:
    assert database.list_collection_names() == []
    database["things"].insert_one({"_id": 1})


def test_the_server_is_a_replica_set(mongo_client: pymongo.MongoClient[dict[str, Any]]) -> None:
    assert mongo_client.admin.command("hello")["setName"]


def test_the_standalone_is_no_replica_set(standalone_uri: str) -> None:
    with pymongo.MongoClient[dict[str, Any]](standalone_uri) as client:
        assert "setName" not in client.admin.command("hello")


def test_three_members_survive_the_loss_of_their_primary(tmp_path: Path) -> None:
    replica_set = start_replica_set(tmp_path, members=3)
    try:
        first = replica_set.primary()
        first.kill()
        assert replica_set.primary() is not first
        with pymongo.MongoClient[dict[str, Any]](replica_set.uri, w="majority") as client:
            client["any"]["thing"].insert_one({})
    finally:
        replica_set.stop()


def test_a_database_is_put_into_any_uri() -> None:
    assert with_database("mongodb://a,b/?replicaSet=r", "x") == "mongodb://a,b/x?replicaSet=r"
    assert with_database("mongodb://u:p@a/old", "x") == "mongodb://u:p@a/x?authSource=old"
    assert with_database("mongodb://a/old", "x") == "mongodb://a/x"
    assert with_database("mongodb://a", "x") == "mongodb://a/x"


def test_waiting_ends_at_its_deadline_with_its_message() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: it rains"):
        wait_until(lambda: False, timeout=0.05, message="it rains")
