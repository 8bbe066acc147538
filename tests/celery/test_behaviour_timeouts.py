"""A job's own time: told when it runs out, ended when it does not listen, in every pool."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from relata_celery import JobTimeout
from tests.celery.behaviour import Site, Sites
from tests.waiting import wait_until


def test_a_job_that_takes_too_long_is_a_timeout_and_not_retried(site: Site) -> None:
    result = site.send("too_long")
    document = site.wait_end(result)
    assert (document["state"], document["error_class"]) == ("failed", "timeout")
    assert document["attempts"] == 1
    assert site.outcomes(result) == ["failed"]
    with pytest.raises(JobTimeout, match="time ran out"):
        result.get(timeout=10)


def test_a_timeout_is_retried_where_the_task_says_so(site: Site) -> None:
    result = site.send("too_long_once")
    assert site.get(result) == "in time"
    first, second = site.document(result)["history"]
    assert (first["outcome"], first["error_class"]) == ("retried", "timeout")
    assert second["outcome"] == "succeeded"


@pytest.mark.parametrize("timeout", [1, timedelta(seconds=1)])
def test_a_call_states_its_own_time(site: Site, timeout: Any) -> None:
    result = site.apply("checks", str(site.folder / "called"), timeout=timeout)
    assert site.wait_end(result)["error_class"] == "timeout"
    wait_until(lambda: site.journal("checks", id=result.id), timeout=60)


def test_a_handler_that_a_check_stopped_cleans_up_undisturbed(site: Site) -> None:
    result = site.apply("checks_then_cleans_up", timeout=1)
    document = site.wait_end(result)
    assert (document["state"], document["error_class"]) == ("failed", "timeout")
    assert site.journal("cleaned up", id=result.id)


def test_times_are_stated_as_timedelta_too(site: Site) -> None:
    minute = timedelta(minutes=1)
    delays = {"countdown": timedelta(seconds=0.1), "expires": minute}
    result = site.apply("in_time", True, timeout=minute, soft_time_limit=minute, time_limit=minute, **delays)
    assert site.get(result) == "in time"
    assert site.outcomes(result) == ["retried", "succeeded"]
    assert site.get(site.send("in_time")) == "in time"


def test_a_soft_time_limit_can_be_caught(site: Site) -> None:
    assert site.get(site.send("cleans_up")) == "cleaned up"


@pytest.mark.parametrize("name", ["soft_limited", "hard_limited"])
def test_celerys_limits_are_timeouts_too(site: Site, name: str) -> None:
    result = site.send(name, *([False] if name == "hard_limited" else []))
    document = site.wait_end(result)
    assert (document["state"], document["error_class"], document["attempts"]) == ("failed", "timeout", 1)
    site.works()


@pytest.mark.parametrize("where", ["task", "call"])
def test_a_process_that_does_not_listen_is_killed(sites: Sites, where: str, tmp_path: Path) -> None:
    site, path = sites.of("prefork"), tmp_path / "pid"
    result = site.send("blocks_in_c", str(path)) if where == "task" else site.apply("hard_limited", True, time_limit=2)
    document = site.wait_end(result)
    assert (document["state"], document["error_class"], document["attempts"]) == ("failed", "timeout", 1)
    if where == "task":
        pid = int(path.read_text())
        wait_until(lambda: not psutil.pid_exists(pid), timeout=60)
    wait_until(lambda: len(site.worker.children()) == 2, timeout=60)
    site.works(6)


def test_a_thread_that_does_not_listen_is_left_to_itself(sites: Sites, tmp_path: Path) -> None:
    site = sites.of("threads")
    result = site.send("blocks_in_c", str(tmp_path / "pid"))
    document = site.wait_end(result)
    assert (document["state"], document["error_class"]) == ("failed", "timeout")
    site.works(6)
