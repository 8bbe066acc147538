"""``relata``: help, counts, queues, the doctor, and what is said to bad input."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pymongo
import pytest
from click.testing import CliRunner

from relata_celery.cli import relata as command
from relata_celery.store.client import Database, connect
from relata_celery.store.codec import COLLECTION
from relata_celery.store.jobs import Jobs
from tests.commands import Done, relata
from tests.store.builders import claimed, edit, expire_lease, failure, new_job, success

SECRET = "pa55word"

OWN_APP = """
import os
import relata_celery
from celery import Celery

app = Celery("proj", broker=os.environ["BROKER"], task_cls="relata_celery:LeasedTask")
app.conf.update({"relata_lease_duration": 90, "accept_content": ["json", "pickle"]})
"""


@pytest.fixture
def store(database_uri: str) -> Iterator[Database]:
    database = connect(database_uri)
    yield database
    database.close()


@pytest.fixture
def jobs(store: Database) -> Jobs:
    return Jobs(store, retention_failed_s=3600.0)


def checks(done: Done) -> dict[str, dict[str, str]]:
    """The doctor's findings by name."""
    return {check["name"]: check for check in done.json["checks"]}


# -- counts ------------------------------------------------------------------------------------


def test_stats_count_by_state_queue_and_type_and_tell_what_is_stuck(
    jobs: Jobs, store: Database, database_uri: str
) -> None:
    assert relata(database_uri, "stats").out == "No jobs yet.\n"
    jobs.settle([success(claimed(jobs, type="bill"), followups=({"queue": "default"},))])
    jobs.settle([failure(claimed(jobs, type="bill"))])
    jobs.enqueue([new_job("due", queue="other", type="ship")])
    expire_lease(store, claimed(jobs, job_id="dead", type="ship").claim.id)
    with pymongo.MongoClient(database_uri) as client:
        late = [{"$set": {"run_at": {"$subtract": ["$$NOW", 90_000]}}}]
        client.get_default_database()[COLLECTION].update_one({"_id": "due"}, late)

    done = relata(database_uri, "stats", "--json")
    assert (done.code, done.err) == (0, "")
    counts = done.json
    assert counts["total"] == 4
    assert counts["by_state"] == {"queued": 1, "running": 1, "succeeded": 1, "failed": 1, "cancelled": 0}
    assert counts["by_queue"]["default"]["failed"] == 1
    assert counts["by_queue"]["other"]["queued"] == 1
    assert counts["by_type"]["bill"]["succeeded"] == 1
    assert 90 <= counts["oldest_due_s"] == counts["by_queue"]["other"]["oldest_due_s"] < 200
    assert (counts["expired_leases"], counts["pending_followups"]) == (1, 1)

    table = relata(database_uri, "stats").out
    assert re.search(r"(?m)^other +1 +- +- +- +- +\d m \d+ s$", table)
    assert re.search(r"(?m)^all +1 +1 +1 +1 +-$", table)
    assert "1 lease(s) ran out" in table


def test_queues_are_those_that_hold_jobs_and_those_that_the_app_consumes(
    jobs: Jobs, database_uri: str
) -> None:
    jobs.enqueue([new_job(queue="[red]x[/red]") for _ in range(2)])
    listed = relata(database_uri, "queues", "list", "--json").json
    assert [(row["queue"], row["queued"], row["running"]) for row in listed] == [
        ("[red]x[/red]", 2, 0),
        ("ai", 0, 0),
        ("default", 0, 0),
    ]
    assert re.search(r"(?m)^\[red\]x\[/red\] +2 +0 ", relata(database_uri, "queues", "list").out)


# -- the doctor --------------------------------------------------------------------------------


def test_the_doctor_finds_nothing_wrong_with_a_replica_set(jobs: Jobs, database_uri: str) -> None:
    jobs.enqueue([new_job()])
    done = relata(database_uri, "doctor", "--json", env={"RELATA_MAX_ATTEMPTS": "7"})
    assert (done.code, done.err) == (0, "")
    assert done.json["ok"] is True
    found = checks(done)
    assert set(found) == {
        *("settings", "content", "connection", "version", "topology"),
        *("change streams", "indexes", "writes", "clock"),
    }
    assert {check["status"] for check in found.values()} == {"ok"}
    assert done.json["settings"]["max_attempts"] == {"value": 7, "source": "environment"}
    assert done.json["settings"]["poll_interval"] == {"value": 1.0, "source": "default"}
    page = relata(database_uri, "doctor")
    assert page.code == 0
    assert page.out.rstrip().endswith("9 ok, 0 warnings, 0 errors")


