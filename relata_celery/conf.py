"""Settings and task options: where they come from, what they may be, and what is said when they are not.

A setting ``lease_duration`` is read from the environment (``RELATA_LEASE_DURATION``), else from the
Celery configuration (``relata_lease_duration``), else it has its default. The environment wins, so
that an operator can change a deployment without changing its code, as with Celery's own
``CELERY_BROKER_URL``.

A wrong value or an unknown name in the Celery configuration is an error, told with all others of
its kind before anything starts. An unknown ``RELATA_...`` variable only warns: a stray variable of
the machine must not stop production. Periods are seconds; a ``timedelta`` is taken too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from numbers import Real
from typing import Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from .domain.errors import ConfigurationError, InvalidJob
from .domain.job import MAX_PRIORITY, MIN_PRIORITY
from .domain.limits import Rate
from .domain.redact import mask_secrets, one_line

PREFIX = "relata_"
ENVIRONMENT_PREFIX = "RELATA_"

#: Variables that are no settings, without the prefix: where the database is, and what tests are told.
ENVIRONMENT_OTHERS = frozenset({"HOME", "IMPORTS", "MONGOD", "MONGODB_URI"})
ENVIRONMENT_ELSEWHERE = ("TEST_", "DEMO_")

DAY_S = 86400.0
MAX_RETENTION_S = 3650 * DAY_S
MAX_TIMEOUT_S = 7 * DAY_S
#: A hundred years: the furthest that a job may be put off.
MAX_DELAY_S = 36500 * DAY_S
MAX_ATTEMPTS = 1000
#: MongoDB holds documents of up to 16 MB; the job's own fields and message need their part.
MAX_RESULT_BYTES = 15_000_000
MAX_NAME = 200
MAX_TAGS = 50

_RATE_ALLOWED = 'a rate such as "60/m" (per s, m, h or d), or none'
_RETENTION_ALLOWED = f"seconds up to {MAX_RETENTION_S:.0f}, or 0 or none to keep them for ever"


def _seconds(default: float | None, lowest: float, highest: float) -> Any:
    """A field of seconds within bounds; a default of None is worked out from the lease."""
    return Field(
        default=default,
        validate_default=True,
        ge=lowest,
        le=highest,
        allow_inf_nan=False,
        description=f"seconds from {lowest:g} to {highest:.0f}",
    )


def _whole(default: int | None, lowest: int, highest: int, or_none: str = "") -> Any:
    description = f"a whole number from {lowest} to {highest}{or_none}"
    return Field(default=default, ge=lowest, le=highest, description=description)


class Settings(BaseSettings):
    """Every setting of the package, valid. Frozen; periods are seconds.

    A ``heartbeat_period`` that was not given is 20 s or a third of the lease, whichever is less;
    a ``reap_period`` that was not given is half the lease, and at least 10 s. A retention of None
    keeps ended jobs for ever.
    """

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, frozen=True, extra="forbid")

    lease_duration: float = _seconds(60.0, 0.5, DAY_S)
    heartbeat_period: float = _seconds(None, 0.05, DAY_S / 2)
    reap_period: float = _seconds(None, 0.1, 3600.0)
    poll_interval: float = _seconds(1.0, 0.02, 3600.0)
    job_timeout: float = _seconds(600.0, 0.01, MAX_TIMEOUT_S)
    timeout_grace: float = _seconds(5.0, 0.0, 600.0)
    max_attempts: int = _whole(5, 1, MAX_ATTEMPTS)
    drain_timeout: float = _seconds(30.0, 0.0, DAY_S)
    claim_ahead: float = _seconds(0.1, 0.0, 60.0)
    workers_enabled: bool = Field(default=True, description="true or false")
    ai_concurrency: int = _whole(1, 1, 10_000)
    ai_rate: str | None = Field(default=None, description=_RATE_ALLOWED)
    retention_succeeded: float | None = Field(
        default=7 * DAY_S, ge=0, le=MAX_RETENTION_S, allow_inf_nan=False, description=_RETENTION_ALLOWED
    )
    retention_failed: float | None = Field(
        default=30 * DAY_S, ge=0, le=MAX_RETENTION_S, allow_inf_nan=False, description=_RETENTION_ALLOWED
    )
    metrics_port: int | None = _whole(None, 1, 65535, ", or none")
    metrics_host: str = Field(default="127.0.0.1", min_length=1, description="an address of this machine")
    max_result_bytes: int = _whole(1_000_000, 1000, MAX_RESULT_BYTES)
    allow_unsafe_content: bool = Field(default=False, description="true or false")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is handed in, and nothing else: :func:`load_settings` is given the environment."""
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _read_plainly(cls, value: Any, info: ValidationInfo) -> Any:
        """Take what people write: a timedelta, spaces, ``none``; refuse true and false for a number."""
        if isinstance(value, timedelta):
            return value.total_seconds()
        if isinstance(value, str):
            value = value.strip()
            if value.lower() in ("none", "null") and info.field_name in _NULLABLE:
                return None
        if isinstance(value, bool) and info.field_name not in _SWITCHES:
            raise ValueError("not a number")
        return value

    @field_validator("heartbeat_period", "reap_period", mode="before")
    @classmethod
    def _from_lease(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            return value
        lease_s = info.data.get("lease_duration", 60.0)
        if info.field_name == "heartbeat_period":
            return min(20.0, lease_s / 3)
        return min(max(lease_s / 2, 10.0), 3600.0)

    @field_validator("heartbeat_period")
    @classmethod
    def _renewed_in_time(cls, value: float, info: ValidationInfo) -> float:
        lease_s = info.data.get("lease_duration")
        if lease_s is not None and value >= lease_s / 2:
            raise _OutOfStep(
                f"less than half of lease_duration ({lease_s:g} s), so that one missed renewal loses no job"
            )
        return value

    @field_validator("ai_rate")
    @classmethod
    def _is_rate(cls, value: str | None) -> str | None:
        return None if not value or parse_rate(value) is None else value

    @field_validator("retention_succeeded", "retention_failed")
    @classmethod
    def _zero_keeps(cls, value: float | None) -> float | None:
        return value or None


_NULLABLE = frozenset(
    {"ai_rate", "heartbeat_period", "metrics_port", "reap_period", "retention_failed", "retention_succeeded"}
)
_SWITCHES = frozenset({"allow_unsafe_content", "workers_enabled"})


class _OutOfStep(ValueError):
    """Two settings that contradict each other; the text says what is allowed."""


class _Environment(EnvSettingsSource):
    """The settings in an environment that is handed in; an empty variable is none."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(Settings)
        self.env_vars = {name.lower(): value for name, value in environ.items() if value.strip()}


def load_settings(conf: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """The settings of a Celery configuration and an environment.

    Raises ConfigurationError with a line for each problem: which setting, from where, what it was
    (never a URI), and what is allowed.
    """
    problems: list[str] = []
    from_conf: dict[str, Any] = {}
    for key in conf:
        if not isinstance(key, str) or not key.lower().startswith(PREFIX):
            continue
        name = key.lower()[len(PREFIX) :]
        if name in Settings.model_fields:
            from_conf[name] = conf[key]
        else:
            problems.append(
                f"{one_line(key, 100)}: no such setting{_nearest(name, Settings.model_fields, PREFIX)}"
            )
    from_environment = _Environment(environ)()
    values = {**from_conf, **from_environment}
    try:
        settings = Settings(**values)
    except ValidationError as exc:
        problems += _problems(exc, values, from_environment)
    if problems:
        raise ConfigurationError("\n".join(problems))
    return settings


def environment_warnings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each ``RELATA_...`` variable that is no setting: perhaps misspelt, and without effect."""
    known = {field.upper() for field in Settings.model_fields} | ENVIRONMENT_OTHERS
    lines = []
    for variable in sorted(environ):
        prefix, name = (
            variable[: len(ENVIRONMENT_PREFIX)].upper(),
            variable[len(ENVIRONMENT_PREFIX) :].upper(),
        )
        if prefix == ENVIRONMENT_PREFIX and name not in known and not name.startswith(ENVIRONMENT_ELSEWHERE):
            nearest = _nearest(name, known, ENVIRONMENT_PREFIX)
            lines.append(
                f"environment variable {one_line(variable, 100)} has no effect: no such setting{nearest}"
            )
    return tuple(lines)


def parse_rate(text: str) -> tuple[float, float] | None:
    """``(count, period in seconds)`` of a rate such as ``60/m``; None for none, ValueError for nonsense."""
    if not text:
        return None
    rate = Rate.parse(text)
    return rate.count, rate.period_s


@dataclass(frozen=True)
class TaskOptions:
    """The options of one task, valid and in the units they are used in. None: not given."""

    queue: str | None = None
    max_attempts: int | None = None
    timeout: float | None = None
    retry_on_timeout: bool | None = None
    priority: int | None = None
    ai: bool | None = None
    sensitive: bool | None = None
    item_id: str | None = None
    tags: tuple[str, ...] | None = None
    unique_key: str | None = None
    max_retries: int | None = None
    soft_time_limit: float | None = None
    time_limit: float | None = None
    default_retry_delay: float | None = None
    expires: float | datetime | str | None = None


_SHORT_TEXT = f"text of 1 to {MAX_NAME} characters"
_LIMIT = f"seconds from 0 (no limit) to {MAX_TIMEOUT_S:.0f}, or a timedelta"
_DELAY = f"seconds up to {MAX_DELAY_S:.0f}, or a timedelta"
_MOMENT = "a datetime, or a time in ISO 8601"
_OPTION_ALLOWED: Mapping[str, str] = {
    "queue": _SHORT_TEXT,
    "max_attempts": f"a whole number from 1 to {MAX_ATTEMPTS}",
    "timeout": f"seconds above 0, up to {MAX_TIMEOUT_S:.0f}",
    "retry_on_timeout": "True or False",
    "priority": f"a whole number from {MIN_PRIORITY} to {MAX_PRIORITY} ({MAX_PRIORITY} is served first)",
    "ai": "True or False",
    "sensitive": "True or False",
    "item_id": _SHORT_TEXT,
    "tags": f"a list of up to {MAX_TAGS} texts of 1 to {MAX_NAME} characters",
    "unique_key": _SHORT_TEXT,
    "max_retries": f"a whole number from 0 to {MAX_ATTEMPTS - 1}, or None for no limit",
    "soft_time_limit": _LIMIT,
    "time_limit": _LIMIT,
    "default_retry_delay": _DELAY,
    "countdown": _DELAY,
    "eta": _MOMENT,
    "expires": f"{_DELAY}, {_MOMENT}",
}
_SWITCH_OPTIONS = frozenset({"retry_on_timeout", "ai", "sensitive"})
_WHOLE_OPTIONS = {
    "max_attempts": (1, MAX_ATTEMPTS),
    "max_retries": (0, MAX_ATTEMPTS - 1),
    "priority": (MIN_PRIORITY, MAX_PRIORITY),
}


def check_task_options(name: str, options: Mapping[str, Any]) -> TaskOptions:
    """The options of task ``name``, checked and converted; an option of None counts as not given.

    Raises ConfigurationError with a line for each problem: the task, the option, what it was, and
    what is allowed; an unknown option is told with the nearest known one.
    """
    task = f"task {one_line(name, 200)}"
    checked, problems = _checked_options(task, options)
    soft, hard = checked.get("soft_time_limit"), checked.get("time_limit")
    if soft and hard and soft > hard:
        problems.append(f"{task}: soft_time_limit is {soft:g}, must be at most time_limit ({hard:g})")
    if problems:
        raise ConfigurationError("\n".join(problems))
    return TaskOptions(**checked)


def check_call_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one call of task ``name`` that are not None, checked and converted.

    Raises InvalidJob with a line for each problem: the job type, the option, what it was, and what is allowed.
    """
    checked, problems = _checked_options(f'job type "{one_line(name, 200)}"', options)
    if problems:
        raise InvalidJob("\n".join(problems))
    return checked


def _checked_options(whose: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    problems: list[str] = []
    checked: dict[str, Any] = {}
    for option, value in options.items():
        if option not in _OPTION_ALLOWED:
            nearest = _nearest(str(option), _OPTION_ALLOWED)
            problems.append(f"{whose}: no such option {one_line(str(option), 100)}{nearest}")
        elif value is not None:
            try:
                checked[option] = _checked_option(option, value)
            except (TypeError, ValueError, OverflowError):
                problems.append(f"{whose}: {option} is {_shown(value)}, must be {_OPTION_ALLOWED[option]}")
    return checked, problems


def _checked_option(option: str, value: Any) -> Any:
    if option in _SWITCH_OPTIONS:
        _require(isinstance(value, bool))
        return value
    if option in _WHOLE_OPTIONS:
        lowest, highest = _WHOLE_OPTIONS[option]
        _require(isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest)
        return int(value)
    if option == "timeout":
        seconds = _period(value, MAX_TIMEOUT_S)
        _require(seconds > 0)
        return seconds
    if option in ("soft_time_limit", "time_limit"):
        return _period(value, MAX_TIMEOUT_S)
    if option == "default_retry_delay":
        return _period(value, MAX_DELAY_S)
    if option == "countdown":
        return _period(value, MAX_DELAY_S, -MAX_DELAY_S)
    if option == "eta":
        return _moment(value)
    if option == "expires":
        return _moment(value) if isinstance(value, (datetime, str)) else _period(value, MAX_DELAY_S, -MAX_DELAY_S)
    if option == "tags":
        _require(
            isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) <= MAX_TAGS
        )
        return tuple(_short_text(tag) for tag in value)
    return _short_text(value)


def _period(value: Any, highest: float, lowest: float = 0.0) -> float:
    """Seconds within bounds, of a number or a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    _require(isinstance(seconds, Real) and not isinstance(seconds, bool))
    _require(lowest <= seconds <= highest)  # never true of NaN
    return float(seconds)


def _moment(value: Any) -> Any:
    """A time as it was given, if it is one that every time zone has."""
    _require(isinstance(value, (datetime, str)))
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(value.replace("Z", "+00:00"))
    (moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    return value


def _short_text(value: Any) -> str:
    _require(isinstance(value, str) and 0 < len(value) <= MAX_NAME and "\0" not in value)
    value.encode()  # a lone surrogate can be neither stored nor sent
    return str(value)


def _require(allowed: bool) -> None:
    if not allowed:
        raise ValueError


def _problems(
    exc: ValidationError, values: Mapping[str, Any], from_environment: Mapping[str, Any]
) -> list[str]:
    """One line for each setting that is wrong, in our words."""
    lines = []
    for error in exc.errors(include_url=False):
        field = str(error["loc"][0])
        cause = error.get("ctx", {}).get("error")
        allowed = str(cause) if isinstance(cause, _OutOfStep) else Settings.model_fields[field].description
        origin = ENVIRONMENT_PREFIX + field.upper() if field in from_environment else PREFIX + field
        was = f"is {_shown(values[field])}, " if field in values else ""
        lines.append(f"{origin}: {was}must be {allowed}")
    return lines


def _shown(value: Any) -> str:
    """The value as a message may show it: short, on one line, and never a URI."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    if "://" in text:
        return "a URI (not shown)"
    return one_line(mask_secrets(text[:200]), 80)


def _nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
