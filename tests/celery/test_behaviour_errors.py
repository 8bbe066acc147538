"""Classes of error, what is kept of a failure, and exceptions that no process can carry."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from bson import json_util

from relata_celery import InvalidOutputError, JobError, PermanentError, TransientError
from tests.celery.apps_behaviour import SECRET
from tests.celery.behaviour import POOLS, QUEUES, Site, Sites
from tests.waiting import wait_until


@contextmanager
def captured_events(site: Site) -> Iterator[list[dict[str, Any]]]:
    """Every event that the worker sends meanwhile."""
    events: list[dict[str, Any]] = []
    stop, ready = threading.Event(), threading.Event()

    def listen() -> None:
        with site.app.connection_for_read() as first:
            receiver = site.app.events.Receiver(first, handlers={"*": events.append})
            with receiver.consumer_context() as (connection, _channel, _consumers):
                ready.set()
                while not stop.is_set():
                    try:
                        connection.drain_events(timeout=0.2)
                    except TimeoutError:
                        pass

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        assert ready.wait(60)
        yield events
    finally:
        stop.set()
        thread.join(60)


def wait_event(events: list[dict[str, Any]], kind: str, job_id: str) -> dict[str, Any]:
    return wait_until(
        lambda: next((e for e in list(events) if e["type"] == kind and e.get("uuid") == job_id), None),
        timeout=60,
        message=f"{kind} of {job_id}",
    )


@pytest.mark.parametrize(
    ("kind", "error_class"),
    [
        ("transient", "transient"),
        ("permanent", "permanent"),
        ("invalid", "invalid"),
        ("timeout", "timeout"),
        ("connection", "transient"),
        ("unknown", "transient"),
        ("408", "transient"),
        ("429", "transient"),
        ("503", "transient"),
        ("400", "permanent"),
        ("401", "permanent"),
        ("404", "permanent"),
        ("422", "permanent"),
    ],
)
def test_what_was_raised_gives_the_class(site: Site, kind: str, error_class: str) -> None:
    result = site.send("raise_error", kind, "the reason")
    document = site.wait_end(result)
    assert (document["state"], document["error_class"]) == ("failed", error_class)
    assert document["error"] == ("the reason" if not kind.isdigit() else f"HTTP {kind}")
    (entry,) = document["history"]
    assert (entry["outcome"], entry["error_class"], entry["error"]) == ("failed", error_class, document["error"])


@pytest.mark.parametrize("kind", ["permanent", "invalid", "timeout"])
def test_only_transient_errors_are_retried(site: Site, kind: str) -> None:
    result = site.send("permanent_with_attempts", kind)
    document = site.wait_end(result)
    assert document["attempts"] == 1
    assert document["max_attempts"] == 3


@pytest.mark.parametrize(
    ("kind", "cls"),
    [("transient", TransientError), ("permanent", PermanentError), ("invalid", InvalidOutputError)],
)
def test_errors_of_the_package_come_back_as_themselves(site: Site, kind: str, cls: type[Exception]) -> None:
    with pytest.raises(cls, match="the reason"):
        site.get(site.send("raise_error", kind, "the reason"))


def test_a_rate_limit_spends_no_attempt(site: Site) -> None:
    result = site.send("rate_limited", 3)
    assert site.get(result) == 1
    document = site.document(result)
    assert (document["attempts"], document["snoozes"]) == (1, 3)
    assert site.outcomes(result) == ["snoozed"] * 3 + ["succeeded"]


def test_a_rate_limit_that_lasts_longer_than_snoozing_may_fails_the_job(sites: Sites) -> None:
    with sites.started("threads", *POOLS["threads"], "-Q", QUEUES, env={"RELATA_SNOOZE_LIMIT": "2.5"}) as site:
        result = site.send("rate_limited", 1000)
        with pytest.raises(JobError, match="relata_snooze_limit allows: slow down"):
            site.get(result)
        assert site.outcomes(result) == ["snoozed"] * 3 + ["failed"]
        assert site.document(result)["attempts"] == 1


def test_http_429_with_retry_after_waits_as_told(site: Site) -> None:
    result = site.send("http_429")
    assert site.get(result) == "in"
    assert site.outcomes(result) == ["snoozed", "succeeded"]


def test_a_long_text_is_cut(site: Site) -> None:
    result = site.send("raise_error", "permanent", "é" * 5000)
    document = site.wait_end(result)
    assert document["error"] == "é" * 2000 + "…"
    assert document["history"][0]["error"] == document["error"]
    with pytest.raises(PermanentError, match="^é{2000}…$"):
        site.get(result)


# -- what must not be kept -----------------------------------------------------------------------

LEAKS = [
    "key", "assert", "type", "attribute", "index", "name", "unicode", "int", "exit", "base", "cause", "context",
    "group", "attribute_of_error", "url", "url_in_cause",
]  # fmt: skip


def dump(site: Site) -> str:
    """Everything that stands in the database, but the arguments of calls."""
    return "\n".join(
        json_util.dumps(document)
        for name in site.database.list_collection_names()
        for document in site.database[name].find()
    )


def test_what_a_handler_did_not_write_on_purpose_is_kept_nowhere(site: Site) -> None:
    with captured_events(site) as events:
        results = [site.send("leak", kind) for kind in LEAKS]
        results += [site.send(name) for name in ("leak_retry", "leak_transient", "leak_expected")]
        for result in results:
            assert site.wait_end(result)["state"] == "failed"
            wait_event(events, "task-failed", result.id)
    shown = []
    for result in results:
        returned = result.get(timeout=10, propagate=False)
        shown.append(repr((returned, vars(returned), returned.__cause__, returned.__context__, result.traceback)))
    assert SECRET not in "\n".join(shown)
    assert SECRET not in dump(site)
    assert SECRET not in site.worker.log
    assert SECRET not in json.dumps(events, default=repr)


def test_a_panic_is_known_by_its_place(site: Site) -> None:
    document = site.wait_end(site.send("leak", "key"))
    assert document["error"].startswith("job handler raised KeyError at tests.celery.apps_behaviour:leak:")
    assert document["error_class"] == "transient"
    assert "apps_behaviour.py" in document["exception"]["traceback"]


# -- exceptions that no one can carry ------------------------------------------------------------

AWKWARD = [
    "str_raises", "reduce_raises", "needs_two", "has_lock", "huge", "lambda_argument", "local_class", "base", "exit",
    "interrupt", "generator", "memory", "recursion", "stop", "surrogate", "null",
]  # fmt: skip
NESTED = ["str_raises", "reduce_raises", "needs_two", "has_lock", "huge"]


def test_an_exception_that_cannot_be_carried_ends_its_job_and_nothing_else(site: Site) -> None:
    pid = site.worker.pid
    results = {kind: site.send("raise_awkward", kind) for kind in [*AWKWARD, *(f"nested_{kind}" for kind in NESTED)]}
    for kind, result in results.items():
        document = site.wait_end(result)
        assert document["state"] == "failed", kind
        assert document["error_class"] == ("permanent" if kind.startswith("nested_") else "transient"), kind
        assert document["error"], kind
        assert len(document["error"]) <= 2001
        assert len(document["exception"].get("traceback", "")) < 10_000
        assert [entry["outcome"] for entry in document["history"]] == ["failed"], kind
        assert isinstance(result.get(timeout=10, propagate=False), Exception), kind
    site.works(20)
    assert site.worker.process.poll() is None
    assert site.worker.pid == pid
    if site.pool == "solo":
        assert site.get(site.send("pid")) == pid


def test_an_exception_keeps_its_name_where_its_class_cannot_be_made_again(site: Site) -> None:
    for kind, name in [("needs_two", "NeedsTwo"), ("local_class", "Local")]:
        result = site.send("raise_awkward", kind)
        site.wait_end(result)
        assert name in site.document(result)["exception"]["type"]
        assert result.get(timeout=10, propagate=False) is not None


def test_a_process_that_dies_is_one_failed_attempt(sites: Any) -> None:
    site = sites.of("prefork")
    result = site.send("dies")
    document = site.wait_end(result)
    assert document["state"] == "failed"
    assert site.outcomes(result) == ["worker_lost", "worker_lost"]
    assert document["error"].startswith("worker lost")
    site.works()
