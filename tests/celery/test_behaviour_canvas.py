"""Chains, groups, chords, links and replacing: each step exactly once, for the accepted attempt only."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult

from relata_celery import JobStore, PermanentError, TransientError
from tests.celery.behaviour import PATIENCE_S, Site, Sites
from tests.waiting import wait_until


def finished(site: Site, result: Any) -> Any:
    """Wait until every job of this database has ended; the result's value."""

    def quiet() -> bool:
        site.jobs.update_many(
            {"state": "queued", "type": {"$ne": "celery.chord_unlock"}, "attempts": {"$gt": 0}},
            [{"$set": {"run_at": "$$NOW"}}],
        )
        site.jobs.update_many({"state": "queued", "type": "celery.chord_unlock"}, [{"$set": {"run_at": "$$NOW"}}])
        waiting = site.jobs.count_documents({"state": {"$in": ["queued", "running"]}})
        stuck = site.jobs.count_documents({"followups": {"$exists": True}})
        return not waiting and not stuck

    wait_until(quiet, timeout=PATIENCE_S, interval=0.1, message=f"all jobs end\n{site.worker.log[-3000:]}")
    return result.get(timeout=PATIENCE_S)


def steps(site: Site, root: str) -> list[tuple[Any, Any]]:
    """What the steps of one workflow were given, sorted."""
    ids = {document["_id"] for document in site.jobs.find({"root_id": root}, {"_id": 1})} | {root}
    return sorted((line["value"], line["more"]) for line in site.journal("step") if line["id"] in ids)


def test_a_chain_of_three(site: Site) -> None:
    step = site.app.tasks["step"]
    result = chain(step.s(1), step.s(10), step.s(100)).apply_async()
    assert finished(site, result) == 111
    root = result.parent.parent.id
    assert steps(site, root) == [(1, 0), (1, 10), (11, 100)]
    assert result.parent.get(timeout=10) == 11


def test_a_chain_whose_first_step_is_retried_goes_on_once(site: Site) -> None:
    tasks = site.app.tasks
    result = (tasks["transient"].s(1) | tasks["step"].s(5)).apply_async()
    assert finished(site, result) == 7
    assert steps(site, result.parent.id) == [(2, 5)]


def test_a_chain_stops_where_a_step_fails(site: Site) -> None:
    tasks = site.app.tasks
    result = (tasks["failing_step"].s() | tasks["step"].s(5)).apply_async()
    with pytest.raises(TransientError):
        finished(site, result.parent)
    assert steps(site, result.parent.id) == []
    with pytest.raises(TransientError):
        result.get(timeout=10)
    document = site.document(result)
    assert document["state"] == "failed"
    assert document["error"].startswith("not run, as a step before it failed: no")


def test_a_chain_goes_on_when_its_failed_step_is_retried_by_hand(site: Site) -> None:
    tasks = site.app.tasks
    result = (tasks["once_failing"].s(3) | tasks["step"].s(5) | tasks["step"].s(1)).apply_async()
    first = result.parent.parent
    with pytest.raises(PermanentError):
        finished(site, first)
    assert site.state(result) == site.state(result.parent) == "failed"
    assert JobStore.from_app(site.app).retry(first.id)[first.id].changed
    result = AsyncResult(result.id, app=site.app)
    wait_until(lambda: site.state(result) != "failed", timeout=60)
    assert finished(site, result) == 9
    assert steps(site, first.id) == [(3, 5), (8, 1)]


@pytest.mark.parametrize("name", ["dies", "blocks_in_c"])
def test_what_follows_a_failure_follows_when_the_process_is_killed_too(sites: Sites, name: str) -> None:
    site = sites.of("prefork")
    tasks = site.app.tasks
    result = (tasks[name].si() | tasks["step"].si(5)).apply_async(link_error=tasks["errback_full"].s())
    site.wait_end(result.parent)
    wait_until(
        lambda: [line for line in site.journal("errback_full") if line["id"] == result.parent.id],
        timeout=60,
        message=site.worker.log[-3000:],
    )
    wait_until(lambda: site.jobs.find_one({"_id": result.id, "state": "failed"}), timeout=60)
    assert len([line for line in site.journal("errback_full") if line["id"] == result.parent.id]) == 1


