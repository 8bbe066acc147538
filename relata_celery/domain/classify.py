"""What kind of failure an exception is, how long it asks to wait, and what of it is kept.

Libraries are recognised by the shape and the names of their exceptions, never by importing them:
openai, anthropic, httpx, requests, google-genai, ollama, aiohttp and urllib all carry an HTTP
status under one of four names. Nothing here raises, whatever the exception's attributes do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timezone
from email.utils import parsedate_to_datetime
from types import FrameType
from typing import Any

from .errors import JobError, RateLimited
from .job import ErrorClass
from .outcome import ErrorInfo
from .redact import MAX_TEXT, cap, frames, is_panic, mask_secrets, one_line, panic_text, safe_text, type_name

#: No provider is waited for longer than this, in seconds.
MAX_RETRY_AFTER_S = 24 * 3600.0
MAX_TRACEBACK = 8000

_TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
_PERMANENT_STATUS = frozenset({400, 401, 403, 404, 410, 422})
_TOO_MANY_REQUESTS = 429

#: Exceptions known by the root of their module and their name; subclasses count.
_BY_NAME: Mapping[tuple[str, str], ErrorClass] = {
    ("billiard", "SoftTimeLimitExceeded"): ErrorClass.TIMEOUT,
    ("billiard", "TimeLimitExceeded"): ErrorClass.TIMEOUT,
    ("celery", "SoftTimeLimitExceeded"): ErrorClass.TIMEOUT,
    ("celery", "TimeLimitExceeded"): ErrorClass.TIMEOUT,
    ("celery", "InvalidTaskError"): ErrorClass.PERMANENT,
    ("celery", "MaxRetriesExceededError"): ErrorClass.PERMANENT,
    ("celery", "NotRegistered"): ErrorClass.PERMANENT,
    ("celery", "TaskRevokedError"): ErrorClass.CANCELLED,
    ("kombu", "ContentDisallowed"): ErrorClass.PERMANENT,
    ("kombu", "DecodeError"): ErrorClass.PERMANENT,
    ("kombu", "EncodeError"): ErrorClass.PERMANENT,
    # What a model answered is not what was asked for: the same question is likely to get the same answer.
    ("json", "JSONDecodeError"): ErrorClass.INVALID,
    ("jsonschema", "ValidationError"): ErrorClass.INVALID,
    ("openai", "LengthFinishReasonError"): ErrorClass.INVALID,
    ("pydantic", "ValidationError"): ErrorClass.INVALID,
    ("pydantic_core", "ValidationError"): ErrorClass.INVALID,
    ("openai", "ContentFilterFinishReasonError"): ErrorClass.PERMANENT,
}

#: Libraries whose ``code`` counts something else than HTTP does.
_OTHER_CODES = frozenset({"pymongo"})

_MAX_CHAIN = 5
_FIRST_FRAMES, _LAST_FRAMES = 10, 30
_MAX_HEADERS = 200
#: A longer answer than this is no refusal in a few words, and is not looked into, in bytes.
_MAX_BODY = 20_000
_MAX_HEADER_TEXT = 200
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{0,9})?|\.\d{1,9}", re.ASCII)
_DURATION = re.compile(r"(?:\d{1,12}(?:\.\d{1,9})?(?:ms|us|[dhms]))+", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|[dhms])", re.ASCII)
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
#: A larger ``x-ratelimit-reset`` is a moment (seconds since 1970), not a duration.
_EPOCH_FROM = 1e9


def classify(exc: BaseException) -> ErrorClass:
    """The class of a failure; whatever is not recognised is transient."""
    if isinstance(exc, JobError):
        given = _attribute(exc, "error_class")
        return given if type(given) is ErrorClass else ErrorClass.TRANSIENT
    for cls in type(exc).__mro__:
        known = _BY_NAME.get((_root_of(cls), cls.__name__))
        if known is not None:
            return known
    if _is_network_error(exc) or is_panic(exc):
        return ErrorClass.TRANSIENT
    if _is_out_of_quota(exc):
        return ErrorClass.PERMANENT
    status = http_status(exc)
    return ErrorClass.PERMANENT if status in _PERMANENT_STATUS else ErrorClass.TRANSIENT


def http_status(exc: BaseException) -> int | None:
    """The HTTP status that the exception or its ``response`` carries, None when there is none."""
    if any(_root_of(cls) in _OTHER_CODES for cls in type(exc).__mro__):
        return None
    response = _attribute(exc, "response")
    for owner, name, lowest in (
        (exc, "status_code", 100),
        (response, "status_code", 100),
        (response, "status", 100),
        (exc, "code", 400),
        (exc, "status", 400),
    ):
        value = _attribute(owner, name)
        if not issubclass(type(value), int) or type(value) is bool:
            continue
        number = int.__add__(value, 0)  # of a subclass, whatever it overrides
        if lowest <= number <= 599:
            return number
    return None


def retry_after_s(exc: BaseException, now_epoch_s: float) -> float | None:
    """How many seconds the provider asks to wait, from 0 to 24 hours; None when it does not say.

    Read from ``RateLimited.retry_after``, or of an HTTP 429 from the headers ``retry-after-ms``,
    ``Retry-After`` (seconds, or a date compared with ``now_epoch_s``) and ``x-ratelimit-reset*``,
    in this order. A spent quota is no reason to wait, so it gives None.
    """
    if isinstance(exc, RateLimited):
        return _bounded(_attribute(exc, "retry_after"))
    if isinstance(exc, JobError) or http_status(exc) != _TOO_MANY_REQUESTS or _is_out_of_quota(exc):
        return None
    headers = _headers(exc)
    readers: tuple[tuple[str, Callable[[str], float | None]], ...] = (
        ("retry-after-ms", lambda text: _scaled(_number(text), 0.001)),
        ("retry-after", lambda text: _seconds_or_date(text, now_epoch_s)),
    )
    for name, read in readers:
        wait_s = _bounded(read(headers[name])) if name in headers else None
        if wait_s is not None:
            return wait_s
    return _bounded(_limit_reset(headers, now_epoch_s))


def describe(exc: BaseException, task_module: str | None = None) -> ErrorInfo:
    """The failure in plain values, capped and redacted; never raises.

    ``task_module`` names the module of the handler: of a panic, the place kept is there if it
    passed there. The traceback holds types and places, of chained exceptions too, never a text,
    a source line or a value.
    """
    try:
        error_class = classify(exc)
    except Exception:
        error_class = ErrorClass.TRANSIENT
    try:
        return ErrorInfo(
            error_class=error_class,
            text=_text(exc, error_class, task_module),
            exception=_qualified_name(exc),
            module=one_line(str(type(exc).__module__), 200),
            args_json=_args_json(exc),
            traceback=_places(exc),
        )
    except Exception:
        return ErrorInfo(error_class, "job handler raised an exception that cannot be described")


def _text(exc: BaseException, error_class: ErrorClass, task_module: str | None) -> str:
    if error_class is ErrorClass.TIMEOUT and not isinstance(exc, JobError):
        return f"the job's time ran out ({type_name(exc)})"
    return panic_text(exc, task_module) if is_panic(exc) else safe_text(exc)


def _qualified_name(exc: BaseException) -> str:
    return one_line(str(type(exc).__qualname__), 200)


def _args_json(exc: BaseException) -> str | None:
    """The arguments as JSON, if the exception is on purpose and they are short, plain and hold no secret."""
    args = _attribute(exc, "args")
    if type(args) is not tuple or is_panic(exc):
        return None
    pieces: list[str] = []
    size = 0
    try:
        for piece in json.JSONEncoder(allow_nan=False, separators=(",", ":")).iterencode(args):
            size += len(piece)
            if size > MAX_TEXT:
                return None
            pieces.append(piece)
    except Exception:
        return None
    text = "".join(pieces)
    return text if mask_secrets(text) == text else None


def _places(exc: BaseException) -> str | None:
    """The exception and those it was raised from, oldest first, by type and place."""
    parts: list[str] = []
    for link, how in _chain(exc):
        lines = [_place_line(frame, line) for frame, line in frames(link)]
        hidden = len(lines) - _FIRST_FRAMES - _LAST_FRAMES
        if hidden > 0:
            lines[_FIRST_FRAMES:-_LAST_FRAMES] = [f"  ... {hidden} more ..."]
        module = type(link).__module__
        name = _qualified_name(link)
        lines.append(name if module == "builtins" else f"{one_line(str(module), 200)}.{name}")
        if how:
            lines.append(how)
        parts.append("\n".join(lines))
    return cap("\n".join(reversed(parts)), MAX_TRACEBACK)


def _place_line(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f'  File "{one_line(code.co_filename, 500)}", line {line}, in {one_line(code.co_name, 200)}'


def _chain(exc: BaseException) -> Iterator[tuple[BaseException, str]]:
    """The exception and its causes, newest first; with each cause, the words that lead on from it."""
    seen: set[int] = set()
    link: BaseException | None = exc
    how = ""
    while link is not None and id(link) not in seen and len(seen) < _MAX_CHAIN:
        seen.add(id(link))
        yield link, how
        if link.__cause__ is not None:
            link, how = link.__cause__, "... was the cause of:"
        elif link.__context__ is not None and not link.__suppress_context__:
            link, how = link.__context__, "... was being handled when this was raised:"
        else:
            link = None


def _is_network_error(exc: BaseException) -> bool:
    """A connection that failed or timed out: no status it may carry says more."""
    return isinstance(exc, (ConnectionError, TimeoutError))


def _is_out_of_quota(exc: BaseException) -> bool:
    """True for ``insufficient_quota``: a 429 that no waiting mends."""
    bodies = [_attribute(exc, "body")]
    if http_status(exc) == _TOO_MANY_REQUESTS:
        bodies.append(_answered(_attribute(exc, "response")))
    places = [exc, *bodies, *(_item(body, "error") for body in bodies)]
    return any(
        found == "insufficient_quota"
        for owner in places
        for name in ("code", "type")
        for found in (_item(owner, name) if type(owner) is dict else _attribute(owner, name),)
        if type(found) is str
    )


def _answered(response: object) -> Any:
    """The JSON that an httpx or requests response was answered with, if all of it is there already."""
    try:
        content = vars(response).get("_content")
        return json.loads(content) if isinstance(content, bytes) and len(content) <= _MAX_BODY else None
    except Exception:
        return None


def _headers(exc: BaseException) -> dict[str, str]:
    """The response's headers, with names in lower case; empty when there are none to be had."""
    found: dict[str, str] = {}
    for owner in (_attribute(exc, "response"), exc):
        headers = _attribute(owner, "headers")
        if headers is None:
            continue
        try:
            for number, (name, value) in enumerate(headers.items()):
                if number >= _MAX_HEADERS:
                    break
                found.setdefault(_latin(name).lower(), _latin(value).strip())
        except Exception:
            continue
    return found


