"""What a worker asks of MongoDB while it has nothing to do, counted by MongoDB's own profiler."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pymongo.database import Database

from tests.celery.behaviour import APP
from tests.mongo import open_streams
from tests.operations import counted
from tests.waiting import wait_until
from tests.workers import running_worker

#: As users have them, in the place of the short ones of the other tests.
DEFAULTS = {
    "RELATA_LEASE_DURATION": "60",
    "RELATA_HEARTBEAT_PERIOD": "20",
    "RELATA_POLL_INTERVAL": "1",
    "RELATA_REAP_PERIOD": "30",
}
IDLE_S = 20


def test_an_idle_worker_asks_for_less_than_two_operations_a_second(
    database_uri: str, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    with running_worker(APP, database_uri, tmp_path, "-c", "1", env=DEFAULTS):
        wait_until(
            lambda: len(open_streams(database.client, database.name)) == 2, timeout=60, message="both streams are open"
        )
        time.sleep(2)
        with counted(database) as operations:
            time.sleep(IDLE_S)
    assert 0 < operations.total() <= 2 * IDLE_S, operations.seen
