"""Remote control and events, of a worker whose slots are all taken and of an idle one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import states
from celery.result import AsyncResult

from tests.celery.behaviour import APP, POOLS, Site, Sites
from tests.celery.test_behaviour_errors import captured_events, wait_event
from tests.mongo import open_streams
from tests.waiting import wait_until
from tests.workers import running_worker


class Full:
    """A worker with two running jobs and fifty that wait."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self.paths = [folder / f"held-{number}" for number in range(2)]
        self.running = [site.send("hold", str(path)) for path in self.paths]
        wait_until(lambda: all(path.exists() for path in self.paths), timeout=60)
        self.waiting = [site.send("echo", number) for number in range(50)]

    def release(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)
        for result in (*self.running, *self.waiting):
            self.site.wait_end(result)


@pytest.fixture
def full(wide_site: Site, tmp_path: Path) -> Iterator[Full]:
    made = Full(wide_site, tmp_path)
    yield made
    made.release()


def answer(site: Site, method: str, *args: Any) -> Any:
    """The worker's answer to an inspection; asked again on a machine that is too busy for two seconds."""
    name = site.worker_name
    inspect = site.app.control.inspect(timeout=2, destination=[name])
    answers = wait_until(
        lambda: getattr(inspect, method)(*args),
        timeout=60,
        message=f"inspect {method}\n{site.worker.log[-2000:]}",
    )
    return answers[name]


def answered(site: Site) -> dict[str, Any]:
    """Options of a command that is waited for until its one worker has answered."""
    return {"reply": True, "timeout": 5, "destination": [site.worker_name]}


def test_a_full_worker_answers(full: Full) -> None:
    site = full.site
    assert answer(site, "ping") == {"ok": "pong"}
    active = answer(site, "active")
    assert {entry["id"] for entry in active} == {result.id for result in full.running}
    stats = answer(site, "stats")
    assert stats["pool"]
    assert "add" in answer(site, "registered")
    assert {queue["name"] for queue in answer(site, "active_queues")} == {"celery", "ai", "letters"}
    assert isinstance(answer(site, "reserved"), list)
    # What it had claimed ahead, when its jobs seemed short, it gives back: another may have room.
    wait_until(lambda: site.jobs.count_documents({"state": "running"}) == 2, timeout=60)


def test_a_worker_with_more_than_enough_to_do_polls_for_its_mail_and_answers(full: Full) -> None:
    site = full.site
    wait_until(lambda: streams(site) == [], timeout=60, message="its change streams rest")
    assert answer(site, "ping") == {"ok": "pong"}
    full.release()
    wait_until(lambda: set(streams(site)) == {"relata_jobs", "relata_mailboxes"}, timeout=60, message="they are back")


def streams(site: Site) -> list[str]:
    """The collections on which change streams are open."""
    return [found["ns"].partition(".")[2] for found in open_streams(site.database.client, site.database.name)]


def test_the_stream_of_a_new_worker_follows_its_queues_from_the_beginning(sites: Sites) -> None:
    """One opened before they are known would tell of no job until its first request ends, seconds later."""
    site = sites.new("threads")
    try:
        with running_worker(APP, site.uri, site.folder, *POOLS["threads"], env=site.environment) as site.worker:
            wait_until(lambda: "relata_jobs" in streams(site), timeout=60, message="the jobs' stream is open")
            found = open_streams(site.database.client, site.database.name)
        of_jobs = [one["cursor"]["originatingCommand"] for one in found if one["ns"].endswith(".relata_jobs")]
        assert of_jobs
        assert "celery" in str(of_jobs)
        assert "{'$in': []}" not in str(of_jobs)
    finally:
        site.app.close()
        site.database.client.drop_database(site.database.name)


def test_stats_show_how_the_engine_fares(site: Site) -> None:
    site.works(2)
    parts = answer(site, "stats")["relata"]
    assert set(parts) == {"settler", "renewer", "deadlines", "reaper", "claimer", "pauses"}
    assert all(part["alive"] for part in parts.values())
    assert parts["claimer"]["answered_s_ago"] >= 0
    assert parts["deadlines"]["answered_s_ago"] is None


def test_a_worker_on_a_brand_new_database_answers(sites: Sites) -> None:
    with sites.started("fresh", *POOLS["threads"]) as site:
        assert answer(site, "ping") == {"ok": "pong"}
        assert answer(site, "active") == []
        code = site.worker.terminate()
    assert code == 0


def test_waiting_jobs_are_revoked(full: Full) -> None:
    site = full.site
    revoked = full.waiting[10:15]
    site.app.control.revoke([result.id for result in revoked])
    wait_until(
        lambda: all(site.state(result) == "cancelled" for result in revoked),
        timeout=60,
        message="revoked jobs are cancelled while they wait",
    )
    assert all(result.state == states.REVOKED for result in revoked)
    full.release()
    assert [site.state(result) for result in full.waiting].count("succeeded") == 45


