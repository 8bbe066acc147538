"""The retry policy, as a table and as properties."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relata_celery.domain.backoff import backoff_s
from relata_celery.domain.job import AttemptOutcome, ErrorClass, JobState
from relata_celery.domain.outcome import (
    Cancelled,
    Encoded,
    ErrorInfo,
    Failed,
    LeaseForfeited,
    Outcome,
    Released,
    Replaced,
    RetryRequested,
    Settlement,
    Snoozed,
    Succeeded,
    WorkerLost,
)
from relata_celery.domain.settle import decide
from tests.unit.jobs import claimed

KEPT_S, FAILED_S = 100.0, 200.0
FOLLOWUPS = ({"task": "next"},)

errors = st.builds(ErrorInfo, st.sampled_from(ErrorClass), st.text(max_size=20))
followups = st.sampled_from([(), FOLLOWUPS])
delays = st.floats()
messages = st.sampled_from(
    [{}, {"headers": {"task": "other.task"}}, {"headers": None}, {"headers": {"task": 5}}]
)
failures = st.one_of(
    st.builds(Failed, errors, followups, st.none(), st.booleans(), st.booleans()),
    st.builds(RetryRequested, delays, st.none() | errors, st.none() | messages, st.none(), followups),
    st.builds(WorkerLost, st.text(), followups),
)
outcomes = st.one_of(
    failures,
    st.builds(Succeeded, st.none() | st.just(Encoded("application/json", "utf-8", "1")), followups),
    st.builds(Snoozed, delays, st.text()),
    st.builds(Replaced, messages),
    st.builds(Released, st.text()),
    st.builds(Cancelled, st.text()),
)
jobs = st.builds(claimed, st.integers(1, 20), st.integers(1, 20))


def settled(outcome: Outcome, attempt: int = 1, max_attempts: int = 5, fraction: float = 0.5) -> Settlement:
    return decide(
        outcome,
        claimed(attempt, max_attempts),
        random_fraction=fraction,
        retention_succeeded_s=KEPT_S,
        retention_failed_s=FAILED_S,
    )


def failure(error_class: ErrorClass, **fields: Any) -> Failed:
    return Failed(ErrorInfo(error_class, "it broke"), followups=FOLLOWUPS, **fields)


def test_success_keeps_result_followups_and_its_own_retention() -> None:
    result = Encoded("application/json", "utf-8", "42")
    settlement = settled(Succeeded(result, FOLLOWUPS, duration_ms=12))
    assert settlement.state is JobState.SUCCEEDED
    assert settlement.recorded is AttemptOutcome.SUCCEEDED
    assert (settlement.result, settlement.followups) == (result, FOLLOWUPS)
    assert (settlement.retention_s, settlement.duration_ms) == (KEPT_S, 12)


def test_an_ignored_success_stays_ignored() -> None:
    assert settled(Succeeded(ignored=True)).ignored


def test_a_transient_failure_is_retried_after_backoff_while_attempts_are_left() -> None:
    settlement = settled(failure(ErrorClass.TRANSIENT), attempt=4, fraction=0.25)
    assert (settlement.state, settlement.recorded) == (JobState.QUEUED, AttemptOutcome.RETRIED)
    assert settlement.delay_s == backoff_s(4, 0.25)
    assert settlement.counted
    assert settlement.followups == ()
    assert settlement.error is not None


def test_the_last_attempt_is_not_retried() -> None:
    settlement = settled(failure(ErrorClass.TRANSIENT), attempt=5)
    assert (settlement.state, settlement.recorded) == (JobState.FAILED, AttemptOutcome.FAILED)
    assert settlement.followups == FOLLOWUPS
    assert settlement.retention_s == FAILED_S


def test_a_final_failure_is_not_retried() -> None:
    assert settled(failure(ErrorClass.TRANSIENT, final=True)).state is JobState.FAILED


@pytest.mark.parametrize("error_class", [ErrorClass.PERMANENT, ErrorClass.INVALID, ErrorClass.CANCELLED])
@pytest.mark.parametrize("retry_on_timeout", [True, False])
def test_classes_that_no_attempt_can_mend_fail_at_once(
    error_class: ErrorClass, retry_on_timeout: bool
) -> None:
    settlement = settled(failure(error_class, retry_on_timeout=retry_on_timeout))
    assert settlement.state is JobState.FAILED
    assert settlement.error is not None
    assert settlement.error.error_class is error_class


def test_a_timeout_is_retried_only_when_the_job_says_so() -> None:
    assert settled(failure(ErrorClass.TIMEOUT)).state is JobState.FAILED
    assert settled(failure(ErrorClass.TIMEOUT, retry_on_timeout=True)).state is JobState.QUEUED
    assert settled(failure(ErrorClass.TIMEOUT, retry_on_timeout=True), attempt=5).state is JobState.FAILED


def test_a_requested_retry_has_its_own_delay_and_message() -> None:
    settlement = settled(RetryRequested(33.0, message={"body": "new"}))
    assert (settlement.state, settlement.recorded) == (JobState.QUEUED, AttemptOutcome.RETRIED)
    assert settlement.delay_s == 33.0
    assert settlement.message == {"body": "new"}


def test_a_requested_retry_without_attempts_left_fails_with_its_error() -> None:
    error = ErrorInfo(ErrorClass.TRANSIENT, "remote down")
    settlement = settled(RetryRequested(1.0, error, {"body": "new"}, followups=FOLLOWUPS), attempt=5)
    assert (settlement.state, settlement.recorded) == (JobState.FAILED, AttemptOutcome.FAILED)
    assert (settlement.error, settlement.message, settlement.followups) == (error, None, FOLLOWUPS)


def test_a_requested_retry_without_attempts_or_error_says_so() -> None:
    error = settled(RetryRequested(1.0), attempt=5).error
    assert error is not None
    assert "no attempts left" in error.text
    assert "5 of 5" in error.text


def test_a_snooze_spends_no_attempt() -> None:
    settlement = settled(Snoozed(60.0, "429 from the model"), attempt=5)
    assert (settlement.state, settlement.recorded) == (JobState.QUEUED, AttemptOutcome.SNOOZED)
    assert (settlement.delay_s, settlement.counted) == (60.0, False)
    assert settlement.error is not None
    assert settlement.error.text == "429 from the model"


def test_a_replacement_starts_anew_at_once_under_its_own_type() -> None:
    message = {"headers": {"task": "app.other"}, "body": ""}
    settlement = settled(Replaced(message), attempt=5)
    assert (settlement.state, settlement.recorded) == (JobState.QUEUED, AttemptOutcome.SUCCEEDED)
    assert (settlement.restart, settlement.message, settlement.type) == (True, message, "app.other")
    assert settlement.delay_s == 0


def test_the_first_lost_worker_is_rerun_at_once_and_the_next_wait_longer() -> None:
    first = settled(WorkerLost("signal 9"), attempt=1)
    assert (first.state, first.recorded, first.delay_s) == (JobState.QUEUED, AttemptOutcome.WORKER_LOST, 0.0)
    assert first.error is not None
    assert first.error.text == "worker lost: signal 9"
    assert first.error.error_class is ErrorClass.TRANSIENT
    assert settled(WorkerLost("signal 9"), attempt=3).delay_s == backoff_s(2, 0.5)


def test_a_job_that_kills_every_worker_fails_in_the_end() -> None:
    settlement = settled(WorkerLost("signal 9", FOLLOWUPS), attempt=5)
    assert (settlement.state, settlement.recorded) == (JobState.FAILED, AttemptOutcome.WORKER_LOST)
    assert settlement.followups == FOLLOWUPS
    assert settled(WorkerLost("signal 9"), attempt=1, max_attempts=1).state is JobState.FAILED


def test_a_release_is_neither_counted_nor_recorded() -> None:
    settlement = settled(Released("draining"))
    assert (settlement.state, settlement.recorded, settlement.delay_s) == (JobState.QUEUED, None, 0.0)
    assert not settlement.counted


def test_a_cancellation_is_terminal() -> None:
    settlement = settled(Cancelled("revoked"))
    assert (settlement.state, settlement.recorded) == (JobState.CANCELLED, AttemptOutcome.CANCELLED)
    assert settlement.retention_s == FAILED_S
    assert settlement.error is not None
    assert settlement.error.error_class is ErrorClass.CANCELLED


def test_a_lost_lease_has_no_settlement() -> None:
    with pytest.raises(ValueError, match="lease is lost"):
        settled(LeaseForfeited("reaped"))


def test_what_is_no_outcome_is_refused() -> None:
    with pytest.raises(AssertionError, match="no outcome"):
        settled(object())  # type: ignore[arg-type]


def test_the_properties_below_see_every_outcome() -> None:
    assert {kind.__name__ for kind in get_args(Outcome)} == {
        "Succeeded", "Failed", "RetryRequested", "Snoozed", "Replaced", "WorkerLost", "Released", "Cancelled",
        "LeaseForfeited",
    }  # fmt: skip


@given(outcomes, jobs, st.floats(0, 1))
def test_every_outcome_of_every_attempt_has_one_lawful_settlement(
    outcome: Outcome, job: Any, fraction: float
) -> None:
    settlement = decide(
        outcome, job, random_fraction=fraction, retention_succeeded_s=KEPT_S, retention_failed_s=FAILED_S
    )
    assert settlement.claim == job.claim
    assert settlement.attempt == job.attempt
    assert settlement.state is not JobState.RUNNING
    assert 0 <= settlement.delay_s < float("inf")
    if settlement.state.terminal:
        assert settlement.counted
        assert settlement.delay_s == 0
        assert settlement.recorded is not None
        assert settlement.message is None
        assert settlement.retention_s == (KEPT_S if settlement.state is JobState.SUCCEEDED else FAILED_S)
        assert (settlement.error is None) == (settlement.state is JobState.SUCCEEDED)
    else:
        assert settlement.followups == ()
        assert settlement.result is None
        assert settlement.retention_s is None
        spent = settlement.counted and not settlement.restart
        assert not spent or job.attempt < job.max_attempts


@given(st.lists(failures, min_size=5, max_size=5))
def test_failures_of_any_kind_end_within_the_attempts(in_a_row: list[Outcome]) -> None:
    ended = [
        settled(outcome, attempt, max_attempts=5).state.terminal
        for attempt, outcome in enumerate(in_a_row, 1)
    ]
    assert ended[-1]
