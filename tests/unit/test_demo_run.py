"""The command before any job: what it refuses, and where it puts its database."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from relata_celery.cli.demo import demo
from relata_celery.demo.plan import make_plan
from relata_celery.demo.run import run_demo
from relata_celery.demo.session import Options
from relata_celery.demo.storage import from_environment, with_database
from relata_celery.demo.worker import Worker, worker_environment
from relata_celery.domain.errors import PermanentError


@pytest.mark.parametrize(
    ("uri", "with_new"),
    [
        ("mongodb://h", "mongodb://h/new"),
        ("mongodb://h1,h2:3/old?replicaSet=rs0", "mongodb://h1,h2:3/new?replicaSet=rs0"),
        ("mongodb://h/?replicaSet=rs0", "mongodb://h/new?replicaSet=rs0"),
        ("relata+mongodb+srv://u:p@h/old", "mongodb+srv://u:p@h/new?authSource=old"),
        ("mongodb://u:p@h/old?authSource=admin", "mongodb://u:p@h/new?authSource=admin"),
        ("mongodb://u:p@h/?tls=true", "mongodb://u:p@h/new?tls=true"),
    ],
)
def test_a_run_has_a_database_of_its_own_on_the_same_server(uri: str, with_new: str) -> None:
    assert with_database(uri, "new") == with_new


def test_another_scheme_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match="mongodb://") as raised:
        with_database("redis://:secret@h/0", "new")
    assert "secret" not in str(raised.value)


def test_a_missing_folder_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(tmp_path / "nowhere") == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_a_folder_without_documents_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photo.jpeg").write_bytes(b"x")
    assert run_demo(tmp_path) == 2
    assert ".pdf" in capsys.readouterr().err


def test_a_time_limit_of_nothing_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(timeout_s=0) == 2
    assert "--jobs-timeout" in capsys.readouterr().err


def test_a_wrong_uri_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELATA_MONGODB_URI", "redis://h")
    assert run_demo() == 2
    assert "RELATA_MONGODB_URI" in capsys.readouterr().err


def test_a_missing_extra_is_one_line_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bs4" else object())
    assert run_demo() == 2
    assert capsys.readouterr().err == (
        "error: the demo needs beautifulsoup4: pip install 'relata_celery[demo]'\n"
    )


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, dict[str, object]]] = []

    def record(documents: object, **options: object) -> int:
        seen.append((documents, options))
        return 1

    monkeypatch.setattr("relata_celery.cli.demo.run_demo", record)
    runner = CliRunner()
    given = ["--documents", "d", "--keep", "--json", "--no-crash", "--jobs-timeout", "9"]
    assert runner.invoke(demo, given).exit_code == 1
    assert runner.invoke(demo, []).exit_code == 1
    assert seen[0] == ("d", {"keep": True, "as_json": True, "crash": False, "timeout_s": 9.0})
    assert seen[1] == (None, {"keep": False, "as_json": False, "crash": True, "timeout_s": 180.0})


def test_options_survive_the_way_to_the_session() -> None:
    options = Options("/d", "relata_demo_x", ("SOURCES.md",), True, False, False, 9.5)
    assert Options.load(options.dump()) == options


def test_an_unreadable_document_is_planned_as_one_failing_job(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    plan = make_plan([("empty.txt", tmp_path / "empty.txt")])
    assert plan.expected() == 1
    assert "empty" in (plan.documents[0].problem or "")


def test_the_jobs_say_what_they_lack_without_a_database() -> None:
    with pytest.raises(PermanentError, match="RELATA_MONGODB_URI"):
        from_environment({})


def test_a_worker_may_be_stopped_twice_and_before_it_was_started(tmp_path: Path) -> None:
    environment = worker_environment({}, "mongodb://h/d", tmp_path, {"RELATA_DEMO_MODEL": "m"})
    worker = Worker(environment, tmp_path / "log", "w")
    worker.kill()
    worker.stop()
    worker.stop()
    assert worker.ended is None
    assert worker.last_words() == ""
    assert environment["RELATA_MONGODB_URI"] == "mongodb://h/d"
    assert float(environment["RELATA_HEARTBEAT_PERIOD"]) < float(environment["RELATA_LEASE_DURATION"]) / 2