def _latin(value: object) -> str:
    if isinstance(value, bytes):
        return value[:_MAX_HEADER_TEXT].decode("latin-1")
    return value[:_MAX_HEADER_TEXT] if isinstance(value, str) else str(value)[:_MAX_HEADER_TEXT]


def _limit_reset(headers: Mapping[str, str], now_epoch_s: float) -> float | None:
    """When the limit that refused is open again: of those spent the latest, else the earliest of all."""
    spent: list[float] = []
    others: list[float] = []
    for name, text in headers.items():
        if not name.startswith("x-ratelimit-reset"):
            continue
        wait_s = _reset(text, now_epoch_s)
        if wait_s is None:
            continue
        remaining = _number(headers.get(name.replace("reset", "remaining", 1), ""))
        (spent if remaining == 0 else others).append(wait_s)
    if spent:
        return max(spent)
    return min(others, default=None)


def _reset(text: str, now_epoch_s: float) -> float | None:
    number = _number(text)
    if number is not None:
        return max(0.0, number - now_epoch_s) if number >= _EPOCH_FROM else number
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNIT_S[unit] for number, unit in _DURATION_PART.findall(text))


def _seconds_or_date(text: str, now_epoch_s: float) -> float | None:
    number = _number(text)
    if number is not None:
        return number
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return max(0.0, moment.timestamp() - now_epoch_s)
    except Exception:
        return None


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _scaled(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def _bounded(value: Any) -> float | None:
    if type(value) is bool or not issubclass(type(value), (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return MAX_RETRY_AFTER_S if value > 0 else 0.0
    except Exception:
        return None
    return None if math.isnan(number) else min(max(number, 0.0), MAX_RETRY_AFTER_S)


def _attribute(owner: object, name: str) -> Any:
    """``owner.name``, or None: a property may raise anything."""
    if owner is None:
        return None
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _item(owner: object, name: str) -> Any:
    return owner.get(name) if type(owner) is dict else None


def _root_of(cls: type) -> str:
    module = cls.__module__
    return module.partition(".")[0] if type(module) is str else ""
