from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relata_celery.conf import (
    Settings,
    environment_warnings,
    load_settings,
    parse_rate,
)
from relata_celery.domain.errors import ConfigurationError
from relata_celery.options import TaskOptions, check_task_options


def problems(conf: dict[str, Any], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(conf, environ or {})
    return str(caught.value).split("\n")


def test_defaults_are_those_of_the_contract() -> None:
    assert load_settings({}, {}).model_dump() == {
        "lease_duration": 60.0,
        "heartbeat_period": 20.0,
        "reap_period": 30.0,
        "poll_interval": 1.0,
        "job_timeout": 600.0,
        "timeout_grace": 5.0,
        "max_attempts": 5,
        "drain_timeout": 30.0,
        "claim_ahead": 0.1,
        "snooze_limit": 86400.0,
        "workers_enabled": True,
        "ai_concurrency": 1,
        "ai_rate": None,
        "retention_succeeded": 7 * 86400.0,
        "retention_failed": 30 * 86400.0,
        "metrics_port": None,
        "metrics_host": "127.0.0.1",
        "max_result_bytes": 1_000_000,
        "allow_unsafe_content": False,
    }


def test_a_celery_apps_configuration_is_read() -> None:
    app = Celery("proj", set_as_current=False)
    app.conf.update(relata_lease_duration=30, relata_workers_enabled=False)
    settings = load_settings(app.conf, {})
    assert (settings.lease_duration, settings.workers_enabled) == (30.0, False)


def test_the_environment_wins_over_the_celery_configuration() -> None:
    settings = load_settings(
        {"relata_max_attempts": 3, "relata_poll_interval": 2}, {"RELATA_MAX_ATTEMPTS": "9", "PATH": "/bin"}
    )
    assert (settings.max_attempts, settings.poll_interval) == (9, 2.0)


def test_an_empty_variable_is_none() -> None:
    assert load_settings({}, {"RELATA_MAX_ATTEMPTS": "", "RELATA_AI_RATE": "  "}).max_attempts == 5


def test_only_the_environment_that_is_handed_in_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELATA_MAX_ATTEMPTS", "77")
    assert load_settings({}, {}).max_attempts == 5


def test_names_count_in_either_case() -> None:
    assert load_settings({"RELATA_MAX_ATTEMPTS": 4}, {}).max_attempts == 4
    assert load_settings({}, {"relata_max_attempts": "4"}).max_attempts == 4


@pytest.mark.parametrize("value", ["none", "None", "0", "0.0", " none "])
def test_no_retention_keeps_for_ever(value: str) -> None:
    assert load_settings({}, {"RELATA_RETENTION_FAILED": value}).retention_failed is None
    assert load_settings({"relata_retention_succeeded": None}, {}).retention_succeeded is None
    assert load_settings({"relata_retention_succeeded": 0}, {}).retention_succeeded is None


def test_a_timedelta_is_a_period() -> None:
    assert load_settings({"relata_retention_failed": timedelta(days=1)}, {}).retention_failed == 86400.0


@pytest.mark.parametrize(
    ("lease_s", "heartbeat_s", "reap_s"), [(3, 1.0, 10.0), (60, 20.0, 30.0), (600, 20.0, 300.0)]
)
def test_periods_that_are_not_given_follow_the_lease(
    lease_s: float, heartbeat_s: float, reap_s: float
) -> None:
    settings = load_settings({"relata_lease_duration": lease_s}, {})
    assert (settings.heartbeat_period, settings.reap_period) == (heartbeat_s, reap_s)


@pytest.mark.parametrize("heartbeat_s", [30, 45.5, 60, 100])
def test_a_heartbeat_of_half_the_lease_or_more_is_refused(heartbeat_s: float) -> None:
    assert problems({"relata_heartbeat_period": heartbeat_s}) == [
        f"relata_heartbeat_period: is {heartbeat_s!r}, must be less than half of lease_duration (60 s), "
        "so that one missed renewal loses no job"
    ]


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("max_attempts", 0, "is 0, must be a whole number from 1 to 1000"),
        ("max_attempts", 2.5, "is 2.5, must be a whole number from 1 to 1000"),
        ("max_attempts", True, "is True, must be a whole number from 1 to 1000"),
        ("max_attempts", None, "is None, must be a whole number from 1 to 1000"),
        ("lease_duration", "long", "is 'long', must be seconds from 0.5 to 86400"),
        ("lease_duration", float("nan"), "is nan, must be seconds from 0.5 to 86400"),
        ("job_timeout", float("inf"), "is inf, must be seconds from 0.01 to 604800"),
        ("claim_ahead", -0.1, "is -0.1, must be seconds from 0 to 60"),
        ("workers_enabled", "perhaps", "is 'perhaps', must be true or false"),
        ("metrics_port", 70000, "is 70000, must be a whole number from 1 to 65535, or none"),
        ("ai_rate", "fast", "is 'fast', must be a rate such as \"60/m\" (per s, m, h or d), or none"),
        ("ai_rate", 60, 'is 60, must be a rate such as "60/m" (per s, m, h or d), or none'),
        ("max_result_bytes", 16_000_000, "is 16000000, must be a whole number from 1000 to 15000000"),
        (
            "retention_failed",
            -1,
            "is -1, must be seconds up to 315360000, or 0 or none to keep them for ever",
        ),
        ("poll_interval", [1], "is [1], must be seconds from 0.02 to 3600"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(key: str, value: Any, line: str) -> None:
    assert problems({f"relata_{key}": value}) == [f"relata_{key}: {line}"]


def test_all_problems_are_told_at_once_with_where_they_come_from() -> None:
    lines = problems({"relata_max_attempts": 0, "relata_lease_duraton": 5}, {"RELATA_POLL_INTERVAL": "often"})
    assert sorted(lines) == [
        "RELATA_POLL_INTERVAL: is 'often', must be seconds from 0.02 to 3600",
        "relata_lease_duraton: no such setting; did you mean relata_lease_duration?",
        "relata_max_attempts: is 0, must be a whole number from 1 to 1000",
    ]


def test_a_uri_or_a_long_or_forged_value_is_not_shown() -> None:
    assert problems({"relata_ai_rate": "mongodb://u:hunter2@h"})[0].startswith(
        "relata_ai_rate: is a URI (not shown), "
    )
    (line,) = problems({"relata_ai_rate": "x" * 1000})
    assert len(line) < 250
    assert len(problems({"relata_ai_rate": "a\nb", "relata_a\nb": 1})) == 2


def test_an_unknown_name_far_from_any_gets_no_suggestion() -> None:
    assert problems({"relata_xyzzy": 1}) == ["relata_xyzzy: no such setting"]


def test_keys_of_others_are_left_alone() -> None:
    others: dict[Any, Any] = {"broker_url": "x", "relata": 1, "relatable": 2, 5: 6}
    assert load_settings(others, {}) == load_settings({}, {})


def test_a_stray_variable_only_warns() -> None:
    environ = {
        "RELATA_LEASE_DURATON": "5",
        "RELATA_LEASE_DURATION": "60",
        "RELATA_MONGODB_URI": "mongodb://u:hunter2@h",
        "RELATA_HOME": "/x",
        "RELATA_IMPORTS": "a",
        "RELATA_MONGOD": "/y",
        "RELATA_TEST_ANYTHING": "1",
        "HOME": "/root",
    }
    load_settings({}, environ)
    assert environment_warnings(environ) == (
        "environment variable RELATA_LEASE_DURATON has no effect: no such setting; "
        "did you mean RELATA_LEASE_DURATION?",
    )


def test_settings_are_frozen() -> None:
    settings = load_settings({}, {})
    with pytest.raises(ValidationError):
        settings.max_attempts = 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60/m", (60.0, 60.0)),
        ("0.5/s", (0.5, 1.0)),
        ("10 / h", (10.0, 3600.0)),
        ("1/d", (1.0, 86400.0)),
        ("", None),
    ],
)
def test_rates(text: str, expected: tuple[float, float] | None) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize("text", ["60", "/m", "0/m", "-1/m", "60/y", "60/m/s", "nan/m"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        parse_rate(text)


raw = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.lists(st.integers())
)
fields = st.sampled_from(sorted(Settings.model_fields))


@given(st.dictionaries(fields, raw), st.dictionaries(fields, st.text()))
def test_whatever_is_given_there_are_valid_settings_or_a_line_for_each_problem(
    conf: dict[str, Any], environ: dict[str, str]
) -> None:
    try:
        settings = load_settings(
            {f"relata_{key}": value for key, value in conf.items()},
            {f"RELATA_{key.upper()}": value for key, value in environ.items()},
        )
    except ConfigurationError as exc:
        lines = str(exc).splitlines()
        assert all(line.lower().startswith("relata_") and "must be" in line for line in lines)
        assert len({line.partition(":")[0].lower() for line in lines}) == len(lines)
    else:
        assert 0 < settings.heartbeat_period < settings.lease_duration / 2
        assert 1 <= settings.max_attempts <= 1000
        assert settings.retention_failed != 0


def test_task_options_are_checked_and_typed() -> None:
    options = {
        "queue": "ai",
        "max_attempts": 3,
        "timeout": timedelta(minutes=1),
        "retry_on_timeout": True,
        "priority": 9,
        "ai": True,
        "item_id": "doc-1",
        "tags": ["a", "b"],
        "unique_key": None,
    }
    assert check_task_options("app.work", options) == TaskOptions(
        queue="ai",
        max_attempts=3,
        timeout=60.0,
        retry_on_timeout=True,
        priority=9,
        ai=True,
        item_id="doc-1",
        tags=("a", "b"),
    )
    assert check_task_options("app.work", {}) == TaskOptions()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("queue", ""),
        ("queue", 5),
        ("queue", "q" * 201),
        ("queue", "a\0b"),
        ("max_attempts", 0),
        ("max_attempts", 1001),
        ("max_attempts", True),
        ("max_attempts", "3"),
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", 604801),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("timeout", 10**400),
        ("timeout", "60"),
        ("timeout", False),
        ("retry_on_timeout", 1),
        ("priority", 10),
        ("priority", -1),
        ("priority", 5.0),
        ("ai", "yes"),
        ("item_id", 7),
        ("item_id", "\ud800"),
        ("tags", "abc"),
        ("tags", ["a"] * 51),
        ("tags", [""]),
        ("unique_key", ""),
    ],
)
def test_a_wrong_option_names_task_option_value_and_what_is_allowed(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^task app\.work: {option} is .+, must be ") as caught:
        check_task_options("app.work", {option: value})
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_task_options("app.work", {"max_attemps": 3, "timeout": 0})
    assert str(caught.value) == (
        "task app.work: no such option max_attemps; did you mean max_attempts?\n"
        "task app.work: timeout is 0, must be seconds above 0, up to 604800"
    )