def test_a_group(site: Site) -> None:
    step = site.app.tasks["step"]
    result = group(step.s(n, 1) for n in range(6)).apply_async()
    assert finished(site, result) == [1, 2, 3, 4, 5, 6]
    result.save()
    restored = site.app.GroupResult.restore(result.id, backend=site.app.backend)
    assert restored is not None
    assert restored.get(timeout=10) == [1, 2, 3, 4, 5, 6]


def test_a_group_in_a_chain(site: Site) -> None:
    tasks = site.app.tasks
    result = chain(
        tasks["step"].s(1), group(tasks["step"].s(1), tasks["step"].s(2)), tasks["total"].s()
    ).apply_async()
    assert finished(site, result) == 5
    assert [line["values"] for line in site.journal("total", id=result.id)] == [[2, 3]]


def test_a_chord(site: Site) -> None:
    tasks = site.app.tasks
    result = chord(group(tasks["step"].s(n) for n in range(4)), tasks["total"].s()).apply_async()
    assert finished(site, result) == 6
    assert len(site.journal("total", id=result.id)) == 1
    assert site.document(result)["state"] == "succeeded"


def test_a_chord_whose_header_fails_has_failed(site: Site) -> None:
    tasks = site.app.tasks
    result = chord([tasks["step"].s(1), tasks["failing_step"].s()], tasks["total"].s()).apply_async()
    with pytest.raises(Exception, match="no"):
        finished(site, result)
    assert site.journal("total", id=result.id) == []


def test_a_link_runs_once_after_success(site: Site) -> None:
    tasks = site.app.tasks
    result = tasks["transient"].apply_async((1,), link=[tasks["step"].s(5), tasks["step"].s(6)])
    assert finished(site, result) == 2
    assert steps(site, result.id) == [(2, 5), (2, 6)]


def test_an_errback_runs_once_after_the_final_failure(site: Site) -> None:
    tasks = site.app.tasks
    result = tasks["failing_step"].apply_async(
        link_error=[tasks["errback"].s(), tasks["errback_full"].s()], link=tasks["step"].s(5)
    )
    with pytest.raises(TransientError):
        finished(site, result)
    assert len(site.journal("failing_step", id=result.id)) == 2
    wait_until(
        lambda: [line for line in site.journal("errback_full") if line["id"] == result.id],
        timeout=60,
        message="the errback ran",
    )
    (line,) = [line for line in site.journal("errback_full") if line["id"] == result.id]
    assert "no" in line["exc"]
    assert len([line for line in site.journal("errback") if result.id in " ".join(line["args"])]) == 1
    assert steps(site, result.id) == []


@pytest.mark.parametrize(("kind", "value"), [("one", 6), ("chain", 13), ("group", [2, 3])])
def test_a_task_is_replaced(site: Site, kind: str, value: Any) -> None:
    result = site.send("replaced", kind, 1)
    assert finished(site, result) == value
    assert len(site.journal("replaced", id=result.id)) == 1
    assert site.state(result) == "succeeded"
    expected = {"one": [(1, 5)], "chain": [(1, 5), (6, 7)], "group": [(1, 1), (1, 2)]}[kind]
    assert steps(site, result.id) == expected


def test_a_replaced_task_in_a_chain_goes_on_to_the_next(site: Site) -> None:
    tasks = site.app.tasks
    result = (tasks["replaced"].s("one", 1) | tasks["step"].s(100)).apply_async()
    assert finished(site, result) == 106
    assert steps(site, result.parent.id) == [(1, 5), (6, 100)]


def test_children_are_known(site: Site) -> None:
    result = (site.app.tasks["step"].s(1) | site.app.tasks["step"].s(2)).apply_async()
    finished(site, result)
    child = site.jobs.find_one({"parent_id": result.parent.id})
    assert child is not None
    assert child["_id"] == result.id
    assert child["root_id"] == result.parent.id
    assert AsyncResult(child["_id"], app=site.app).get(timeout=10) == 3
