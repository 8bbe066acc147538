"""Hooks and signals: each once for each end, with what Celery says they are given."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.celery.apps_behaviour import SECRET
from tests.celery.behaviour import Site
from tests.waiting import wait_until

ONE_RUN = ["task_prerun", "before_start"]


def told(site: Site, job_id: str, runs: int) -> dict[str, list[dict[str, Any]]]:
    """What the journal says of a job, by hook, once the last of its runs has said all."""
    wait_until(
        lambda: len(site.journal("task_postrun", id=job_id)) >= runs and site.journal("task_received", id=job_id),
        timeout=60,
        message=f"hooks of {job_id}",
    )
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in site.journal(id=job_id):
        lines.setdefault(line["what"], []).append(line)
    return lines


def test_a_success_is_told_once(site: Site) -> None:
    result = site.send("hooked", "succeed", word="done")
    assert site.get(result) == "done"
    lines = told(site, result.id, 1)
    assert Counter({name: len(entries) for name, entries in lines.items()}) == Counter(
        [*ONE_RUN, "on_success", "after_return", "task_success", "task_postrun", "task_received"]
    )
    assert lines["before_start"][0]["args"] == ["succeed"]
    assert lines["before_start"][0]["kwargs"] == {"word": "done"}
    assert lines["on_success"][0]["retval"] == "done"
    assert lines["task_success"][0]["result"] == "done"
    assert lines["task_postrun"][0]["state"] == "SUCCESS"
    assert lines["after_return"][0]["status"] == "SUCCESS"


@pytest.mark.parametrize("how", ["fail", "panic"])
def test_a_final_failure_is_told_once(site: Site, how: str) -> None:
    result = site.apply("hooked", how, max_attempts=1)
    assert site.wait_end(result)["state"] == "failed"
    lines = told(site, result.id, 1)
    assert Counter({name: len(entries) for name, entries in lines.items()}) == Counter(
        [*ONE_RUN, "on_failure", "after_return", "task_failure", "task_postrun", "task_received"]
    )
    assert lines["on_failure"][0]["einfo"] == "ExceptionInfo"
    assert lines["task_failure"][0]["args"] == [how]
    expected = "PermanentError('for good')" if how == "fail" else "job handler raised KeyError at "
    for line in (lines["on_failure"][0]["exc"], lines["task_failure"][0]["exception"]):
        assert expected in line
        assert SECRET not in line
    assert lines["after_return"][0]["status"] == "FAILURE"
    assert lines["task_postrun"][0]["state"] == "FAILURE"


@pytest.mark.parametrize("how", ["retry", "transient"])
def test_a_retry_is_told_once_and_then_the_success(site: Site, how: str) -> None:
    result = site.send("hooked", how, "in the end")
    assert site.get(result) == "in the end"
    lines = told(site, result.id, 2)
    first_run = Counter([*ONE_RUN, "on_retry", "task_retry", "task_postrun", "task_received"])
    second_run = Counter([*ONE_RUN, "on_success", "task_success", "task_postrun", "after_return", "task_received"])
    assert Counter({name: len(entries) for name, entries in lines.items()}) == first_run + second_run
    assert "once more" in lines["on_retry"][0]["exc"]
    assert lines["on_retry"][0]["args"] == [how, "in the end"]
    assert "once more" in lines["task_retry"][0]["reason"]
    # after_return is called for ends only, as ever in Celery.
    assert [line["status"] for line in lines["after_return"]] == ["SUCCESS"]


def test_a_job_revoked_while_it_runs_is_told_once(wide_site: Site, tmp_path: Path) -> None:
    site, path = wide_site, tmp_path / "held"
    result = site.send("hooked_hold", str(path))
    wait_until(path.exists, timeout=60)
    site.app.control.revoke(result.id, terminate=True)
    site.wait_state(result, "cancelled")
    wait_until(lambda: site.journal("task_revoked", id=result.id), timeout=60)
    path.unlink()
    site.works(4)
    (line,) = site.journal("task_revoked", id=result.id)
    assert line["terminated"] is True
    assert line["expired"] is False
    for hook in ("on_success", "on_failure", "task_success", "task_failure", "on_retry"):
        assert site.journal(hook, id=result.id) == []
