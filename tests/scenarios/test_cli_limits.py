"""``relata limits``: list, show, set, reset, and workers that obey."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from relata_celery import JobStore
from relata_celery.domain.job import JobState
from relata_celery.domain.limits import LimitSpec
from relata_celery.store.client import connect
from relata_celery.store.limits import Limits
from tests.celery.apps_limits import make_app
from tests.commands import relata
from tests.waiting import wait_until
from tests.workers import running_worker


@pytest.fixture
def limits(database_uri: str) -> Iterator[Limits]:
    database = connect(database_uri)
    yield Limits(database)
    database.close()


def test_limits_are_listed_and_shown_with_their_holders(limits: Limits, database_uri: str) -> None:
    assert "No limit was used or set yet" in relata(database_uri, "limits", "list").out
    assert relata(database_uri, "limits", "list", "--json").json == []
    limits.ask("ai", LimitSpec(2), want=["s1"], owner="host-1", job_id="job-7", lease_s=60.0)
    (limit,) = relata(database_uri, "limits", "list", "--json").json
    assert (limit["limit"], limit["concurrency"], limit["rate"], limit["source"]) == ("ai", 2, None, "settings")
    assert (limit["in_use"], limit["slots"][0]["job"], limit["waiters"]) == (1, "job-7", [])
    assert re.search(r"(?m)^ai +1 +2 +any +- +0 +settings$", relata(database_uri, "limits", "list").out)
    page = relata(database_uri, "limits", "show", "ai").out
    assert re.search(r"(?m)^in use +1 of 2$", page)
    assert re.search(r"(?m)^host-1 +job-7 +1 ", page)
    assert relata(database_uri, "limits", "show", "ai", "--json").json["in_use"] == 1


def test_what_is_set_by_hand_stays_until_it_is_reset(limits: Limits, database_uri: str) -> None:
    done = relata(database_uri, "limits", "set", "ai", "--concurrency", "4", "--rate", "60/m", "--burst", "10")
    assert done.out == "limit ai: 4 at once, rate 60/m, 10 at once; 0 in use now\n"
    done = relata(database_uri, "limits", "set", "ai", "--concurrency", "none", "--json")
    assert done.json["concurrency"] is None
    assert done.json["rate"] == {"count": 60.0, "period_s": 60.0, "burst": 10.0}
    assert done.json["source"] == "hand"
    assert relata(database_uri, "limits", "set", "ai", "--rate", "none", "--json").json["rate"] is None
    assert relata(database_uri, "limits", "reset", "ai", "--json").json["source"] == "settings"
    assert relata(database_uri, "limits", "reset", "nobody").refused(1).startswith("Error: there is no limit 'nobody'")
    assert relata(database_uri, "limits", "show", "nobody").refused(1).startswith("Error: there is no limit 'nobody'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to set: give --concurrency, --rate, or both"),
        (("--concurrency", "many"), "concurrency is 'many', must be a whole number from 0, or none"),
        (("--concurrency", "-1"), "concurrency is -1, must be a whole number from 0 to 10000, or None"),
        (("--concurrency", "99999"), "must be a whole number from 0 to 10000"),
        (("--rate", "fast"), "'fast' is not a rate such as"),
        (("--rate", "0/m"), "is not a rate such as"),
        (("--burst", "3"), "a burst is part of a rate"),
        (("--rate", "60/m", "--burst", "0"), "a burst of at least 1"),
        (("--rate", "60/m", "--burst", "nan"), "a burst of at least 1"),
        (("--rate", "60/m", "--burst", "soon"), "'soon' is not a valid float"),
    ],
)
def test_a_wrong_value_is_refused_with_the_reason_and_changes_nothing(
    limits: Limits, database_uri: str, arguments: tuple[str, ...], message: str
) -> None:
    assert message in relata(database_uri, "limits", "set", "ai", *arguments).refused(2)
    assert limits.get("ai") is None


def test_a_running_worker_obeys_what_is_set(database_uri: str, tmp_path: Path) -> None:
    assert relata(database_uri, "limits", "set", "ai", "--concurrency", "0").code == 0
    app = make_app(database_uri)
    store = JobStore.from_app(app)
    env = {"RELATA_TEST_FOLDER": str(tmp_path), "RELATA_AI_CONCURRENCY": "2"}
    with running_worker("tests.celery.apps_limits", database_uri, tmp_path, "-c", "2", env=env):
        waiting = app.tasks["ask_model"].delay(0.0)
        marker = app.tasks["plain"].delay()
        wait_until(lambda: _state(store, marker.id) is JobState.SUCCEEDED, timeout=60, message="the other job is done")
        assert _state(store, waiting.id) is JobState.QUEUED
        assert relata(database_uri, "limits", "set", "ai", "--concurrency", "1").code == 0
        wait_until(lambda: _state(store, waiting.id) is JobState.SUCCEEDED, timeout=60, message="it is done")
    app.close()


def _state(store: JobStore, job_id: str) -> JobState | None:
    job = store.get(job_id)
    return None if job is None else job.state
