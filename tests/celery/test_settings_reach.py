"""The app's settings reach every store: of its workers, its clients, and its bare connections."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from pymongo.database import Database

from relata_celery import JobStore, bootstrap

Documents = Database[dict[str, Any]]


@pytest.fixture(params=["text", "list"])
def app(database_uri: str, request: pytest.FixtureRequest) -> Iterator[Celery]:
    url = f"relata+{database_uri}"
    broker = [url] if request.param == "list" else url
    made = Celery("settings", broker=broker, backend=url, set_as_current=False)
    made.conf.update(relata_max_attempts=2, relata_retention_failed=3600)
    yield made
    made.close()


def test_a_job_sent_by_name_has_the_apps_attempts(app: Celery, database: Documents) -> None:
    sent = app.send_task("elsewhere.work")
    document = database["relata_jobs"].find_one({"_id": sent.id})
    assert document is not None
    assert document["max_attempts"] == 2


def test_another_apps_settings_do_not_count(app: Celery, database: Documents, mongo_uri: str) -> None:
    with Celery("other", broker=f"relata+{mongo_uri}", set_as_current=True) as other:
        other.conf.update(relata_max_attempts=9)
        sent = app.send_task("elsewhere.work")
    document = database["relata_jobs"].find_one({"_id": sent.id})
    assert document is not None
    assert document["max_attempts"] == 2


@pytest.mark.parametrize("whose", ["worker", "client"])
def test_a_job_that_cannot_be_read_is_kept_as_long_as_the_app_says(
    app: Celery, database: Documents, whose: str
) -> None:
    sent = app.send_task("elsewhere.work")
    database["relata_jobs"].update_one({"_id": sent.id}, {"$set": {"message": "edited"}})
    jobs = bootstrap.stores_of(app).jobs if whose == "worker" else app.connection_for_read().transport.stores.jobs
    assert jobs.claim(["celery"], 1, "w", 5.0) == []
    document = database["relata_jobs"].find_one({"_id": sent.id})
    assert document is not None
    assert document["state"] == "failed"
    assert document["expire_at"] - document["finished_at"] == timedelta(hours=1)


def test_without_an_app_the_environment_counts(database_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELATA_MAX_ATTEMPTS", "7")
    assert bootstrap.settings_behind(database_uri).max_attempts == 7


def test_a_job_store_has_them_too(app: Celery, database: Documents) -> None:
    sent = app.send_task("elsewhere.work")
    store = JobStore.from_app(app)
    assert store.cancel(sent.id)[sent.id].changed
    document = database["relata_jobs"].find_one({"_id": sent.id})
    assert document is not None
    assert document["expire_at"] - document["finished_at"] == timedelta(hours=1)
