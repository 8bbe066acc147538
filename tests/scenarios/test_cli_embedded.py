"""``relata embedded``: start, stop and status, and commands that run on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest

from relata_celery import embedded
from relata_celery.domain.job import JobState
from relata_celery.embedded import process
from relata_celery.embedded.place import Place
from tests.celery.apps_recovery import Stage
from tests.commands import relata
from tests.mongo import NoMongod, find_mongod

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of this test's own, whose server is ended whatever the test did to it."""
    try:
        monkeypatch.setenv("RELATA_MONGOD", str(find_mongod()))
    except NoMongod as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))
    home = tmp_path / "home"
    monkeypatch.setenv("RELATA_HOME", str(home))
    yield home
    pid = process.running(Place(home), Place(home).state())
    if pid is not None:
        since = process.started_at(pid)
        os.kill(pid, signal.SIGKILL)
        process.gone(pid, since, 10)


def test_status_starts_nothing_and_looks_at_no_configuration(home: Path, tmp_path: Path) -> None:
    status = relata(None, "embedded", "status", "--json")
    assert (status.code, status.err, status.json["running"]) == (0, "", False)
    assert not home.exists()
    (tmp_path / "own_app.py").write_text(
        'from celery import Celery\napp = Celery("x")\napp.config_from_object("no_such_module")\n'
    )
    status = relata(None, "embedded", "status", app="own_app", folder=tmp_path)
    assert (status.code, status.out) == (0, f"The embedded MongoDB is not running. Its home is {home}\n")
    assert not home.exists()
    stopped = relata(None, "embedded", "stop", "--json")
    assert (stopped.code, stopped.json["stopped"]) == (0, False)


def test_a_demo_says_that_its_server_goes_on_and_how_to_stop_it(home: Path, tmp_path: Path) -> None:
    for needed in ("pypdf", "bs4", "httpx"):
        pytest.importorskip(needed)
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "one.txt").write_text("Light is refracted by a prism.", "utf-8")
    done = relata(None, "demo", "--documents", str(tmp_path / "documents"), "--no-crash")
    assert done.code == 0, done
    assert "celery -A relata_celery relata embedded stop" in done.out
    assert relata(None, "embedded", "stop", "--json").json["stopped"]


def test_it_is_started_by_command_used_by_other_commands_and_stopped(home: Path) -> None:
    started = relata(None, "embedded", "start", "--json")
    assert (started.code, started.json["running"]) == (0, True)
    assert ":***@127.0.0.1:" in started.json["uri"]
    assert relata(None, "jobs", "list", "--json").json == []
    doctor = relata(None, "doctor")
    assert doctor.code == 0
    status = relata(None, "embedded", "status")
    password = Place(home).password()
    assert password
    assert f"pid      {started.json['pid']}\n" in status.out
    assert not any(password in done.out + done.err for done in (started, doctor, status))
    stopped = relata(None, "embedded", "stop")
    assert (stopped.code, stopped.out) == (0, "The embedded MongoDB is stopped.\n")
    assert relata(None, "embedded", "status", "--json").json["running"] is False


def test_a_worker_shows_the_password_to_nobody(home: Path, tmp_path: Path) -> None:
    uri = embedded.uri()
    password = Place(home).password()
    assert password
    assert password in uri
    with Stage(uri, tmp_path) as stage:
        worker = stage.worker("-c", "1")
        stage.wait_state(stage.send("work"), JobState.SUCCEEDED)
        inspect = stage.app.control.inspect(timeout=20, limit=1)
        answers = {name: getattr(inspect, name)() for name in ("stats", "report", "conf", "active_queues", "clock")}
        (stats,) = answers["stats"].values()
        assert stats["broker"]["hostname"].startswith("relata+mongodb://relata:***@127.0.0.1:")
        assert stats["relata"]
        assert all(answers.values())
        assert password not in str(answers)
        assert password not in worker.log


def test_a_read_starts_it_and_says_what_to_do_when_it_cannot(home: Path) -> None:
    refusal = relata(None, "stats", env={"RELATA_MONGOD": "/nowhere/mongod"}).refused()
    assert "RELATA_MONGOD: /nowhere/mongod does not exist" in refusal
    assert "set RELATA_MONGODB_URI" in refusal
    doctor = relata(None, "doctor", "--json", env={"RELATA_MONGOD": "/nowhere/mongod"})
    assert (doctor.code, doctor.json["checks"][0]["name"]) == (1, "configuration")
    assert relata(None, "stats", "--json").json["total"] == 0


def test_a_user_who_may_only_read_is_told_which_right_is_missing(home: Path) -> None:
    password = "reader-pa55word"
    with pymongo.MongoClient[dict[str, Any]](embedded.uri()) as client:
        client.admin.command("createUser", "reader", pwd=password, roles=[{"role": "read", "db": "relata"}])
    address = f"127.0.0.1:{embedded.status().port}/relata?authSource=admin"
    uri = f"mongodb://reader:{password}@{address}"
    assert relata(uri, "stats", "--json").json["total"] == 0
    refusal = relata(uri, "jobs", "cancel", "x").refused()
    assert "not authorized" in refusal
    assert refusal.endswith("give its user the role readWrite on this database")
    assert len(refusal) < 250
    doctor = relata(uri, "doctor", "--json")
    writes = next(check for check in doctor.json["checks"] if check["name"] == "writes")
    assert (doctor.code, writes["status"]) == (1, "error")
    assert "role readWrite" in writes["mend"]
    wrong = relata(f"mongodb://reader:{password}x@{address}", "stats").refused()
    assert "check the user and the password in the broker URL" in wrong
    assert password not in refusal + doctor.out + wrong