def test_the_doctor_changes_nothing_and_tells_missing_and_differing_indexes(
    store: Database, database_uri: str
) -> None:
    done = relata(database_uri, "doctor", "--json")
    assert (done.code, checks(done)["indexes"]["status"]) == (0, "warning")
    with pymongo.MongoClient(database_uri) as client:
        database = client.get_default_database()
        assert database.list_collection_names() == []
        database[COLLECTION].create_index("unique_live", name="relata_unique")
    done = relata(database_uri, "doctor", "--json")
    indexes = checks(done)["indexes"]
    assert (done.code, done.json["ok"], indexes["status"]) == (1, False, "error")
    assert "relata_unique" in indexes["found"]
    assert "dropIndex" in indexes["mend"]


def test_the_doctor_says_what_a_standalone_server_lacks(standalone_uri: str) -> None:
    done = relata(standalone_uri, "doctor", "--json")
    found = checks(done)
    assert done.code == 0
    assert (found["topology"]["status"], found["change streams"]["status"]) == ("warning", "warning")
    assert "--replSet" in found["topology"]["mend"]
    assert found["writes"]["status"] == "ok"


def test_the_doctor_knows_settings_by_where_they_came_from_and_unsafe_content(
    database_uri: str, tmp_path: Path
) -> None:
    (tmp_path / "own_app.py").write_text(OWN_APP)
    env = {"BROKER": f"relata+{database_uri}", "RELATA_LEASE_DURATON": "5"}
    done = relata(None, "doctor", "--json", app="own_app", env=env, folder=tmp_path)
    assert done.code == 1
    assert done.json["settings"]["lease_duration"] == {"value": 90.0, "source": "configuration"}
    found = checks(done)
    assert found["content"]["status"] == "error"
    assert "pickle" in found["content"]["found"]
    assert "did you mean RELATA_LEASE_DURATION?" in found["environment"]["found"]
    allowed = relata(
        None,
        "doctor",
        "--json",
        app="own_app",
        env={**env, "RELATA_ALLOW_UNSAFE_CONTENT": "true", "RELATA_HEARTBEAT_PERIOD": "80"},
        folder=tmp_path,
    )
    assert checks(allowed)["content"]["status"] == "warning"
    assert "RELATA_HEARTBEAT_PERIOD: is '80'" in checks(allowed)["settings"]["found"]
    assert allowed.json["settings"] == {}


def test_the_doctor_without_a_connection_says_so_and_shows_no_password() -> None:
    done = relata(f"mongodb://me:{SECRET}@127.0.0.1:9/x?serverSelectionTimeoutMS=300", "doctor", "--json")
    assert (done.code, done.err) == (1, "")
    found = checks(done)
    assert found["connection"]["status"] == "error"
    assert "mongodb://me:***@127.0.0.1:9/x" in found["connection"]["found"]
    assert "version" not in found
    assert SECRET not in done.out


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("jobs", "list", "--state", "ended"), "'ended' is not one of queued, running, succeeded, failed"),
        (("jobs", "list", "--error-class", "bad"), "'bad' is not one of transient, permanent"),
        (("jobs", "list", "--sort", "size"), "'size' is not one of created_at"),
        (("jobs", "list", "--since", "yesterday"), "'yesterday' is no time: write 30m, 2h or 3d"),
        (("jobs", "list", "--limit", "0"), "0 is not in the range"),
        (("jobs", "list", "--colour"), "No such option"),
        (("jobs", "show"), "Missing argument 'ID'"),
        (("jbos",), "jobs"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(command, arguments, prog_name="celery relata")
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert line.startswith("Error: ")
    assert message in line
    assert line.endswith("--help")


def test_under_celery_a_wrong_command_line_is_one_line_too(database_uri: str) -> None:
    refusal = relata(database_uri, "jobs", "list", "--state", "ended").refused(2)
    assert refusal.startswith(
        "Error: Invalid value for '--state': 'ended' is not one of queued, running, succeeded"
    )
    assert refusal.endswith("celery relata jobs list --help")
    assert "\n" not in refusal


def test_times_that_contradict_each_other_are_refused(database_uri: str) -> None:
    refusal = relata(database_uri, "jobs", "list", "--since", "1h", "--until", "2h").refused(2)
    assert "is not before --until" in refusal


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            f"mongodb://me:{SECRET}@127.0.0.1:9/x?serverSelectionTimeoutMS=300",
            "MongoDB cannot be reached now",
        ),
        (f"mongodb://me:{SECRET}/@127.0.0.1:9/x", "cannot be used"),
        ("mongodb://127.0.0.1:9/a b", "Bad database name"),
    ],
)
def test_no_connection_is_one_line_without_the_password(uri: str, message: str) -> None:
    refusal = relata(uri, "jobs", "list").refused()
    assert message in refusal
    assert "\n" not in refusal
    assert SECRET not in refusal
    assert len(refusal) < 300


