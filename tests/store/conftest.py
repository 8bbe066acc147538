"""The store under test: a real database of each test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relata_celery.store.client import Database, connect
from relata_celery.store.jobs import Jobs


@pytest.fixture
def store(database_uri: str) -> Iterator[Database]:
    """This test's database, through the package's own client."""
    database = connect(database_uri)
    yield database
    database.close()


@pytest.fixture
def jobs(store: Database) -> Jobs:
    """The queue, keeping failed jobs for an hour."""
    return Jobs(store, retention_failed_s=3600.0)
