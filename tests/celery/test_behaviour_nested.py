"""Tasks without a worker, tasks within tasks, and what a handler learns of its own job."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import states

from relata_celery import RelataError, current_job
from tests.celery.apps_behaviour import ImportableError, make_app
from tests.celery.behaviour import Site, Sites
from tests.waiting import wait_until

NOWHERE = "mongodb://localhost:1/none"


def test_a_task_called_is_a_function() -> None:
    app = make_app(NOWHERE)
    assert app.tasks["add"](1, 2) == 3
    with pytest.raises(ImportableError):
        app.tasks["fail_as"]("importable")
    with pytest.raises(RelataError, match="no job is running here"):
        app.tasks["describes_itself"]()
    app.close()


def test_apply_runs_here_without_a_database() -> None:
    app = make_app(NOWHERE)
    assert app.tasks["add"].apply((1, 2)).get() == 3
    failed = app.tasks["fail_as"].apply(("value", "here"))
    assert failed.state == states.FAILURE
    with pytest.raises(ValueError, match="here"):
        failed.get()
    app.close()


def test_retry_works_in_apply() -> None:
    app = make_app(NOWHERE)
    assert app.tasks["retry_changed"].apply((1,)).get() == [2, 10]
    assert app.tasks["retry_for_ever"].apply((6,)).get() == 6
    assert app.tasks["autoretried"].apply((2,)).get() == 2
    with pytest.raises(ImportableError):
        app.tasks["retry_exc"].apply().get()
    app.close()


def test_the_current_job_in_apply() -> None:
    app = make_app(NOWHERE)
    described = app.tasks["describes_itself"].apply(task_id="my-id").get()
    assert (described["id"], described["type"], described["attempt"], described["max_attempts"]) == (
        "my-id", "describes_itself", 1, 4,
    )  # fmt: skip
    assert described["lease_left_s"] > 0
    with pytest.raises(RelataError):
        current_job()
    app.close()


def test_always_eager() -> None:
    app = make_app(NOWHERE, task_always_eager=True)
    assert app.tasks["add"].delay(1, 2).get() == 3
    assert app.tasks["retry_times"].apply_async((0,), item_id="x", max_attempts=2, countdown=5).successful() is False
    assert app.tasks["retry_changed"].delay(1).get() == [2, 10]
    assert (app.tasks["step"].s(1) | app.tasks["step"].s(2)).apply_async().get() == 3
    with pytest.raises(Exception, match="on purpose"):
        app.tasks["fail_as"].delay("value").get()
    app.close()


def test_a_task_publishes_another(site: Site) -> None:
    result = site.send("sends_another")
    own, other = site.get(result)
    assert own == result.id != other
    document = site.wait_end(other)
    assert document["parent_id"] == document["root_id"] == own
    assert document["state"] == "succeeded"


def test_a_handler_may_wait_for_another_job(wide_site: Site) -> None:
    assert wide_site.get(wide_site.send("waits_for_another")) == 3


def test_waiting_without_leave_is_refused_as_in_celery(site: Site) -> None:
    document = site.wait_end(site.apply("waits_without_leave", max_attempts=1))
    assert document["state"] == "failed"
    assert "Never call result.get() within a task" in document["error"]


def test_the_current_job_tells_all(site: Site) -> None:
    result = site.apply("describes_itself", item_id="doc-7")
    described = site.get(result)
    assert 0 < described.pop("lease_left_s") <= 3.5
    assert described == {
        "id": result.id,
        "type": "describes_itself",
        "attempt": 1,
        "max_attempts": 4,
        "fence": site.document(result)["fence"],
        "item_id": "doc-7",
    }


def test_progress_is_shown(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "held"
    result = site.send("progresses", str(path))
    wait_until(path.exists, timeout=60)
    progress = site.document(result)["progress"]
    assert (progress["fraction"], progress["note"]) == (0.25, "reading")
    path.unlink()
    site.wait_end(result)
    assert site.document(result)["progress"]["fraction"] == 1


def test_wrong_progress_is_the_handlers_error(site: Site) -> None:
    document = site.wait_end(site.apply("progresses_wrongly", max_attempts=1))
    assert "fraction must be from 0 to 1" in document["error"]


def test_a_cancelled_job_is_told_and_stays_cancelled(site: Site, tmp_path: Path) -> None:
    from relata_celery import JobStore

    path = tmp_path / "checking"
    result = site.send("checks", str(path))
    wait_until(path.exists, timeout=60)
    assert JobStore.from_app(site.app).cancel(result.id)[result.id].changed
    assert result.state == states.REVOKED
    wait_until(lambda: site.journal("checks", id=result.id), timeout=60, message=site.worker.log[-2000:])
    assert site.journal("checks", id=result.id)[0]["told"] == "JobCancelled"
    site.works(2)
    assert site.state(result) == "cancelled"


def test_a_cancelled_waiting_job_never_runs(sites: Sites) -> None:
    from relata_celery import JobStore

    site = sites.of("threads")
    result = site.apply("ordered", "never", countdown=3600)
    assert JobStore.from_app(site.app).cancel(result.id)[result.id].changed
    assert site.state(result) == "cancelled"
    site.hasten(result)
    site.works(2)
    assert site.journal("ordered", mark="never") == []
