"""``encrypted=True``: arguments and results are in the database, and nobody who reads it can read them."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson
import pytest
from celery import Celery, chain, chord, group
from pymongo.database import Database

from relata_celery import InvalidJob, JobStore
from relata_celery.domain.errors import ConfigurationError, MissingKey
from relata_celery.sealing import VARIABLE, Keyring, Undecipherable
from tests.commands import relata
from tests.security.apps_private import make_app
from tests.waiting import wait_until
from tests.workers import ROOT, Worker, running_worker

APP = "tests.security.apps_private"
SECRET = "hunter2-of-the-argument"
PATIENCE_S = 60.0


def new_key() -> str:
    return base64.urlsafe_b64encode(os.urandom(32)).decode()


FIRST, SECOND = new_key(), new_key()


def name_of(key: str) -> str:
    return Keyring.from_environment({VARIABLE: key}).names[0]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, FIRST)


@pytest.fixture
def app(database_uri: str) -> Iterator[Celery]:
    made = make_app(database_uri)
    yield made
    made.close()


def whole_database(database: Database[dict[str, Any]]) -> bytes:
    """Every document of every collection, as its bytes, with what is base64 in it."""
    names = database.list_collection_names()
    return b"\n".join(bson.encode(document) for name in names for document in database[name].find())


def assert_no_plaintext(database: Database[dict[str, Any]], secret: str = SECRET) -> None:
    assert secret.encode() not in whole_database(database)


def job_of(database: Database[dict[str, Any]], job_id: str) -> dict[str, Any]:
    found = database["relata_jobs"].find_one({"_id": job_id})
    assert found is not None
    return found


def wait_job(database: Database[dict[str, Any]], job_id: str, state: str, worker: Worker) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        found = database["relata_jobs"].find_one({"_id": job_id, "state": state})
        if found is None:
            hasten(database)
        return found

    return wait_until(there, PATIENCE_S, f"job {job_id} is {state}\n{worker.log[-3000:]}")


def hasten(database: Database[dict[str, Any]]) -> None:
    """Cut short every backoff."""
    waiting = {"state": "queued", "attempts": {"$gt": 0}}
    chords = {"state": "queued", "type": "celery.chord_unlock"}
    database["relata_jobs"].update_many({"$or": [waiting, chords]}, [{"$set": {"run_at": "$$NOW"}}])


# -- before anything runs --------------------------------------------------------------------------


def test_what_is_published_holds_no_plaintext_however_it_is_published(
    app: Celery, database: Database[dict[str, Any]]
) -> None:
    tasks = app.tasks
    conceal, repeat = tasks["conceal"], tasks["repeat"]
    conceal.delay(SECRET)
    conceal.delay(SECRET, aside=SECRET)  # as the call before it was
    conceal.apply_async((SECRET,), compression="gzip", countdown=60)
    app.send_task("conceal", (SECRET,), {"aside": SECRET})
    app.send_task("known.elsewhere", (SECRET,), headers={"relata_privacy": "encrypted"})
    chain(repeat.si(1), conceal.si(SECRET)).apply_async()
    chain(tasks["shout"].si("a"), repeat.si(1), conceal.si(SECRET)).apply_async()
    repeat.apply_async((1,), link=conceal.si(SECRET))
    repeat.apply_async((1,), link_error=conceal.si(SECRET))
    for _ in range(3):
        repeat.delay(conceal.s(SECRET))  # a signature among the arguments
    group(conceal.s(SECRET), repeat.s(1)).apply_async()
    chord([repeat.s(1)], conceal.si(SECRET)).apply_async()
    chain(repeat.si(1), group(conceal.si(SECRET), repeat.si(2)), tasks["total"].s()).apply_async()
    assert database["relata_jobs"].count_documents({}) >= 15
    assert_no_plaintext(database)


def test_a_job_that_nobody_wants_secret_stays_readable(app: Celery, database: Database[dict[str, Any]]) -> None:
    result = app.tasks["repeat"].delay("seen by everybody")
    assert "seen by everybody" in job_of(database, result.id)["message"]["body"]


def test_without_a_key_nothing_is_published(
    app: Celery, database: Database[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(InvalidJob, match=f'"conceal" is to be encrypted, and cannot be: {VARIABLE} is not set'):
        app.tasks["conceal"].delay(SECRET)
    assert database["relata_jobs"].count_documents({}) == 0


def test_without_the_package_nothing_is_published_and_the_error_names_it(database_uri: str) -> None:
    code = (
        "import sys\nsys.modules['cryptography.hazmat.primitives.ciphers.aead'] = None\n"
        "from tests.security.apps_private import make_app\n"
        f"make_app({database_uri!r}).tasks['conceal'].delay('x')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert 'pip install "relata_celery[encryption]"' in done.stderr


def test_what_is_sealed_is_bound_to_its_job_and_to_its_key() -> None:
    keys = Keyring.from_environment({VARIABLE: FIRST})
    sealed = keys.seal(b"secret", "message:a")
    assert keys.open(sealed, "message:a") == b"secret"
    assert keys.seal(b"secret", "message:a") != sealed
    with pytest.raises(Undecipherable, match="altered or moved"):
        keys.open(sealed, "message:b")
    with pytest.raises(Undecipherable, match="altered or moved"):
        keys.open(sealed[:-1] + bytes([sealed[-1] ^ 1]), "message:a")
    with pytest.raises(MissingKey, match=f"key {name_of(FIRST)}, which is not in {VARIABLE}"):
        Keyring.from_environment({VARIABLE: SECOND}).open(sealed, "message:a")
    assert FIRST not in repr(keys)
    assert FIRST not in repr(vars(keys))


@pytest.mark.parametrize(
    "wrong",
    ["short", FIRST[:-5], f"{FIRST},{FIRST}x", "ключ", FIRST.replace("=", "") + "!"],
    ids=["too short", "a piece of one", "the second of two", "no ASCII", "an odd character"],
)
def test_what_is_no_key_is_refused_and_not_shown(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=r"key \d of \d is not 32 bytes in URL-safe base64") as caught:
        Keyring.from_environment({VARIABLE: wrong})
    assert wrong not in str(caught.value)
    assert FIRST[:-5] not in str(caught.value)


def test_eager_mode_runs_in_the_open_and_stores_nothing_in_the_open(
    app: Celery, database: Database[dict[str, Any]]
) -> None:
    app.conf.update(task_always_eager=True, task_store_eager_result=True)
    result = app.tasks["conceal"].delay(SECRET)
    assert result.get() == SECRET
    assert database["relata_results"].count_documents({}) == 1
    assert_no_plaintext(database)
    assert app.AsyncResult(result.id).get(timeout=5) == SECRET


# -- a real worker ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [("-c", "2"), ("-P", "threads", "-c", "2"), ("-P", "solo")], ids=" ".join)
def test_a_worker_runs_encrypted_jobs_and_all_that_follows_them_stays_encrypted(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path, pool: tuple[str, ...]
) -> None:
    tasks, written = app.tasks, []
    conceal, repeat = tasks["conceal"], tasks["repeat"]
    with running_worker(APP, database_uri, tmp_path, *pool, "-E", "-l", "debug") as worker:

        def done(result: Any) -> Any:
            wait_job(database, result.id, "succeeded", worker)
            assert_no_plaintext(database)
            written.append(result.id)
            return result.get(timeout=PATIENCE_S)

        assert done(conceal.delay(SECRET, aside="?")) == f"{SECRET}?"
        assert done(conceal.apply_async((SECRET,), compression="gzip")) == SECRET
        assert done(app.send_task("conceal", (SECRET,))) == SECRET
        assert done(tasks["conceal_bound"].delay(SECRET)) == f"{SECRET}!"
        assert done(tasks["conceal_replacing"].delay(SECRET)) == f"{SECRET}?"
        # Its result becomes the argument of a plain step, and that one's result: still encrypted.
        assert done(chain(conceal.s(SECRET), repeat.s(), repeat.s()).apply_async()) == SECRET
        assert done(chain(repeat.si(1), conceal.si(SECRET)).apply_async()) == SECRET
        linked = tasks["repeat"].signature(task_id="linked")
        assert done(conceal.apply_async((SECRET,), link=linked)) == SECRET
        assert done(app.AsyncResult("linked")) == SECRET
        joined = chord([conceal.s(SECRET), repeat.s("b")], tasks["total"].s()).apply_async()
        assert done(joined) == f"{SECRET}+b"
        called = tasks["recall"].signature(args=(SECRET,), task_id="called", immutable=True)
        failed = tasks["conceal_failing"].apply_async((SECRET,), link_error=called)
        wait_job(database, failed.id, "failed", worker)
        assert done(app.AsyncResult("called")) == "recalled"
        for job_id in written:
            assert job_of(database, job_id)["message"]["content-type"] == "application/x-relata-sealed"
        names = {"conceal", "conceal_bound", "conceal_replacing"}
        own_lines = [line for line in worker.log.splitlines() if SECRET in line and names & set(re.split(r"\W", line))]
        assert own_lines == []
    assert_no_plaintext(database)


def test_plain_celery_tasks_that_follow_are_encrypted_too(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    with running_worker(APP, database_uri, tmp_path, "-c", "1"):
        result = chain(app.tasks["conceal"].s(SECRET), app.tasks["shout"].s()).apply_async()
        assert result.get(timeout=PATIENCE_S) == SECRET.upper()
        assert_no_plaintext(database)
        assert_no_plaintext(database, SECRET.upper())


def test_a_state_of_the_handlers_own_is_encrypted(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with running_worker(APP, database_uri, tmp_path, "-c", "1") as worker:
        result = app.tasks["conceal_state"].delay(SECRET, str(go))
        wait_until(lambda: result.state == "THINKING", PATIENCE_S, f"it says so\n{worker.log[-2000:]}")
        assert result.info == {"word": SECRET}
        assert_no_plaintext(database)
        go.touch()
        assert result.get(timeout=PATIENCE_S) == SECRET


def test_errbacks_of_a_job_whose_process_died_are_encrypted(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    called = app.tasks["recall"].signature(args=(SECRET,), task_id="called", immutable=True)
    with running_worker(APP, database_uri, tmp_path, "-c", "1") as worker:
        app.tasks["conceal_dying"].apply_async((SECRET,), link_error=called)
        document = wait_job(database, "called", "succeeded", worker)
    assert document["message"]["content-type"] == "application/x-relata-sealed"
    assert_no_plaintext(database)


def test_nothing_is_shown_of_it(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    with running_worker(APP, database_uri, tmp_path, "-c", "1") as worker:
        result = chain(app.tasks["conceal"].s(SECRET), app.tasks["repeat"].s()).apply_async()
        first = result.parent.id
        wait_job(database, result.id, "succeeded", worker)
    for arguments in (("show", first), ("show", first, "--json"), ("list",), ("list", "--json")):
        done = relata(database_uri, "jobs", *arguments, app=APP, env={VARIABLE: FIRST, "RELATA_TEST_URI": database_uri})
        assert done.code == 0, done
        assert SECRET not in done.out + done.err
    shown = relata(database_uri, "jobs", "show", first, app=APP, env={"RELATA_TEST_URI": database_uri}).out
    assert re.search(r"arguments +\(encrypted\)", shown)
    assert re.search(r'result +"\(encrypted\)"', shown)
    as_json = relata(database_uri, "jobs", "show", first, "--json", app=APP, env={"RELATA_TEST_URI": database_uri}).json
    assert as_json["payload"]["unread"] == as_json["result"] == as_json["message"]["body"] == "(encrypted)"
    job = JobStore.from_app(app).get(first)
    assert job is not None
    assert SECRET not in repr(job)


# -- keys ------------------------------------------------------------------------------------------


def test_a_worker_without_the_key_runs_nothing_and_loses_nothing_and_says_which_key(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    result = app.tasks["conceal"].apply_async((SECRET,), max_attempts=1)
    environment = {VARIABLE: SECOND, "RELATA_TEST_RAN": str(ran)}
    reason = f"it is encrypted with key {name_of(FIRST)}, which is not in {VARIABLE} (which holds {name_of(SECOND)})"
    with running_worker(APP, database_uri, tmp_path, "-c", "1", env=environment) as worker:

        def put_back() -> dict[str, Any] | None:
            return database["relata_jobs"].find_one({"_id": result.id, "state": "queued", "snoozes": {"$gte": 2}})

        def twice() -> dict[str, Any] | None:
            database["relata_jobs"].update_many({"state": "queued"}, [{"$set": {"run_at": "$$NOW"}}])
            return put_back()

        document = wait_until(twice, PATIENCE_S, f"it is put back\n{worker.log[-2000:]}")
        assert reason in document["error"]
        assert document["attempts"] == 0
        assert reason in worker.log
        assert app.tasks["repeat"].delay("others are run").get(timeout=PATIENCE_S) == "others are run"
    assert not ran.exists()
    listed = relata(database_uri, "jobs", "list", app=APP, env={"RELATA_TEST_URI": database_uri})
    assert name_of(FIRST) in listed.out
    # A worker with the new key in front and the old one behind it runs it, and encrypts with the new one.
    keys = {VARIABLE: f"{SECOND},{FIRST}", "RELATA_TEST_RAN": str(ran)}
    with running_worker(APP, database_uri, tmp_path, "-c", "1", env=keys, name="w2") as worker:
        database["relata_jobs"].update_many({"state": "queued"}, [{"$set": {"run_at": "$$NOW"}}])
        stored = wait_job(database, result.id, "succeeded", worker)
    assert stored["result"]["body"][1:5].hex() == name_of(SECOND)
    assert stored["attempts"] == 1
    with pytest.raises(MissingKey, match=f"key {name_of(SECOND)}"):
        app.AsyncResult(result.id).get(timeout=5)


def test_keys_are_changed_while_jobs_wait(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = app.tasks["conceal"].delay(f"{SECRET}-old")
    monkeypatch.setenv(VARIABLE, f"{SECOND},{FIRST}")
    new = app.tasks["conceal"].delay(f"{SECRET}-new")
    names = [job_of(database, result.id)["message"]["body"][1:5].hex() for result in (old, new)]
    assert names == [name_of(FIRST), name_of(SECOND)]
    with running_worker(APP, database_uri, tmp_path, "-c", "1"):
        assert [result.get(timeout=PATIENCE_S) for result in (old, new)] == [f"{SECRET}-old", f"{SECRET}-new"]
    assert_no_plaintext(database)


def test_an_encrypted_task_whose_job_came_in_the_open_is_not_run_without_a_key(
    database_uri: str, database: Database[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a producer that does not have the task's code."""
    url, ran = f"relata+{database_uri}", tmp_path / "ran"
    stranger = Celery("stranger", broker=url, backend=url, set_as_current=False)
    result = stranger.send_task("conceal", (SECRET,))
    stranger.close()
    environment = {VARIABLE: "", "RELATA_TEST_RAN": str(ran)}
    with running_worker(APP, database_uri, tmp_path, "-c", "1", env=environment) as worker:
        query = {"_id": result.id, "state": "queued", "error": {"$regex": f"not run here: {VARIABLE} is not set"}}
        wait_until(lambda: database["relata_jobs"].find_one(query), PATIENCE_S, f"put back\n{worker.log[-2000:]}")
        assert "encrypted jobs (conceal" in worker.log
    assert not ran.exists()
    with running_worker(APP, database_uri, tmp_path, "-c", "1", name="w2") as worker:
        stored = wait_job(database, result.id, "succeeded", worker)
        assert SECRET not in worker.log
    assert SECRET.encode() not in bson.encode({"result": stored["result"]})


