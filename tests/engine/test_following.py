"""What ended jobs ask for: each follow-up is judged by itself, once, whoever publishes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from relata_celery.domain.events import JobRefused, JobSettled
from relata_celery.domain.job import ErrorClass, Job, JobState, NewJob
from relata_celery.domain.outcome import Encoded, ErrorInfo, Outcome, RetryRequested, Succeeded, Verdict
from relata_celery.engine.held import HeldJob
from tests.engine.bench import MESSAGE, Bench, Control
from tests.waiting import wait_until


class Embedded:
    """Reads what follows a failure from the message's header ``after``; the worker's reads the body."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def followups(self, message: Mapping[str, Any], queue: str, error: ErrorInfo) -> list[Mapping[str, Any]]:
        return list(message["headers"].get("after", ()))

    def tell(self, message: Mapping[str, Any], error: ErrorInfo) -> None:
        self.told.append(f"{message['headers']['id']}: {error.text}")


class FollowingBench(Bench):
    def __init__(self, uri: str, **times: Any) -> None:
        self.after_failure = Embedded()
        super().__init__(uri, self.after_failure, **times)

    def job(self, job_id: str) -> Job:
        job = self.jobs.get(job_id)
        assert job is not None, f"there is no job {job_id}"
        return job

    def hold(self, job_id: str) -> HeldJob:
        self.publish(job_id)
        wait_until(lambda: any(h.claim.id == job_id for h in self.delivered), message=f"{job_id} is claimed")
        return next(held for held in self.delivered if held.claim.id == job_id)

    def settle(self, held: HeldJob, outcome: Outcome) -> Verdict:
        verdicts: list[Verdict] = []
        assert self.service.settle(held, outcome, lambda _settlement, verdict: verdicts.append(verdict))
        wait_until(lambda: verdicts, message="there is a verdict", timeout=20)
        return verdicts[0]

    def end_before_now(self, job_id: str, followups: Any, seconds: float = 60.0) -> None:
        """A job that ended that long ago, and whose follow-ups nobody published."""
        ended = {"$subtract": ["$$NOW", round(seconds * 1000)]}
        self.jobs.enqueue([NewJob(job_id, "t", "done", MESSAGE)])
        self.jobs._jobs().update_one(
            {"_id": job_id},
            [{"$set": {"state": "succeeded", "finished_at": ended, "followups": {"$literal": followups}}}],
        )

    def pending(self) -> int:
        return self.jobs._jobs().count_documents({"followups": {"$exists": True}})


@pytest.fixture
def bench(running: Callable[..., Bench]) -> Callable[..., Bench]:
    return partial(running, FollowingBench)


def step(job_id: str, **headers: Any) -> dict[str, Any]:
    return {"queue": "next", "message": {**MESSAGE, "headers": {"task": "t", "id": job_id, **headers}}}


#: Follow-ups that no job can be made of, and those of which id ("bad") and type can be read.
NOTHING: list[Any] = [5, None, "x", ["x"]]
UNREADABLE: list[Any] = [{"nonsense": 1}, {"queue": "next", "message": {"headers": None}}]
REFUSED: list[Any] = [
    step("bad", eta="never"),
    step("bad", relata={"max_attempts": 0}),
    step("bad", relata={"max_attempts": "many"}),
    step("bad", relata={"delay_s": 1e30}),
    step("bad", relata={"tags": 5}),
    step("bad", relata={"unique_key": "held"}),
    {**step("bad"), "message": {**step("bad")["message"], "properties": {"priority": "high"}}},
    {**step("bad"), "message": {**step("bad")["message"], "properties": 5}},
    {**step("bad"), "failure": {"error": 5}},
]