def test_a_job_is_revoked_while_no_worker_runs(sites: Sites) -> None:
    site = sites.new("absent")
    result = site.send("add", 1, 2)
    result.revoke()
    assert site.state(result) == "cancelled"
    assert result.state == states.REVOKED
    site.app.close()


def test_a_revoke_without_terminate_lets_a_running_job_end(full: Full) -> None:
    full.site.app.control.revoke(full.running[0].id)
    full.release()
    assert full.site.state(full.running[0]) == "succeeded"


def test_running_jobs_are_revoked(full: Full) -> None:
    site, victim = full.site, full.running[0]
    site.app.control.revoke(victim.id, terminate=True)
    site.wait_state(victim, "cancelled")
    assert AsyncResult(victim.id, app=site.app).state == states.REVOKED
    assert site.outcomes(victim) == ["cancelled"]
    # Its slot is free again: the jobs that wait go through it.
    for result in full.waiting:
        site.wait_end(result)
    assert site.state(full.running[1]) == "running"


def test_a_revoked_result_can_be_asked_for_by_its_result(wide_site: Site, tmp_path: Path) -> None:
    path = tmp_path / "held"
    result = wide_site.send("hold", str(path))
    wait_until(path.exists, timeout=60)
    result.revoke(terminate=True)
    wide_site.wait_state(result, "cancelled")
    path.unlink()
    wide_site.works(2)


def test_queues_are_added_and_cancelled(wide_site: Site) -> None:
    site = wide_site
    site.app.control.add_consumer("late", **answered(site))
    result = site.apply("add", 1, 2, queue="late")
    assert site.get(result) == 3
    site.app.control.cancel_consumer("late", **answered(site))
    wait_until(
        lambda: "late" not in {queue["name"] for queue in answer(site, "active_queues")},
        timeout=60,
    )
    second = site.apply("add", 1, 2, queue="late")
    site.works(4)
    assert site.state(second) == "queued"
    site.jobs.delete_one({"_id": second.id})


def test_a_rate_limit_is_taken(wide_site: Site) -> None:
    replies = wait_until(
        lambda: wide_site.app.control.rate_limit("pid", "1000/s", **answered(wide_site)), timeout=60
    )
    assert "new rate limit set successfully" in str(replies)
    assert wide_site.get(wide_site.send("pid"))
    wide_site.app.control.rate_limit("pid", "0")


def test_the_pool_grows_and_shrinks(sites: Sites, tmp_path: Path) -> None:
    site = sites.of("prefork")
    paths = [tmp_path / f"held-{number}" for number in range(3)]
    assert "ok" in str(wait_until(lambda: site.app.control.pool_grow(1, **answered(site)), timeout=60))
    results = [site.send("hold", str(path)) for path in paths]
    wait_until(
        lambda: all(path.exists() for path in paths),
        timeout=60,
        message=f"three run at once\n{site.worker.log[-2000:]}",
    )
    for path in paths:
        path.unlink()
    for result in results:
        assert site.get(result) == "released"
    assert "ok" in str(wait_until(lambda: site.app.control.pool_shrink(1, **answered(site)), timeout=60))
    site.works(4)


def test_a_worker_is_shut_down_by_remote_control(sites: Sites) -> None:
    with sites.started("shutdown", *POOLS["prefork"]) as site:
        site.works(2)
        site.app.control.shutdown()
        assert site.worker.process.wait(60) == 0


def test_purging_removes_what_waits_and_nothing_else(full: Full) -> None:
    site, full.waiting = full.site, []
    wait_until(lambda: site.jobs.count_documents({"state": "running"}) == 2, timeout=60)
    assert site.app.control.purge() >= 50
    assert site.jobs.count_documents({"state": "queued", "queue": "celery"}) == 0
    for path in full.paths:
        path.unlink()
    assert [site.get(result) for result in full.running] == ["released", "released"]


def test_events_tell_what_happens(site: Site) -> None:
    with captured_events(site) as events:
        succeeded, failed, retried = site.send("add", 1, 2), site.send("fail_as", "value"), site.send("retry_times", 1)
        for result in (succeeded, failed, retried):
            site.wait_end(result)
        for kind, result in [
            ("task-received", succeeded),
            ("task-started", succeeded),
            ("task-succeeded", succeeded),
            ("task-failed", failed),
            ("task-retried", retried),
            ("task-succeeded", retried),
        ]:
            event = wait_event(events, kind, result.id)
            assert event["hostname"].startswith(site.pool)
        assert wait_event(events, "task-succeeded", succeeded.id)["result"] == "3"
        assert "ValueError('on purpose')" in wait_event(events, "task-failed", failed.id)["exception"]
        assert wait_event(events, "task-received", succeeded.id)["name"] == "add"
        kinds = [event["type"] for event in events if event.get("uuid") == succeeded.id]
        assert kinds == ["task-received", "task-started", "task-succeeded"]
