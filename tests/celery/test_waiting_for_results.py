"""Waiting for results: woken by one change stream per process, polling where there is none."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pymongo
import pytest
from celery import group
from celery.exceptions import TimeoutError as CeleryTimeoutError

from relata_celery.domain.job import NewJob
from relata_celery.store import ends as ends_module
from relata_celery.store.client import connect
from relata_celery.store.ends import ends_of
from relata_celery.store.jobs import Jobs
from tests.celery.apps_behaviour import make_app
from tests.celery.behaviour import PATIENCE_S, Site, Sites
from tests.mongo import open_streams, with_database
from tests.operations import counted
from tests.waiting import wait_until


def end(jobs: Jobs, job_id: str) -> None:
    jobs.cancel(job_id)


def waits_for(job_id: str) -> NewJob:
    return NewJob(job_id, "t", "q", {"body": "", "headers": {}, "properties": {}})


def test_a_waiter_hears_of_its_job_and_of_no_other(database_uri: str) -> None:
    jobs = Jobs(connect(database_uri))
    jobs.enqueue([waits_for("mine"), waits_for("other")])
    ends = ends_of(jobs.database)
    with ends.waiting_for(["mine"]) as waiter:
        assert not ends.streaming
        wait_until(lambda: waiter.wait(0.1) is None and waiter.streaming, timeout=60, message="the stream is open")
        end(jobs, "other")
        end(jobs, "mine")
        heard = wait_until(lambda: waiter.wait(30), timeout=60)
    assert heard == {"mine"}


def test_what_a_plain_task_stores_is_heard_of(database_uri: str) -> None:
    app = make_app(database_uri)
    with ends_of(connect(database_uri)).waiting_for(["plain"]) as waiter:
        wait_until(lambda: waiter.wait(0.1) is None and waiter.streaming, timeout=60, message="the stream is open")
        app.backend.store_result("plain", 5, "SUCCESS")
        assert wait_until(lambda: waiter.wait(30), timeout=60) == {"plain"}
    assert app.AsyncResult("plain").get(timeout=5) == 5
    app.close()


def test_nobody_waits_any_more_when_all_have_their_results(database_uri: str) -> None:
    app = make_app(database_uri)
    for number in range(3):
        app.backend.store_result(f"m-{number}", number, "SUCCESS")
    app.GroupResult("g", [app.AsyncResult(f"m-{number}") for number in range(3)]).get(timeout=PATIENCE_S)
    app.AsyncResult("m-1").get(timeout=PATIENCE_S)
    assert not ends_of(connect(database_uri))._waiting
    app.close()


def test_many_waiters_share_one_stream(sites: Sites, tmp_path: Path) -> None:
    site = sites.of("threads")
    path = tmp_path / "held"
    held = site.send("hold", str(path))
    waiting = [site.send("add", number, 1) for number in range(20)]
    values: dict[int, Any] = {}

    def wait(number: int) -> None:
        values[number] = waiting[number].get(timeout=PATIENCE_S)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(20)]
    threads.append(threading.Thread(target=lambda: values.update({20: held.get(timeout=PATIENCE_S)})))
    for thread in threads:
        thread.start()
    wait_until(path.exists, timeout=60)
    name = site.database.name
    ours = [
        stream
        for stream in wait_until(lambda: open_streams(site.database.client, name), timeout=60)
        if stream["ns"].endswith("$cmd.aggregate")
    ]
    path.unlink()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert values == {**{number: number + 1 for number in range(20)}, 20: "released"}
    assert len(ours) <= 1


def test_while_the_stream_is_open_waiting_reads_nothing(
    database_uri: str, database: pymongo.database.Database[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relata_celery.backend.STREAM_LOOK_S", 3600.0)
    app = make_app(database_uri)
    result = app.tasks["add"].delay(1, 2)
    waiters: list[threading.Thread] = []
    states: list[str] = []

    def wait() -> None:
        result.get(timeout=PATIENCE_S, propagate=False, interval=3600)
        states.append(result.state)

    waiters.append(threading.Thread(target=wait))
    waiters[0].start()
    ends = ends_of(connect(database_uri))
    wait_until(lambda: ends.streaming, timeout=60)
    threading.Event().wait(0.5)  # the look that the opening calls for
    with counted(database) as operations:
        end(Jobs(connect(database_uri)), result.id)
        waiters[0].join(PATIENCE_S)
    assert states == ["REVOKED"]
    assert operations.seen["query", "jobs"] <= 3  # the canceller's own, the waiter's one, that of `state`
    app.close()


def test_a_group_is_joined_in_few_reads(
    database_uri: str, database: pymongo.database.Database[dict[str, Any]]
) -> None:
    app = make_app(database_uri)
    for number in range(300):
        app.backend.store_result(f"m-{number}", number, "SUCCESS")
    result = app.GroupResult("g", [app.AsyncResult(f"m-{number}") for number in range(300)])
    with counted(database) as operations:
        assert result.get(timeout=PATIENCE_S) == list(range(300))
    assert operations.total("query") <= 4
    app.close()


def test_a_failed_member_of_a_group_is_raised(site: Site) -> None:
    tasks = site.app.tasks
    result = group(tasks["add"].s(1, 1), tasks["fail_as"].s("value")).apply_async()
    with pytest.raises(ValueError, match="on purpose"):
        result.get(timeout=PATIENCE_S)
    returned = result.get(timeout=PATIENCE_S, propagate=False)
    assert returned[0] == 2
    assert isinstance(returned[1], ValueError)


def test_waiting_works_without_change_streams(standalone_uri: str) -> None:
    uri = with_database(standalone_uri, f"relata_test_{os.getpid()}_ends")
    app, jobs = make_app(uri), Jobs(connect(uri))
    result = app.tasks["add"].delay(1, 2)
    with pytest.raises(CeleryTimeoutError):
        result.get(timeout=0.2)
    states: list[str] = []

    def wait() -> None:
        result.get(timeout=PATIENCE_S, propagate=False)
        states.append(result.state)

    waiter = threading.Thread(target=wait)
    waiter.start()
    end(jobs, result.id)
    waiter.join(PATIENCE_S)
    assert states == ["REVOKED"]
    assert not ends_of(jobs.database).streaming
    jobs.database.client.drop_database(jobs.database.name)
    app.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_waits_with_a_stream_of_its_own(database_uri: str) -> None:
    app, jobs = make_app(database_uri), Jobs(connect(database_uri))
    result = app.tasks["add"].delay(1, 2)
    with pytest.raises(CeleryTimeoutError):
        result.get(timeout=0.5)
    wait_until(lambda: ends_of(jobs.database).streaming, timeout=60)
    said, says = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover - in the child
        try:
            os.write(says, b"." if ends_of(jobs.database).streaming else b"w")
            result.get(timeout=PATIENCE_S, propagate=False)
            os.write(says, result.state.encode())
        finally:
            os._exit(0)
    os.close(says)
    assert os.read(said, 1) == b"w"
    end(jobs, result.id)
    assert os.read(said, 100) == b"REVOKED"
    os.close(said)
    os.waitpid(child, 0)
    app.close()


def test_the_stream_is_closed_when_nobody_has_waited_for_a_while(
    database_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends_module, "LINGER_S", 0.0)
    jobs = Jobs(connect(database_uri))
    jobs.enqueue([waits_for("a"), waits_for("b")])
    ends = ends_of(jobs.database)
    with ends.waiting_for(["a"]) as waiter:
        wait_until(lambda: waiter.wait(0.1) is None and waiter.streaming, timeout=60)
    end(jobs, "b")
    wait_until(lambda: not ends.streaming, timeout=60, message="the stream is closed")
    with ends.waiting_for(["a"]) as waiter:
        wait_until(lambda: waiter.wait(0.1) is None and waiter.streaming, timeout=60)
        end(jobs, "a")
        assert wait_until(lambda: waiter.wait(30), timeout=60) == {"a"}
