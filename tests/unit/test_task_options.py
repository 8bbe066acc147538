"""What a task or a call may state: converted where it is stated, or refused there with the reason."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from relata_celery import InvalidJob, LeasedTask
from relata_celery.domain.errors import ConfigurationError

URL = "relata+mongodb://127.0.0.1:1/nowhere"


def make_app() -> Celery:
    return Celery("options", broker=URL, task_cls="relata_celery:LeasedTask", set_as_current=False)


def work() -> None:
    """A job."""


def bound(**options: Any) -> Any:
    """A task that states these options, bound to its app."""
    app = make_app()
    app.task(name="work", shared=False, **options)(work)
    return app.tasks["work"]


def test_periods_of_a_task_are_kept_in_seconds() -> None:
    minute = timedelta(minutes=1)
    limits = {"soft_time_limit": minute / 2, "time_limit": minute}
    task = bound(timeout=minute, default_retry_delay=minute, expires=minute, **limits)
    assert (task.timeout, task.soft_time_limit, task.time_limit) == (60.0, 30.0, 60.0)
    assert (task.default_retry_delay, task.expires) == (60.0, 60.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_retries": -1}, "max_retries is -1, must be a whole number from 0 to 999, or None for no limit"),
        ({"max_retries": 1000}, "max_retries is 1000, must be a whole number from 0 to 999"),
        ({"max_retries": "3"}, "max_retries is '3', must be"),
        ({"max_attempts": 3, "max_retries": 7}, r"max_retries is 7, must be max_attempts \(3\) less one"),
        ({"soft_time_limit": 9, "time_limit": 5}, r"soft_time_limit is 9, must be at most time_limit \(5\)"),
        ({"soft_time_limit": "9"}, "soft_time_limit is '9', must be seconds"),
        ({"time_limit": float("inf")}, "time_limit is inf, must be seconds"),
        ({"default_retry_delay": -1}, "default_retry_delay is -1, must be seconds"),
        ({"expires": "soon"}, "expires is 'soon', must be seconds"),
    ],
)
def test_a_wrong_option_is_refused_when_the_task_is_bound(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^task work: {reason}"):
        bound(**options)


@pytest.mark.parametrize(
    ("options", "attempts"),
    [
        ({}, 5),
        ({"max_retries": 0}, 1),
        ({"max_retries": None}, 1_000_000),
        ({"max_attempts": 3}, 3),
        ({"max_attempts": 3, "max_retries": 2}, 3),
        ({"max_attempts": 3, "max_retries": None}, 3),
    ],
)
def test_retries_and_attempts_are_one_counter(options: dict[str, Any], attempts: int) -> None:
    task = bound(**options)
    assert (task.max_attempts, task.max_retries) == (attempts, attempts - 1)


def test_what_a_task_states_wins_over_what_its_base_does() -> None:
    class Patient(LeasedTask):
        abstract = True
        max_retries = 7

    assert bound(base=Patient).max_attempts == 8
    task = bound(base=Patient, max_attempts=3)
    assert (task.max_attempts, task.max_retries) == (3, 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("countdown", float("nan")),
        ("countdown", float("inf")),
        ("countdown", 1e12),
        ("countdown", "x"),
        ("countdown", timedelta.max),
        ("countdown", True),
        ("eta", "tomorrow"),
        ("eta", 5),
        ("eta", date(2030, 1, 1)),
        ("eta", datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))),
        ("expires", float("nan")),
        ("expires", 1e12),
        ("expires", "later"),
        ("expires", [1]),
        ("soft_time_limit", "1"),
        ("time_limit", -1),
        ("timeout", 0),
        ("max_attempts", 0),
        ("tags", "abc"),
        ("item_id", ""),
        ("unique_key", 7),
    ],
)
def test_a_wrong_option_of_a_call_is_an_invalid_job_of_that_type(option: str, value: Any) -> None:
    with pytest.raises(InvalidJob, match=rf'^job type "work": {option} is .+, must be '):
        bound().apply_async(**{option: value})