def test_the_errbacks_of_a_lost_job_wait_for_a_worker_that_can_read_them(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    called = app.tasks["recall"].signature(args=(SECRET,), task_id="called", immutable=True)
    lost = app.tasks["conceal"].apply_async((SECRET,), link_error=called, max_attempts=1)
    gone = {"state": "running", "attempts": 1, "fence": 1}
    database["relata_jobs"].update_one(
        {"_id": lost.id}, [{"$set": {**gone, "lease": {"owner": "gone", "until": {"$subtract": ["$$NOW", 60_000]}}}}]
    )
    with running_worker(APP, database_uri, tmp_path, "-c", "1", env={VARIABLE: SECOND}) as worker:
        wait_until(lambda: "is left to a worker that has its key" in worker.log, PATIENCE_S, "it says so")
        assert job_of(database, lost.id)["state"] == "running"
    with running_worker(APP, database_uri, tmp_path, "-c", "1", name="w2") as worker:
        wait_job(database, "called", "succeeded", worker)
        assert job_of(database, lost.id)["state"] == "failed"


def test_a_job_is_retried_by_hand(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path
) -> None:
    result = app.tasks["conceal"].delay(SECRET)
    store = JobStore.from_app(app)
    assert store.cancel(result.id)[result.id].changed
    done = relata(database_uri, "jobs", "retry", result.id, app=APP, env={"RELATA_TEST_URI": database_uri})
    assert done.code == 0, done
    with running_worker(APP, database_uri, tmp_path, "-c", "1"):
        assert app.AsyncResult(result.id).get(timeout=PATIENCE_S) == SECRET
    assert_no_plaintext(database)


@pytest.mark.parametrize("edit", ["altered", "moved", "plain", "empty", "text"])
def test_a_sealed_body_that_was_tampered_with_fails_its_job(
    app: Celery, database_uri: str, database: Database[dict[str, Any]], tmp_path: Path, edit: str
) -> None:
    other = app.tasks["conceal"].apply_async((SECRET,), countdown=3600)
    result = app.tasks["conceal"].delay(SECRET)
    sealed = job_of(database, result.id)["message"]["body"]
    body: Any = {
        "altered": sealed[:-1] + bytes([sealed[-1] ^ 1]),
        "moved": job_of(database, other.id)["message"]["body"],
        "plain": b"[[], {}, {}]",
        "empty": b"",
        "text": "no bytes at all",
    }[edit]
    database["relata_jobs"].update_one({"_id": result.id}, {"$set": {"message.body": body}})
    with running_worker(APP, database_uri, tmp_path, "-P", "solo") as worker:
        document = wait_job(database, result.id, "failed", worker)
        assert document["error_class"] == "permanent"
        assert "Undecipherable" in document["error"]
        assert app.tasks["repeat"].delay("goes on").get(timeout=PATIENCE_S) == "goes on"


def test_the_doctor_names_keys_and_shows_none(database_uri: str) -> None:
    def doctor(keys: str) -> Any:
        environment = {VARIABLE: keys, "RELATA_TEST_URI": database_uri}
        done = relata(database_uri, "doctor", "--json", app=APP, env=environment)
        for key in (FIRST, SECOND):
            assert key not in done.out + done.err
        return next(check for check in done.json["checks"] if check["name"] == "encryption")

    good = doctor(f"{SECOND},{FIRST}")
    assert (good["status"], name_of(SECOND) in good["found"], name_of(FIRST) in good["found"]) == ("ok", True, True)
    missing = doctor("")
    assert missing["status"] == "error"
    assert "conceal" in missing["found"]
    assert doctor(f"{FIRST}x")["status"] == "error"


def test_a_worker_with_a_broken_key_does_not_start(database_uri: str, tmp_path: Path) -> None:
    from tests.workers import start_worker

    worker = start_worker(APP, database_uri, tmp_path, "-P", "solo", env={VARIABLE: f"{FIRST},{SECOND[:-4]}"})
    try:
        assert worker.process.wait(PATIENCE_S) != 0
    finally:
        worker.close()
    assert "key 2 of 2 is not 32 bytes" in worker.log
    assert "Traceback" not in worker.log
    assert SECOND[:-4] not in worker.log
