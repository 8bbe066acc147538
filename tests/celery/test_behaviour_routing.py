"""Where jobs go and in which order; ends that are neither success nor failure; what the caller is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import states
from celery.exceptions import TaskRevokedError

from tests.celery.behaviour import Site, Sites
from tests.waiting import wait_until


def test_ignore_ends_a_job_without_a_result(site: Site) -> None:
    result = site.send("ignore")
    document = site.wait_end(result)
    assert (document["state"], document["ignored"]) == ("succeeded", True)
    assert "result" not in document


def test_a_rejected_job_has_failed(site: Site) -> None:
    result = site.send("reject", False)
    document = site.wait_end(result)
    assert (document["state"], document["error_class"], document["attempts"]) == ("failed", "permanent", 1)
    assert "rejected by its handler: not for me" in document["error"]
    assert result.state == states.FAILURE


def test_a_job_rejected_to_be_requeued_comes_back_within_its_attempts(site: Site) -> None:
    result = site.send("reject", True)
    document = site.wait_end(result)
    assert (document["state"], document["attempts"]) == ("failed", 3)
    assert len(site.journal("reject", id=result.id)) == 3
    assert "rejected" in document["error"]


def test_pydantic_models_travel(site: Site) -> None:
    assert site.get(site.send("pydantic_task", {"sides": 4})) == {"sides": 8, "name": "SQUARE"}


def test_pydantic_refuses_what_does_not_fit(site: Site) -> None:
    document = site.wait_end(site.apply("pydantic_task", {"sides": "many"}, max_attempts=1))
    assert document["state"] == "failed"
    assert "many" not in document["error"]  # a validator quotes its input


def test_wrong_arguments_are_told_to_the_caller(sites: Sites) -> None:
    site = sites.of("threads")
    with pytest.raises(TypeError):
        site.send("add", 1, 2, 3)
    with pytest.raises(TypeError):
        site.send("add", 1, z=2)


def test_a_shadow_name_is_shown_in_the_log(site: Site) -> None:
    result = site.apply("add", 1, 2, shadow="adding.in.disguise")
    assert site.get(result) == 3
    wait_until(lambda: f"adding.in.disguise[{result.id}] succeeded" in site.worker.log, timeout=60)
    assert site.document(result)["type"] == "add"


def test_an_expired_job_is_never_run(site: Site) -> None:
    result = site.apply("ordered", f"expired-{site.pool}", countdown=3600, expires=3500)
    site.jobs.update_one({"_id": result.id}, [{"$set": {"run_at": "$$NOW", "expires_at": "$$NOW"}}])
    document = site.wait_end(result)
    assert document["state"] == "cancelled"
    assert result.state == states.REVOKED
    with pytest.raises(TaskRevokedError):
        result.get(timeout=10)
    assert site.journal("ordered", mark=f"expired-{site.pool}") == []


def test_a_job_that_expires_later_is_run(site: Site) -> None:
    assert site.get(site.apply("add", 1, 2, expires=3600)) == 3


def test_nine_is_served_first(sites: Sites, tmp_path: Path) -> None:
    path = tmp_path / "held"
    with sites.started("order", "-P", "solo", env={"RELATA_CLAIM_AHEAD": "0"}) as site:
        holder = site.send("hold", str(path))
        wait_until(path.exists, timeout=60)
        shuffled = (3, 0, 9, 5, 1, 8, 2, 7, 4, 6)
        results = [site.apply("ordered", f"p{priority}", priority=priority) for priority in shuffled]
        results += [site.apply("ordered", f"p9-{turn}", priority=9) for turn in range(3)]
        path.unlink()
        for result in (holder, *results):
            site.wait_end(result)
        marks = [line["mark"] for line in site.journal("ordered")]
    assert marks == ["p9", "p9-0", "p9-1", "p9-2", *(f"p{priority}" for priority in range(8, -1, -1))]


def test_queues_of_the_decorator_and_of_the_call(site: Site) -> None:
    for name, options, queue, priority in [
        ("own_queue", {}, "letters", 0),
        ("own_priority", {}, "letters", 7),
        ("own_priority", {"queue": "ai", "priority": 2}, "ai", 2),
        ("ai_task", {}, "ai", 0),
        ("ai_task", {"queue": "letters"}, "letters", 0),
        ("add", {"queue": "letters", "args": (1, 2)}, "letters", 0),
    ]:
        result = site.app.tasks[name].apply_async(**options)
        document = site.wait_end(result)
        assert (document["queue"], document["priority"], document["state"]) == (queue, priority, "succeeded")
        assert "queue" not in vars(type(site.app.tasks[name]))


def test_a_worker_takes_from_its_queues_only(sites: Sites) -> None:
    site = sites.of("threads")
    result = site.apply("add", 1, 2, queue="elsewhere")
    site.works(4)
    assert site.state(result) == "queued"
    site.jobs.delete_one({"_id": result.id})


def test_task_routes_and_task_queues(sites: Sites) -> None:
    site = sites.of("threads")
    from kombu import Queue

    from tests.celery.apps_behaviour import make_app

    app = make_app(
        site.uri,
        task_queues=(Queue("celery"), Queue("letters", routing_key="mail.#")),
        task_routes={"add": {"queue": "letters", "priority": 4}},
        task_create_missing_queues=True,
    )
    result = app.tasks["add"].delay(1, 2)
    document = site.wait_end(result)
    assert (document["queue"], document["priority"]) == ("letters", 4)
    app.close()
