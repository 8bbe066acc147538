"""One worker per pool for the behavioural tests, and what a test asks of it.

A worker is started when the first test wants it and lives as long as the test run, on a database of
its own: starting is paid once per pool.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname
from typing import Any

import pymongo
import pytest
from celery import Celery
from celery.result import AsyncResult

from tests.celery import apps_behaviour
from tests.mongo import with_database
from tests.waiting import wait_until
from tests.workers import Worker, running_worker

APP = "tests.celery.apps_behaviour"
QUEUES = "celery,ai,letters"

POOLS = {
    "prefork": ("-c", "2"),
    "threads": ("-P", "threads", "-c", "2"),
    "solo": ("-P", "solo"),
}

#: Generous: a busy machine is no failure.
PATIENCE_S = 60.0


class Site:
    """A database, an app that sends to it, and the worker that serves it."""

    def __init__(self, pool: str, uri: str, client: pymongo.MongoClient[dict[str, Any]], folder: Path) -> None:
        self.pool = pool
        self.uri = uri
        self.folder = folder
        self.journal_path = folder / "journal"
        self.journal_path.touch()
        self.database = client[uri.partition("?")[0].rsplit("/", 1)[1]]
        self.jobs = self.database["relata_jobs"]
        self.app: Celery = apps_behaviour.make_app(uri)
        self.worker: Worker

    @property
    def environment(self) -> dict[str, str]:
        return {"RELATA_TEST_JOURNAL": str(self.journal_path)}

    @property
    def worker_name(self) -> str:
        return f"{self.pool}@{gethostname()}"

    def send(self, name: str, *args: Any, **kwargs: Any) -> AsyncResult:
        return self.app.tasks[name].delay(*args, **kwargs)

    def apply(self, name: str, *args: Any, **options: Any) -> AsyncResult:
        return self.app.tasks[name].apply_async(args, **options)

    def get(self, result: AsyncResult, **options: Any) -> Any:
        """The result of a job, its retries hastened."""
        self.wait_end(result)
        return result.get(timeout=PATIENCE_S, **options)

    def document(self, result: AsyncResult | str) -> dict[str, Any]:
        found = self.jobs.find_one({"_id": str(result)})
        assert found is not None, f"there is no job {result}"
        return found

    def state(self, result: AsyncResult | str) -> str:
        return str(self.document(result)["state"])

    def wait_end(self, result: AsyncResult | str, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """Its document when it has ended. Waiting for a backoff is cut short."""

        def ended() -> dict[str, Any] | None:
            document = self.document(result)
            if document["state"] == "queued" and document["attempts"]:
                self.hasten(result)
            return document if document["state"] in ("succeeded", "failed", "cancelled") else None

        return wait_until(ended, timeout=timeout, message=f"job {result} ends\n{self.worker.log[-3000:]}")

    def wait_state(self, result: AsyncResult | str, state: str, timeout: float = PATIENCE_S) -> None:
        wait_until(
            lambda: self.state(result) == state,
            timeout=timeout,
            message=f"job {result} is {state}\n{self.worker.log[-3000:]}",
        )

    def hasten(self, result: AsyncResult | str) -> None:
        self.jobs.update_one({"_id": str(result), "state": "queued"}, [{"$set": {"run_at": "$$NOW"}}])

    def journal(self, what: str = "", **fields: Any) -> list[dict[str, Any]]:
        """The journal's lines of this kind, with these values."""
        lines = [json.loads(line) for line in self.journal_path.read_text().splitlines()]
        return [
            line
            for line in lines
            if what in ("", line["what"]) and all(line.get(key) == value for key, value in fields.items())
        ]

    def outcomes(self, result: AsyncResult | str) -> list[str]:
        return [entry["outcome"] for entry in self.document(result).get("history", [])]

    def works(self, jobs: int = 4) -> None:
        """Normal jobs go through."""
        results = [self.send("add", number, 1) for number in range(jobs)]
        assert [self.get(result) for result in results] == [number + 1 for number in range(jobs)]


class Sites:
    def __init__(self, mongo_uri: str, client: pymongo.MongoClient[dict[str, Any]], folder: Path) -> None:
        self._uri = mongo_uri
        self._client = client
        self._folder = folder
        self._stack = ExitStack()
        self._sites: dict[str, Site] = {}

    def of(self, pool: str) -> Site:
        site = self._sites.get(pool)
        if site is None or site.worker.process.poll() is not None:
            site = self._sites[pool] = self._stack.enter_context(self.started(pool, *POOLS[pool], "-Q", QUEUES, "-E"))
        return site

    def started(self, pool: str, *arguments: str, env: dict[str, str] | None = None) -> Any:
        """A context with a worker of one's own, on a new database."""
        from contextlib import contextmanager

        @contextmanager
        def context() -> Iterator[Site]:
            site = self.new(pool)
            try:
                with running_worker(
                    APP, site.uri, site.folder, *arguments, env={**site.environment, **(env or {})}, name=pool
                ) as site.worker:
                    yield site
            finally:
                site.app.close()
                self._client.drop_database(site.database.name)

        return context()

    def new(self, pool: str) -> Site:
        """A new database with an app, and no worker yet."""
        name = f"relata_test_{secrets.token_hex(6)}"
        folder = self._folder / f"{pool}-{name[-6:]}"
        folder.mkdir()
        return Site(pool, with_database(self._uri, name), self._client, folder)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def sites(
    mongo_uri: str, mongo_client: pymongo.MongoClient[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sites]:
    made = Sites(mongo_uri, mongo_client, tmp_path_factory.mktemp("behaviour"))
    yield made
    made.close()


@pytest.fixture(params=list(POOLS))
def site(request: pytest.FixtureRequest, sites: Sites) -> Site:
    """A running worker, one after the other on each pool."""
    return sites.of(request.param)


@pytest.fixture(params=["prefork", "threads"])
def wide_site(request: pytest.FixtureRequest, sites: Sites) -> Site:
    """A running worker with two slots, whose own loop is free while jobs run."""
    return sites.of(request.param)
