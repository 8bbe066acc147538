"""The options of a task and of one call: checked, and converted to the units they are used in."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from numbers import Real
from typing import Any

from kombu import compression

from .conf import DAY_S, MAX_ATTEMPTS, MAX_TIMEOUT_S, nearest, shown
from .domain.errors import ConfigurationError, InvalidJob
from .domain.job import MAX_PRIORITY, MIN_PRIORITY
from .domain.redact import one_line

#: A hundred years: the furthest that a job may be put off.
MAX_DELAY_S = 36500 * DAY_S
MAX_NAME = 200
MAX_TAGS = 50


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
    encrypted: bool | None = None


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
    "encrypted": "True or False",
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
    "compression": "one that kombu knows, such as gzip",
}
_SWITCH_OPTIONS = frozenset({"retry_on_timeout", "ai", "sensitive", "encrypted"})
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


def refuse_misspelt(name: str, options: Iterable[str], known: tuple[str, ...]) -> None:
    """Refuse options of one call that are none of ``known`` and nearly one of them; InvalidJob says which.

    Others are left to Celery and kombu, which take any and pass it on unseen.
    """
    for option in options:
        hint = _misspelt(option, known)
        if hint:
            raise InvalidJob(f'job type "{name}": no such option {one_line(option, 100)}{hint}')


@functools.lru_cache(maxsize=1000)
def _misspelt(option: str, known: tuple[str, ...]) -> str:
    return "" if option in known else nearest(option, known, cutoff=0.85)


def _checked_options(whose: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    problems: list[str] = []
    checked: dict[str, Any] = {}
    for option, value in options.items():
        if option not in _OPTION_ALLOWED:
            hint = nearest(str(option), _OPTION_ALLOWED)
            problems.append(f"{whose}: no such option {one_line(str(option), 100)}{hint}")
        elif value is not None:
            try:
                checked[option] = _checked_option(option, value)
            except (TypeError, ValueError, OverflowError):
                problems.append(f"{whose}: {option} is {shown(value)}, must be {_OPTION_ALLOWED[option]}")
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
    if option == "compression":
        _require(isinstance(value, str) and _is_compression(value))
        return value
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


def _is_compression(name: str) -> bool:
    try:
        compression.get_encoder(name)
    except KeyError:
        return False
    return True


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
