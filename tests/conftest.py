"""One MongoDB server per test run, one database per test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pymongo
import pytest
from pymongo.database import Database

from tests.mongo import NoMongod, start_replica_set, start_standalone, with_database


def _no_server(reason: object) -> None:
    """Skip at a desk; in CI a missing server is a failure, or nothing would ever be tested."""
    message = f"no MongoDB for tests: {reason}"
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="session")
def mongo_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of a running one-member replica set (or RELATA_TEST_MONGODB_URI), without a database."""
    given = os.environ.get("RELATA_TEST_MONGODB_URI")
    if given:
        yield given
        return
    try:
        replica_set = start_replica_set(tmp_path_factory.mktemp("replica_set"))
    except NoMongod as missing:
        _no_server(missing)
        return
    yield replica_set.uri
    replica_set.stop()


@pytest.fixture(scope="session")
def standalone_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of a running server that is no member of a replica set."""
    try:
        server = start_standalone(tmp_path_factory.mktemp("standalone"))
    except NoMongod as missing:
        _no_server(missing)
        return
    yield server.direct_uri
    server.kill()


@pytest.fixture(scope="session")
def mongo_client(mongo_uri: str) -> Iterator[pymongo.MongoClient[dict[str, Any]]]:
    """A client of the server behind ``mongo_uri``, with aware UTC times."""
    with pymongo.MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        yield client


@pytest.fixture
def database_uri(mongo_uri: str, mongo_client: pymongo.MongoClient[dict[str, Any]]) -> Iterator[str]:
    """``mongo_uri`` with a database of this test's own in its path; dropped afterwards."""
    name = f"relata_test_{secrets.token_hex(6)}"
    yield with_database(mongo_uri, name)
    mongo_client.drop_database(name)


@pytest.fixture
def database(
    database_uri: str, mongo_client: pymongo.MongoClient[dict[str, Any]]
) -> Database[dict[str, Any]]:
    """The database that ``database_uri`` names, through a client that lives as long as the test run."""
    return mongo_client[database_uri.partition("?")[0].rsplit("/", 1)[1]]
