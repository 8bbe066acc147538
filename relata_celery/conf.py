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
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from .domain.errors import ConfigurationError
from .domain.limits import Rate
from .domain.redact import mask_secrets, one_line

PREFIX = "relata_"
ENVIRONMENT_PREFIX = "RELATA_"

#: Variables that are no settings, without the prefix: where the database is, and what tests are told.
ENVIRONMENT_OTHERS = frozenset({"ENCRYPTION_KEYS", "HOME", "IMPORTS", "MONGOD", "MONGODB_URI"})
ENVIRONMENT_ELSEWHERE = ("TEST_", "DEMO_")

DAY_S = 86400.0
MAX_RETENTION_S = 3650 * DAY_S
MAX_TIMEOUT_S = 7 * DAY_S
MAX_ATTEMPTS = 1000
#: MongoDB holds documents of up to 16 MB; the job's own fields and message need their part.
MAX_RESULT_BYTES = 15_000_000

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
    snooze_limit: float = _seconds(DAY_S, 1.0, 365 * DAY_S)
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
                f"{one_line(key, 100)}: no such setting{nearest(name, Settings.model_fields, PREFIX)}"
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
            lines.append(
                f"environment variable {one_line(variable, 100)} has no effect: no such setting"
                f"{nearest(name, known, ENVIRONMENT_PREFIX)}"
            )
    return tuple(lines)


def parse_rate(text: str) -> tuple[float, float] | None:
    """``(count, period in seconds)`` of a rate such as ``60/m``; None for none, ValueError for nonsense."""
    if not text:
        return None
    rate = Rate.parse(text)
    return rate.count, rate.period_s


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
        was = f"is {shown(values[field])}, " if field in values else ""
        lines.append(f"{origin}: {was}must be {allowed}")
    return lines


def shown(value: Any) -> str:
    """The value as a message may show it: short, on one line, and never a URI."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    if "://" in text:
        return "a URI (not shown)"
    return one_line(mask_secrets(text[:200]), 80)


def nearest(name: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """A hint at the known name that is most like this one, if any is."""
    near = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
