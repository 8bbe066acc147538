"""What a caller meets while MongoDB is away: an answer in time, and no job lost in silence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TimeoutError as CeleryTimeoutError
from kombu.exceptions import OperationalError

from relata_celery import bulk
from relata_celery.domain.errors import StoreUnavailable
from relata_celery.publishing import BulkNotWritten
from relata_celery.store.client import CALL_TIMEOUT_S
from tests.mongo import Mongod, start_standalone


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Mongod]:
    server = start_standalone(tmp_path)
    yield server
    server.resume() if server.running() else None
    server.kill()


@pytest.fixture
def app(server: Mongod) -> Iterator[Celery]:
    url = f"relata+mongodb://{server.address}/away?directConnection=true&serverSelectionTimeoutMS=300"
    made = Celery("away", broker=url, backend=url, task_cls="relata_celery:LeasedTask", set_as_current=False)
    made.task(name="work", shared=False)(work)
    yield made
    made.close()


def work() -> None:
    """A job."""


def written(server: Mongod) -> set[str]:
    with server.client() as client:
        return {document["_id"] for document in client["away"]["relata_jobs"].find({}, {"_id": 1})}


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_waiting_for_a_result_ends_at_its_timeout(app: Celery, server: Mongod, how: str) -> None:
    result: Any = app.tasks["work"].delay()
    server.kill() if how == "killed" else server.pause()
    began = monotonic()
    with pytest.raises(CeleryTimeoutError, match="MongoDB") as caught:
        result.get(timeout=1)
    assert monotonic() - began < CALL_TIMEOUT_S / 2
    assert isinstance(caught.value.__cause__, StoreUnavailable)


def test_waiting_goes_on_when_the_database_is_back_in_time(app: Celery, server: Mongod) -> None:
    result: Any = app.tasks["work"].delay()
    server.kill()
    looks = []

    def on_interval() -> None:
        looks.append(1)
        if len(looks) == 1:
            server.start()
            with server.client() as client:
                client["away"]["relata_jobs"].update_one({"_id": result.id}, {"$set": {"state": "succeeded"}})

    assert result.get(timeout=60, on_interval=on_interval) is None
    assert looks


def test_without_a_timeout_the_caller_is_told(app: Celery, server: Mongod) -> None:
    result: Any = app.tasks["work"].delay()
    server.kill()
    with pytest.raises(StoreUnavailable):
        result.get()


def test_a_batch_that_cannot_be_written_is_kept_for_the_end_of_the_block(app: Celery, server: Mongod) -> None:
    ids = [f"job-{n}" for n in range(5)]
    with bulk(batch=2):
        app.tasks["work"].apply_async(task_id=ids[0])
        server.kill()
        for job_id in ids[1:3]:
            app.tasks["work"].apply_async(task_id=job_id)
        with pytest.raises(OperationalError, match="4 jobs published in bulk.. are not written yet") as caught:
            app.tasks["work"].apply_async(task_id=ids[3])
        assert isinstance(caught.value, BulkNotWritten)
        assert caught.value.job_ids == tuple(ids[:4])
        server.start()
        app.tasks["work"].apply_async(task_id=ids[4])
    assert written(server) == set(ids)


def test_a_block_ended_by_an_error_keeps_the_batch_that_was_on_its_way(
    app: Celery, server: Mongod, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [f"job-{n}" for n in range(3)]
    with caplog.at_level(logging.WARNING, "relata_celery"), pytest.raises(ZeroDivisionError), bulk(batch=2):
        for job_id in ids:
            app.tasks["work"].apply_async(task_id=job_id)
        raise ZeroDivisionError
    assert "ended by ZeroDivisionError: 1 jobs" in caplog.text
    assert written(server) == set(ids[:2])


def test_the_end_of_a_block_names_what_is_not_written(app: Celery, server: Mongod) -> None:
    with pytest.raises(BulkNotWritten, match="3 jobs .* the block has ended") as caught, bulk():
        results = [app.tasks["work"].delay() for _ in range(3)]
        server.kill()
    assert caught.value.job_ids == tuple(result.id for result in results)
    server.start()
    assert written(server) == set()


def test_a_block_ended_by_an_error_says_how_many_jobs_it_drops(
    app: Celery, server: Mongod, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "relata_celery"), pytest.raises(ZeroDivisionError), bulk():
        for _ in range(3):
            app.tasks["work"].delay()
        raise ZeroDivisionError
    assert "ended by ZeroDivisionError: 3 jobs" in caplog.text
    assert written(server) == set()
