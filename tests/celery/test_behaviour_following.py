"""What follows a job's end when the follow-ups themselves are bad, or nobody of the job is left to publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain

from relata_celery.domain.job import ErrorClass
from relata_celery.domain.outcome import ErrorInfo
from relata_celery.following import StoredFailures
from tests.celery.apps_behaviour import make_app
from tests.celery.behaviour import APP, QUEUES, Site, Sites
from tests.waiting import wait_until
from tests.workers import running_worker, start_worker


def unpublishable(site: Site, kind: str) -> Any:
    """A step that its queue refuses for what it is."""
    signature = site.app.tasks["echo"].si(1)
    if kind == "attempts":
        return signature.set(headers={"relata": {"max_attempts": 0}})
    if kind == "delay":
        return site.app.signature("elsewhere.task").set(headers={"relata": {"delay_s": 1e30}})
    if kind == "priority":
        return signature.set(priority=77)
    return signature.set(headers={"number": 2**70})


def published(site: Site, job_id: str) -> None:
    wait_until(lambda: site.jobs.find_one({"_id": job_id}), timeout=30, message=f"job {job_id} is there")


def not_run(site: Site, *ids: str, why: str = "") -> None:
    """Whoever waits for these is told that a step before them failed."""
    for job_id in ids:
        published(site, job_id)
        assert site.state(job_id) == "failed"
        assert site.document(job_id)["error"].startswith(f"not run, as a step before it failed: {why}")
        assert site.app.AsyncResult(job_id).state == "FAILURE"


@pytest.mark.parametrize("kind", ["attempts", "delay", "priority", "integer"])
def test_a_next_step_that_its_queue_refuses_fails_the_attempt_for_good_and_nothing_else(
    sites: Sites, kind: str
) -> None:
    site = sites.of("prefork")
    last = chain(site.app.tasks["echo"].si(0), unpublishable(site, kind), site.app.tasks["echo"].si(2)).apply_async()
    first = site.wait_end(last.parent.parent)
    assert (first["state"], first["error_class"], first["attempts"]) == ("failed", "permanent", 1)
    assert first["error"].startswith("its next step cannot be published: ")
    not_run(site, last.parent.id, last.id)
    site.works()


def test_a_link_that_is_no_task_fails_the_attempt_for_good(site: Site) -> None:
    document = site.wait_end(site.apply("echo", 1, link=[{"task": None}]))
    assert (document["state"], document["error_class"], document["attempts"]) == ("failed", "permanent", 1)
    assert document["error"].startswith("its next step cannot be published: ")


def test_an_errback_that_is_no_task_keeps_no_other_from_being_published(site: Site) -> None:
    echo = site.app.tasks["echo"]
    result = site.apply("fail_as", "value", link_error=[{"task": None}, echo.s().set(task_id=f"after-{site.pool}")])
    assert site.wait_end(result)["state"] == "failed"
    published(site, f"after-{site.pool}")
    assert site.get(site.app.AsyncResult(f"after-{site.pool}")) == result.id


def test_a_chain_step_whose_unique_key_is_held_has_failed_and_so_have_those_after_it(site: Site) -> None:
    echo = site.app.tasks["echo"]
    holder = echo.apply_async(queue="nobody-serves", unique_key="held")
    errback = echo.s().set(task_id=f"held-{site.pool}")
    try:
        last = chain(echo.si(1), echo.si(2).set(unique_key="held", link_error=errback), echo.si(3)).apply_async()
        assert site.get(last.parent.parent) == 1
        published(site, last.parent.id)
        refused = site.wait_end(last.parent)
        not_run(site, last.id, why="not published: DuplicateJob")
    finally:
        holder.revoke()
    assert (refused["state"], refused["error_class"]) == ("failed", "permanent")
    assert f"an unfinished job ({holder.id}) already has unique_key 'held'" in refused["error"]
    published(site, f"held-{site.pool}")
    assert site.get(site.app.AsyncResult(f"held-{site.pool}")) == last.parent.id
    assert site.jobs.count_documents({"followups": {"$exists": True}}) == 0


def test_an_outcome_too_large_beside_its_message_is_a_failure_in_every_way(sites: Sites) -> None:
    site = sites.of("prefork")
    echo = site.app.tasks["echo"]
    errback = echo.s().set(task_id="too-large")
    middle = echo.si(2).set(headers={"padding": "x" * 9_000_000})
    last = chain(echo.si(1).set(link_error=errback), middle, echo.si(3)).apply_async()
    document = site.wait_end(last.parent.parent)
    assert (document["state"], document["error_class"]) == ("failed", "permanent")
    assert document["error"].startswith("the outcome cannot be stored: ")
    published(site, "too-large")
    assert site.get(site.app.AsyncResult("too-large")) == last.parent.parent.id
    not_run(site, last.parent.id, last.id, why="the outcome cannot be stored")
    assert f"echo[{last.parent.parent.id}] attempt 1 failed" in site.worker.log
    assert f"echo[{last.parent.parent.id}] attempt 1: outcome not kept" not in site.worker.log


def test_retry_may_grant_more_attempts_than_the_task_has_and_the_job_shows_it(site: Site) -> None:
    result = site.apply("retry_limited_here", 3, max_attempts=1)
    document = site.wait_end(result)
    assert (document["state"], document["attempts"], document["max_attempts"]) == ("failed", 4, 4)


def test_what_follows_a_failure_follows_when_the_whole_worker_was_killed(sites: Sites, tmp_path: Path) -> None:
    site = sites.new("prefork")
    tasks = site.app.tasks
    held = tmp_path / "held"
    first = tasks["hold"].si(str(held)).set(
        max_attempts=1, link_error=[tasks["echo"].s().set(task_id="published"), tasks["errback_full"].s()]
    )
    last = chain(first, tasks["echo"].si(1), tasks["echo"].si(2)).apply_async()
    killed = start_worker(APP, site.uri, site.folder, "-Q", QUEUES, "-c", "1", env=site.environment, name="killed")
    try:
        killed.wait_ready()
        wait_until(held.exists, timeout=30, message="the job runs")
    finally:
        killed.kill_group()
    with running_worker(
        APP, site.uri, site.folder, "-Q", QUEUES, "-c", "1", env=site.environment, name="next"
    ) as site.worker:
        assert site.wait_end(last.parent.parent)["error"] == "lease expired"
        published(site, "published")
        assert site.get(site.app.AsyncResult("published")) == last.parent.parent.id
        not_run(site, last.parent.id, last.id, why="lease expired")
        wait_until(lambda: site.journal("errback_full", id=last.parent.parent.id), message="the other is called")
    assert len(site.journal("errback_full")) == 1


# -- read from the stored message -----------------------------------------------------------------

LOST = ErrorInfo(ErrorClass.TRANSIENT, "lease expired", "JobError", "relata_celery.domain.errors")


@pytest.fixture
def sender(database_uri: str) -> Any:
    app = make_app(database_uri)
    yield app
    app.close()


def stored_message(app: Celery, **options: Any) -> Any:
    from relata_celery import JobStore

    result = app.tasks["echo"].apply_async((1,), **options)
    job = JobStore.from_app(app).get(result.id)
    assert job is not None
    return job.message


def test_what_follows_is_read_from_a_message_whose_type_nobody_here_knows(sender: Celery, database_uri: str) -> None:
    url = f"relata+{database_uri}"
    echo = sender.tasks["echo"]
    message = stored_message(
        sender,
        chain=[echo.si(3).set(task_id="third"), echo.si(2).set(task_id="second", queue="other")],
        link_error=[{"task": None}, sender.tasks["errback_full"].s().set(task_id="back")],
    )
    conf: dict[str, Any] = {"broker": url, "backend": url, "task_cls": "relata_celery:LeasedTask"}
    with Celery("stranger", set_as_current=False, **conf) as stranger:
        assert "echo" not in stranger.tasks
        followups = StoredFailures(stranger).followups(message, "mine", LOST)
    found = {followup["message"]["headers"]["id"]: followup for followup in followups}
    assert {job_id: followup["queue"] for job_id, followup in found.items()} == {
        "back": "celery", "third": "celery", "second": "other",
    }  # fmt: skip
    assert "failure" not in found["back"]
    assert found["third"]["failure"]["error"] == "not run, as a step before it failed: lease expired"


def test_an_errback_that_is_called_is_called_when_told_and_not_when_read(
    sender: Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    monkeypatch.setenv("RELATA_TEST_JOURNAL", str(journal))
    message = stored_message(sender, link_error=[sender.tasks["errback_full"].s(), sender.tasks["echo"].s()])
    failures = StoredFailures(sender)
    (published,) = failures.followups(message, "mine", LOST)
    assert published["message"]["headers"]["task"] == "echo"
    assert journal.read_text() == ""
    failures.tell(message, LOST)
    assert "lease expired" in journal.read_text()


@pytest.mark.parametrize(
    "body", ["", "x", "[[], {}]", '[[], {}, {"chain": 5}]', '[[], {}, {"errbacks": ["x"]}]'], ids=repr
)
def test_a_message_that_cannot_be_read_says_so(sender: Celery, body: str) -> None:
    message = {**stored_message(sender), "body": body}
    with pytest.raises(Exception):  # noqa: B017 - whatever it is, whoever asks goes on
        StoredFailures(sender).followups(message, "mine", LOST)