def test_a_wrong_password_is_told_from_a_missing_right(mongo_uri: str) -> None:
    address = mongo_uri.partition("://")[2].partition("/")[0].rpartition("@")[2]
    refusal = relata(
        f"mongodb://me:{SECRET}@{address}/x?directConnection=true&authSource=admin", "stats"
    ).refused()
    assert "check the user and the password in the broker URL" in refusal
    assert SECRET not in refusal


def test_another_broker_and_a_broken_configuration_are_named(tmp_path: Path) -> None:
    (tmp_path / "own_app.py").write_text(OWN_APP)
    other = {"BROKER": f"redis://:{SECRET}@localhost/0"}
    refusal = relata(None, "stats", app="own_app", env=other, folder=tmp_path).refused()
    assert "needs relata+mongodb://host/database" in refusal
    assert SECRET not in refusal
    broken = 'from celery import Celery\napp = Celery("x")\napp.config_from_object("no_such_module")\n'
    (tmp_path / "broken_app.py").write_text(broken)
    refusal = relata(None, "stats", app="broken_app", folder=tmp_path).refused()
    assert "the app's configuration cannot be read: ModuleNotFoundError" in refusal
    refusal = relata("mongodb://127.0.0.1:9/x", "stats", env={"RELATA_LEASE_DURATION": "abc"}).refused()
    assert refusal == "Error: RELATA_LEASE_DURATION: is 'abc', must be seconds from 0.5 to 86400"


def test_a_job_that_does_not_exist_is_status_1(database_uri: str) -> None:
    assert "there is no job 'nope'" in relata(database_uri, "jobs", "show", "nope").refused()
    assert relata(database_uri, "jobs", "cancel", "nope").code == 1


@pytest.mark.parametrize(
    "words",
    [
        *("stats", "doctor", "demo", "jobs list", "jobs show", "jobs retry", "jobs cancel", "jobs purge"),
        *("queues list", "queues pause", "queues resume", "types pause", "types resume"),
        *("limits list", "limits show", "limits set", "limits reset"),
        *("embedded start", "embedded stop", "embedded status"),
    ],
)
def test_every_command_has_help_with_examples(words: str) -> None:
    done = CliRunner().invoke(command, [*words.split(), "--help"])
    assert done.exit_code == 0
    assert done.output.startswith("Usage: ")
    assert words == "demo" or "Example" in done.output


def test_under_celery_the_commands_are_listed() -> None:
    done = relata("mongodb://127.0.0.1:9/x", "--help")
    assert done.code == 0
    assert re.findall(r"(?m)^  ([a-z]+)  ", done.out) == [
        "demo",
        "doctor",
        "embedded",
        "jobs",
        "limits",
        "queues",
        "stats",
        "types",
    ]


def test_a_document_that_claims_an_odd_state_is_counted_too(
    jobs: Jobs, store: Database, database_uri: str
) -> None:
    jobs.enqueue([new_job("odd")])
    edit(store, "odd", state="bored")
    assert relata(database_uri, "stats", "--json").json["by_state"]["bored"] == 1
