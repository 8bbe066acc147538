"""Plain Celery tasks, which are no leased tasks, on this broker and this backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import states

from tests.celery.behaviour import PATIENCE_S, Site
from tests.waiting import wait_until


def gone(site: Site, result: Any) -> None:
    wait_until(
        lambda: site.jobs.find_one({"_id": result.id}) is None,
        timeout=60,
        message=f"the document of {result} is removed\n{site.worker.log[-2000:]}",
    )


@pytest.mark.parametrize("name", ["plain_add", "plain_late"])
def test_it_runs_its_result_is_stored_and_its_document_removed(site: Site, name: str) -> None:
    result = site.send(name, 1, 2)
    assert result.get(timeout=PATIENCE_S) == 3
    assert result.state == states.SUCCESS
    gone(site, result)
    assert result.get(timeout=5) == 3


def test_it_fails(site: Site) -> None:
    result = site.send("plain_fail")
    with pytest.raises(ValueError, match="plainly"):
        result.get(timeout=PATIENCE_S)
    assert result.state == states.FAILURE
    assert "plainly" in result.traceback
    gone(site, result)


def test_it_is_retried_as_celery_does(site: Site) -> None:
    result = site.send("plain_retry", 2)
    assert result.get(timeout=PATIENCE_S) == 2
    gone(site, result)


def test_a_result_is_forgotten(site: Site) -> None:
    result = site.send("plain_add", 1, 2)
    result.get(timeout=PATIENCE_S)
    result.forget()
    assert site.app.AsyncResult(result.id).state == states.PENDING


def test_plain_and_leased_share_the_slots(wide_site: Site, tmp_path: Path) -> None:
    paths = [tmp_path / f"held-{number}" for number in range(2)]
    results = [wide_site.send("plain_hold", str(paths[0])), wide_site.send("hold", str(paths[1]))]
    wait_until(lambda: all(path.exists() for path in paths), timeout=60)
    waiting = wide_site.send("add", 1, 2)
    # It may be claimed ahead while the others have only just begun; then it is given back.
    wait_until(lambda: wide_site.state(waiting) == "queued", timeout=60)
    for path in paths:
        path.unlink()
    assert wide_site.get(waiting) == 3
    assert [result.get(timeout=PATIENCE_S) for result in results] == ["released", "released"]


def test_a_plain_and_a_leased_task_in_one_chain(site: Site) -> None:
    tasks = site.app.tasks
    result = (tasks["plain_add"].s(1, 2) | tasks["step"].s(5) | tasks["plain_add"].s(10)).apply_async()
    assert result.get(timeout=PATIENCE_S) == 18
