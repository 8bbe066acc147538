"""Results and states, as a caller sees them."""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import states
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult

from tests.celery.apps_behaviour import ImportableError
from tests.celery.behaviour import Site
from tests.waiting import wait_until


@pytest.mark.parametrize("value", [None, True, 0, -1.5, "", "ü\n", [], {}, [1, [2, {"a": None}]], {"k": {"ü": 1}}])
def test_json_comes_back_as_it_was(site: Site, value: Any) -> None:
    result = site.send("echo", value)
    assert site.get(result) == value
    assert result.state == states.SUCCESS
    assert result.successful()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("datetime", datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=timezone.utc)),
        ("date", date(2026, 1, 2)),
        ("decimal", Decimal("12.340")),
        ("uuid", UUID("12345678-1234-5678-1234-567812345678")),
        ("tuple", [1, 2]),
        ("bytes", b"\x00\xff"),
        ("nested", {"a": [1, {"b": None}], "ü": "é"}),
    ],
)
def test_what_celerys_json_knows_comes_back_typed(site: Site, kind: str, value: Any) -> None:
    # (a date comes back as a datetime, as with Celery's other backends)
    returned = site.get(site.send("typed", kind))
    assert returned == value or (kind == "date" and returned.date() == value)


def test_a_result_has_name_retries_and_time(site: Site) -> None:
    result = site.send("add", 1, 2)
    site.get(result)
    assert (result.name, result.retries, result.queue) == ("add", 0, "celery")
    assert isinstance(result.date_done, datetime)
    assert result.traceback is None


@pytest.mark.parametrize(
    ("kind", "cls"), [("value", ValueError), ("runtime", RuntimeError), ("importable", ImportableError)]
)
def test_a_failure_raises_the_original_exception(site: Site, kind: str, cls: type[Exception]) -> None:
    result = site.send("fail_as", kind, "the text")
    with pytest.raises(cls, match="^the text$"):
        site.get(result)
    assert result.state == states.FAILURE
    assert result.failed()
    assert isinstance(result.result, cls)
    assert "fail_as" in result.traceback
    assert cls.__name__ in result.traceback


def test_a_failure_whose_class_is_nowhere_keeps_its_name_and_text(site: Site) -> None:
    result = site.send("fail_as", "local", "the text")
    with pytest.raises(Exception, match="the text") as caught:
        site.get(result)
    assert type(caught.value).__name__ == "NowhereError"


def test_a_failure_need_not_be_raised(site: Site) -> None:
    result = site.send("fail_as", "value", "the text")
    returned = site.get(result, propagate=False)
    assert isinstance(returned, ValueError)
    assert str(returned) == "the text"


def test_an_unknown_id_is_pending(site: Site) -> None:
    result = AsyncResult(str(uuid4()), app=site.app)
    assert result.state == states.PENDING
    assert result.result is None
    with pytest.raises(CeleryTimeoutError):
        result.get(timeout=0.05)


def test_a_running_job_is_started(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "held"
    result = site.send("hold", str(path))
    wait_until(path.exists, timeout=60)
    assert result.state == states.STARTED
    assert not result.ready()
    path.unlink()
    assert site.get(result) == "released"


def test_a_waiting_job_is_pending_then_retry_between_attempts(site: Site) -> None:
    later = site.apply("add", 1, 2, countdown=3600)
    assert later.state == states.PENDING
    result = site.send("retry_times", 1, 3600)
    site.wait_state(result, "queued")
    wait_until(lambda: result.state == states.RETRY, timeout=60)
    assert len(list(site.jobs.find({"_id": result.id}))) == 1
    assert site.get(result)["retries"] == 1
    site.jobs.delete_one({"_id": later.id})


def test_a_state_of_the_handlers_own_shows_while_it_runs(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "held"
    result = site.send("custom_state", str(path))
    wait_until(path.exists, timeout=60)
    assert (result.state, result.info) == ("BREWING", {"cups": 3})
    path.unlink()
    wait_until(path.exists, timeout=60)  # the second attempt, which has said nothing yet
    assert result.state == states.STARTED
    path.unlink()
    assert site.get(result) == "released"
    assert result.state == states.SUCCESS


def test_an_ignored_result_is_not_kept(site: Site) -> None:
    results = [site.send("ignored", "by the task"), site.apply("echo", "by the call", ignore_result=True)]
    for result in results:
        document = site.wait_end(result)
        assert document["state"] == "succeeded"
        assert "result" not in document
        assert AsyncResult(result.id, app=site.app).state == states.SUCCESS
        assert AsyncResult(result.id, app=site.app).get(timeout=5) is None


def test_a_call_can_keep_a_result_that_the_task_ignores(site: Site) -> None:
    assert site.get(site.apply("ignored", "kept", ignore_result=False)) == "kept"


def test_forgetting_drops_the_result_and_keeps_the_record(site: Site) -> None:
    result = site.send("add", 1, 2)
    site.get(result)
    result.forget()
    again = AsyncResult(result.id, app=site.app)
    assert again.state == states.PENDING
    assert again.result is None
    document = site.document(result)
    assert document["state"] == "succeeded"
    assert "result" not in document


def test_a_result_that_exists_is_told_so(site: Site) -> None:
    result = site.send("add", 1, 2)
    site.get(result)
    assert site.app.backend.task_result_exists(result.id)
    assert not site.app.backend.task_result_exists(str(uuid4()))


def test_the_same_id_twice_is_one_job(site: Site) -> None:
    task_id = str(uuid4())
    first = site.apply("add", 1, 2, task_id=task_id)
    assert site.get(first) == 3
    second = site.apply("add", 5, 5, task_id=task_id)
    assert second.get(timeout=5) == 3
    assert site.jobs.count_documents({"_id": task_id}) == 1
