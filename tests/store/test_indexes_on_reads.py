"""Looking builds nothing: a reader needs no right to build indexes, and starts no build."""

from __future__ import annotations

from typing import Any

from pymongo.database import Database

from relata_celery.store.client import connect
from relata_celery.store.jobs import Jobs


def test_reads_leave_the_database_as_it_was(database_uri: str, database: Database[dict[str, Any]]) -> None:
    jobs = Jobs(connect(database_uri))
    assert jobs.get("none") is None
    assert jobs.find() == []
    assert jobs.count() == 0
    assert jobs.queue_size("q") == 0
    assert "relata_jobs" not in database.list_collection_names()