@pytest.mark.parametrize("bad", [*UNREADABLE, *REFUSED], ids=repr)
def test_a_followup_that_cannot_be_published_costs_only_itself(
    bench: Callable[..., FollowingBench], bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    b = bench(reap_period_s=60.0)
    b.jobs.enqueue([NewJob("holder", "t", "next", MESSAGE, unique_key="held")])
    followups: Any = (step("before"), bad, step("after"))
    with caplog.at_level(logging.ERROR, "relata_celery"):
        assert b.settle(b.hold("a"), Succeeded(None, followups)).accepted
        assert b.settle(b.hold("b"), Succeeded(None, (step("of-b"),))).accepted
    assert {b.state(job_id) for job_id in ("before", "after", "of-b")} == {JobState.QUEUED}
    assert b.pending() == 0
    if bad in REFUSED:
        job = b.job("bad")
        assert (job.state, job.error_class, job.attempts) == (JobState.FAILED, ErrorClass.PERMANENT, 0)
        assert (job.error or "").startswith("not published: ")
        assert job.expire_at is not None
    else:
        assert b.jobs.get("bad") is None
        assert "is dropped" in caplog.text


def test_followups_edited_into_nonsense_keep_the_reaper_from_no_others(bench: Callable[..., FollowingBench]) -> None:
    b = bench(reap_period_s=3600.0)
    for number in range(130):
        b.end_before_now(f"bad-{number}", [step(f"refused-{number}", eta="never")], 100.0)
    for number, kept in enumerate([5, "x", None, {"a": 1}, [], *([bad] for bad in [*NOTHING, *UNREADABLE])]):
        b.end_before_now(f"odd-{number}", kept, 200.0)
    b.end_before_now("good", [step("next")])
    b.service.reaper._publish_stuck()
    assert b.state("next") is JobState.QUEUED
    assert b.pending() == 0
    assert b.jobs.count(states=[JobState.FAILED]) == 130


def test_a_refused_step_is_failed_with_the_reason_and_what_its_failure_calls_for_follows(
    bench: Callable[..., FollowingBench],
) -> None:
    b = bench(reap_period_s=60.0)
    b.jobs.enqueue([NewJob("holder", "t", "next", MESSAGE, unique_key="held")])
    last = step("last")
    middle = step("middle", relata={"unique_key": "held"}, after=[last, step("errback")])
    refused = step("refused", relata={"unique_key": "held"}, after=[middle])
    assert b.settle(b.hold("a"), Succeeded(None, (refused,))).accepted
    for job_id in ("refused", "middle"):
        job = b.job(job_id)
        assert (job.state, job.error_class) == (JobState.FAILED, ErrorClass.PERMANENT)
        assert job.error == "not published: DuplicateJob: an unfinished job (holder) already has unique_key 'held'"
    assert b.state("last") is b.state("errback") is JobState.QUEUED
    assert b.pending() == 0
    assert [line.partition(":")[0] for line in b.after_failure.told] == ["refused", "middle"]


def test_a_refused_step_stays_failed_when_its_publishing_is_repeated(bench: Callable[..., FollowingBench]) -> None:
    b = bench(reap_period_s=60.0)
    b.jobs.enqueue([NewJob("holder", "t", "next", MESSAGE, unique_key="held")])
    refused = step("refused", relata={"unique_key": "held"}, after=[step("errback")])
    publisher = b.service.reaper._publisher
    publisher.publish([("a", [refused])])
    b.jobs.cancel(["holder"])
    publisher.publish([("a", [refused])])
    assert b.state("refused") is JobState.FAILED
    assert len(b.after_failure.told) == 1


def test_what_a_refused_step_calls_for_survives_the_worker_that_refused_it(
    bench: Callable[..., FollowingBench],
) -> None:
    b = bench(reap_period_s=60.0)
    refused = step("refused", eta="never", after=[step("errback")])
    publisher = b.service.reaper._publisher
    publisher._record(refused, ValueError("x"))  # and the worker dies
    assert b.job("refused").followups == (step("errback"),)
    b.jobs._jobs().update_one({"_id": "refused"}, [{"$set": {"finished_at": {"$subtract": ["$$NOW", 60_000]}}}])
    bench()
    wait_until(lambda: b.state("errback") is JobState.QUEUED, message="the next worker publishes it")


def test_a_refused_step_that_is_too_large_to_be_recorded_whole_is_recorded_without_its_message(
    bench: Callable[..., FollowingBench],
) -> None:
    b = bench(reap_period_s=60.0)
    huge = step("huge")
    huge["message"]["body"] = "x" * 15_800_000
    b.service.reaper._publisher.publish([("a", [huge, step("next")])])
    job = b.job("huge")
    assert job.state is JobState.FAILED
    assert "the limit is" in (job.error or "")
    assert b.state("next") is JobState.QUEUED


# -- outcomes that cannot be stored ---------------------------------------------------------------


class Calling(Control):
    """An attempt whose failure calls for these follow-ups."""

    def __init__(self, *followups: Mapping[str, Any]) -> None:
        super().__init__()
        self.followups = followups
        self.errors: list[ErrorInfo] = []

    def failure_followups(self, error: ErrorInfo) -> tuple[Mapping[str, Any], ...]:
        self.errors.append(error)
        return self.followups


TOO_LARGE = Encoded("application/json", "utf-8", "x" * 17_000_000)


@pytest.mark.parametrize(
    "outcome",
    [
        Succeeded(TOO_LARGE),
        Succeeded(None, ({"queue": "q", "message": {"body": "x" * 15_900_000}},)),
        Succeeded(Encoded("application/json", "utf-8", "\ud800")),
        RetryRequested(5.0, message={"body": "x" * 17_000_000}),
    ],
    ids=["result", "followups", "surrogate", "retry"],
)
def test_an_outcome_that_cannot_be_stored_is_a_failure_with_all_that_it_calls_for(
    bench: Callable[..., FollowingBench], outcome: Outcome
) -> None:
    b = bench()
    held = b.hold("a")
    control = Calling(step("errback"))
    b.service.adopt(held, control)
    assert b.settle(held, outcome).accepted
    job = b.job("a")
    assert (job.state, job.error_class) == (JobState.FAILED, ErrorClass.PERMANENT)
    assert (job.error or "").startswith("the outcome cannot be stored: ")
    assert [error.text for error in control.errors] == [job.error]
    assert b.state("errback") is JobState.QUEUED
    assert [str(entry.outcome) for entry in job.history] == ["failed"]
    settled = [event for event in b.events if isinstance(event, JobSettled) and event.job_id == "a"]
    assert [(event.state, event.error_class) for event in settled] == [(JobState.FAILED, ErrorClass.PERMANENT)]
    assert not [event for event in b.events if isinstance(event, JobRefused)]


def test_what_a_failure_calls_for_is_dropped_aloud_where_it_cannot_be_stored_either(
    bench: Callable[..., FollowingBench], caplog: pytest.LogCaptureFixture
) -> None:
    b = bench()
    held = b.hold("a")
    control = Calling({"queue": "q", "message": {"body": "x" * 17_000_000}})  # the engine alone would forget it
    b.service.adopt(held, control)
    with caplog.at_level(logging.ERROR, "relata_celery"):
        assert b.settle(held, Succeeded(TOO_LARGE)).accepted
    assert b.state("a") is JobState.FAILED
    assert "job a: 1 follow-ups of its failure cannot be stored: dropped" in caplog.text
    assert b.settle(b.hold("b"), Succeeded()).accepted


def test_an_outcome_that_cannot_be_stored_is_refused_when_its_lease_is_lost(
    bench: Callable[..., FollowingBench],
) -> None:
    b = bench(heartbeat_s=60.0)
    held = b.hold("a")
    b.service.adopt(held, Calling(step("errback")))
    b.jobs.cancel(["a"])
    verdict = b.settle(held, Succeeded(TOO_LARGE))
    assert (verdict.accepted, verdict.reason) == (False, "job was cancelled")
    assert b.jobs.get("errback") is None


# -- jobs that the reaper fails -------------------------------------------------------------------


def test_a_job_whose_lease_runs_out_at_its_last_attempt_has_its_failure_followed_up_once(
    bench: Callable[..., FollowingBench], database_uri: str
) -> None:
    b = bench(reap_period_s=3600.0)
    after = [step("errback"), step("last")]
    message = {**MESSAGE, "headers": {"task": "t", "id": "a", "after": after}}
    b.jobs.enqueue(
        [
            NewJob("a", "t", "elsewhere", message, max_attempts=1),
            NewJob("unreadable", "t", "elsewhere", {"headers": 5}, max_attempts=1),
        ]
    )
    assert len(b.jobs.claim(["elsewhere"], 2, "dead", 0.001)) == 2
    reapers = [FollowingBench(database_uri) for _ in range(4)]
    for reaper in reapers:
        reaper.service.reaper.start()
    try:
        wait_until(lambda: b.state("errback") and b.state("last"), message="what follows is published")
        wait_until(lambda: b.state("unreadable") is JobState.FAILED, message="the other has failed too")
        wait_until(lambda: [told for reaper in reapers for told in reaper.after_failure.told], message="one is told")
        wait_until(lambda: b.pending() == 0, message="the follow-ups are cleared")
    finally:
        for reaper in reapers:
            reaper.service.reaper.stop()
    assert b.state("a") is JobState.FAILED
    assert [told for reaper in reapers for told in reaper.after_failure.told if told.startswith("a:")] == [
        "a: lease expired"
    ]
