"""Bad input: refused where it is made, or recorded on the job; the worker goes on."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from kombu.exceptions import EncodeError

from relata_celery import InvalidJob, JobStore
from tests.celery.behaviour import PATIENCE_S, Site, Sites
from tests.waiting import wait_until
from tests.workers import ROOT, start_worker

# -- arguments and results -----------------------------------------------------------------------


def test_arguments_that_are_no_json_are_refused_at_the_caller(sites: Sites) -> None:
    site = sites.of("threads")
    before = site.jobs.count_documents({})
    with pytest.raises(InvalidJob, match='job type "echo"') as caught:
        site.send("echo", object())
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, EncodeError)
    assert site.jobs.count_documents({}) == before


def test_an_argument_that_is_too_large_is_refused_at_the_caller(sites: Sites) -> None:
    site = sites.of("threads")
    with pytest.raises(InvalidJob, match="echo") as caught:
        site.send("echo", "x" * 17_000_000)
    assert isinstance(caught.value, ValueError)
    assert "17,0" in str(caught.value)
    assert "15,728,640 bytes" in str(caught.value)
    assert site.jobs.count_documents({"type": "echo", "state": "queued"}) == 0


@pytest.mark.parametrize("priority", [10, -1, "high", 1.5])
def test_a_priority_out_of_range_is_refused_at_the_caller(sites: Sites, priority: Any) -> None:
    with pytest.raises(InvalidJob, match="0 to 9"):
        sites.of("threads").apply("echo", priority=priority)


@pytest.mark.parametrize(
    "options",
    [{"max_attempts": 0}, {"timeout": -1}, {"tags": "not-a-list"}, {"item_id": ""}, {"unique_key": "x" * 300}],
)
def test_a_wrong_option_of_a_call_is_refused_there(sites: Sites, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=f'job type "echo": {next(iter(options))} is '):
        sites.of("threads").apply("echo", **options)


@pytest.mark.parametrize("kind", ["object", "big", "nan"])
def test_a_result_that_cannot_be_stored_fails_its_job(site: Site, kind: str) -> None:
    result = site.send("returns_bad", kind)
    document = site.wait_end(result)
    assert (document["state"], document["error_class"], document["attempts"]) == ("failed", "permanent", 1)
    assert document["error"].startswith("result cannot be stored")
    if kind == "big":
        assert "1,100,0" in document["error"]
        assert "1,000,000" in document["error"]
    site.works(2)


def test_a_result_with_half_a_character_hurts_nobody(site: Site) -> None:
    assert site.wait_end(site.send("returns_bad", "surrogate"))["state"] in ("succeeded", "failed")
    site.works(2)


# -- types that are not known ---------------------------------------------------------------------


def test_an_unknown_type_fails_and_names_it(site: Site) -> None:
    result = site.app.send_task("no.such", (1,))
    document = site.wait_end(result)
    assert (document["state"], document["error_class"]) == ("failed", "permanent")
    assert document["error"] == 'no handler registered for job type "no.such"'
    site.works(2)


def test_a_type_that_was_unknown_can_be_retried_by_hand(site: Site) -> None:
    result = site.app.send_task("no.such.either", (1, 2))
    site.wait_end(result)
    # As a deploy would: the type becomes one that the worker knows.
    site.jobs.update_one({"_id": result.id}, {"$set": {"type": "add", "message.headers.task": "add"}})
    assert JobStore.from_app(site.app).retry(result.id)[result.id].changed
    assert site.get(result) == 3
    assert site.outcomes(result) == ["failed", "succeeded"]


# -- documents edited by hand ---------------------------------------------------------------------

NONSENSE: dict[str, dict[str, Any]] = {
    "no message": {"$unset": {"message": ""}},
    "message is a text": {"$set": {"message": "hello"}},
    "body is a number": {"$set": {"message.body": 5}},
    "body is missing": {"$unset": {"message.body": ""}},
    "body is broken JSON": {"$set": {"message.body": "[[1, 2"}},
    "body is no triple": {"$set": {"message.body": '{"a": 1}'}},
    "body is a short list": {"$set": {"message.body": "[[1, 2]]"}},
    "arguments are a number": {"$set": {"message.body": "[5, {}, {}]"}},
    "keywords are a list": {"$set": {"message.body": "[[1, 2], [3], {}]"}},
    "headers are a list": {"$set": {"message.headers": [1, 2]}},
    "headers are empty": {"$set": {"message.headers": {}}},
    "properties are a text": {"$set": {"message.properties": "p"}},
    "properties are empty": {"$set": {"message.properties": {}}},
    "delivery_info is a text": {"$set": {"message.properties.delivery_info": "d"}},
    "content type unknown": {"$set": {"message.content-type": "application/x-nonsense"}},
    "content type a number": {"$set": {"message.content-type": 7}},
    "encoding unknown": {"$set": {"message.content-encoding": "utf-99"}},
    "pickle": {"$set": {"message.content-type": "application/x-python-serialize", "message.body": b"cos\nsystem\n"}},
    "attempts are a text": {"$set": {"attempts": "three"}},
    "fence is a text": {"$set": {"fence": "f"}},
    "max_attempts is missing": {"$unset": {"max_attempts": ""}},
    "max_attempts is a text": {"$set": {"max_attempts": "many"}},
    "type is a number": {"$set": {"type": 5}},
    "timelimit is nonsense": {"$set": {"message.headers.timelimit": "soon"}},
    "timelimit holds texts": {"$set": {"message.headers.timelimit": ["a", "b"]}},
    "own options are nonsense": {"$set": {"message.headers.relata": {"max_attempts": "x", "timeout": [1]}}},
    "own options are a list": {"$set": {"message.headers.relata": [1]}},
    "root id is a mapping": {"$set": {"message.headers.root_id": {"a": 1}}},
    "retries is a text": {"$set": {"message.headers.retries": "r"}},
    "callbacks are nonsense": {"$set": {"message.body": '[[1, 2], {}, {"callbacks": [5], "errbacks": 7}]'}},
    "chain is nonsense": {"$set": {"message.body": '[[1, 2], {}, {"chain": 5}]'}},
    "task of the headers is a number": {"$set": {"message.headers.task": 5}},
    "id of the headers is another": {"$set": {"message.headers.id": "another-id"}},
    "history is a text": {"$set": {"history": "long ago"}},
    "priority is a text": {"$set": {"priority": "high"}},
    "run_at is missing": {"$unset": {"run_at": ""}},
}
#: Of these a handler may be run all the same: nothing that it needs is missing.
HARMLESS = {
    "properties are empty", "delivery_info is a text", "root id is a mapping", "retries is a text",
    "own options are a list", "id of the headers is another", "history is a text", "priority is a text",
    "body is no triple", "timelimit is nonsense", "timelimit holds texts", "own options are nonsense",
    "type is a number", "encoding unknown", "run_at is missing",
}  # fmt: skip


def test_documents_edited_into_nonsense_are_recorded_and_stop_nothing(site: Site) -> None:
    edited = {}
    for what, update in NONSENSE.items():
        result = site.apply("add", 1, 2, countdown=3600)
        site.jobs.update_one({"_id": result.id}, update)
        if what != "run_at is missing":
            site.hasten(result)
        edited[what] = result
    wrong = {}
    for what, result in edited.items():
        document = site.wait_end(result)
        if document["state"] == "succeeded" and what in HARMLESS:
            continue
        if (document["state"], document.get("error_class")) != ("failed", "permanent") or not document.get("error"):
            wrong[what] = (document["state"], document.get("error_class"), document.get("error"))
    assert wrong == {}
    site.jobs.delete_many({"_id": {"$in": [result.id for result in edited.values()]}})
    site.works(6)
    assert site.worker.process.poll() is None


def test_pickled_content_is_never_loaded(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "executed"
    result = site.apply("add", 1, 2, countdown=3600)
    body = pickle.dumps(_Touch(str(path)))
    site.jobs.update_one(
        {"_id": result.id},
        {"$set": {"message.content-type": "application/x-python-serialize", "message.content-encoding": "binary",
                  "message.body": body}},
    )  # fmt: skip
    site.hasten(result)
    document = site.wait_end(result)
    assert document["error_class"] == "permanent"
    assert "decoded" in document["error"]
    assert not path.exists()


class _Touch:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.path, "w")


# -- what does not start --------------------------------------------------------------------------


def refused(
    uri: str, folder: Path, source: str = "", env: Mapping[str, str] | None = None, *arguments: str
) -> str:
    """The output of a worker that must not start."""
    (folder / "wrong_app.py").write_text(
        "import os\nfrom celery import Celery\n"
        'url = "relata+" + os.environ["RELATA_TEST_URI"]\n'
        'app = Celery("wrong", broker=url, backend=url, task_cls="relata_celery:LeasedTask")\n' + source
    )
    worker = start_worker("wrong_app", uri, folder, "-P", "solo", *arguments, env=env)
    try:
        assert worker.process.wait(PATIENCE_S) != 0
    finally:
        worker.close()
    assert "Traceback" not in worker.log
    assert "ready." not in worker.log
    return worker.log


@pytest.mark.parametrize(
    ("decorator", "said"),
    [
        ("max_attempts=0", ["max_attempts is 0", "1 to 1000"]),
        ("priority=11", ["priority is 11", "0 to 9"]),
        ('priority="high"', ["priority is 'high'", "0 to 9"]),
        ("timeout=-1", ["timeout is -1"]),
        ("max_retries=-1", ["max_retries is -1", "0 to 999"]),
        ("max_attempts=3, max_retries=7", ["max_retries is 7", "max_attempts (3) less one"]),
        ("queue=5", ["queue is 5"]),
        ("max_atempts=3", ["max_atempts", "did you mean max_attempts"]),
        ('ai="yes"', ["ai is 'yes'", "True or False"]),
    ],
)
def test_a_wrong_option_of_a_task_stops_the_worker(
    database_uri: str, tmp_path: Path, decorator: str, said: list[str]
) -> None:
    output = refused(database_uri, tmp_path, f"@app.task(name='mail.send', {decorator})\ndef send(): pass\n")
    for words in ["mail.send", *said]:
        assert words in output


@pytest.mark.parametrize(
    ("source", "env", "said"),
    [
        ("", {"RELATA_LEASE_DURATION": "-1"}, ["RELATA_LEASE_DURATION: is '-1', must be seconds from 0.5"]),
        ("", {"RELATA_HEARTBEAT_PERIOD": "2"}, ["RELATA_HEARTBEAT_PERIOD", "half of lease_duration (3 s)"]),
        ("app.conf.relata_leese_duration = 5\n", {}, ["relata_leese_duration", "did you mean relata_lease_duration"]),
        ("app.conf.relata_max_attempts = 'many'\n", {}, ["relata_max_attempts: is 'many'", "1 to 1000"]),
        ("app.conf.accept_content = ['json', 'pickle']\n", {"C_FORCE_ROOT": "1"}, ["accept_content", "pickle"]),
        ("app.conf.result_accept_content = ['yaml']\n", {}, ["result_accept_content", "yaml"]),
        ("app.conf.accept_content = ['application/x-python-serialize']\n", {}, ["accept_content"]),
    ],
)
def test_a_wrong_setting_stops_the_worker(
    database_uri: str, tmp_path: Path, source: str, env: dict[str, str], said: list[str]
) -> None:
    output = refused(database_uri, tmp_path, source, env)
    for words in said:
        assert words in output


# -- passwords -----------------------------------------------------------------------------------


def test_no_output_shows_the_password(mongo_uri: str, tmp_path: Path) -> None:
    secret, encoded = "p@ss-wort", "p%40ss-wort"
    uri = mongo_uri.replace("://", f"://user:{encoded}@", 1).partition("?")[0].rstrip("/") + "/db?authSource=admin"
    worker = start_worker(
        "tests.celery.apps_behaviour", uri, tmp_path, "-P", "solo", "-l", "debug",
        env={"RELATA_TEST_JOURNAL": str(tmp_path / "journal")},
    )  # fmt: skip
    try:
        wait_until(
            lambda: worker.process.poll() is not None or "trying again" in worker.log,
            timeout=PATIENCE_S,
            message="the worker cannot authenticate",
        )
    finally:
        worker.close()
    for text in (secret, encoded, "ss-wort"):
        assert text not in worker.log
    assert "relata+mongodb://" in worker.log


def test_the_report_shows_no_password(tmp_path: Path) -> None:
    code = (
        "from tests.celery.apps_behaviour import make_app\n"
        "app = make_app('mongodb://user:p%40ss-wort@h1,h2/db?replicaSet=rs0')\n"
        "print(app.bugreport(), app.connection(), app.connection().as_uri(), app.backend.as_uri(), repr(app.backend))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout
    assert "ss-wort" not in output
    assert "h1,h2" in output
