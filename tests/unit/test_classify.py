"""Which class a failure has, how long it asks to wait, and what is kept of it.

Client libraries are played by exceptions of the same shape: a status under the same name.
"""

from __future__ import annotations

import errno
import json
import urllib.error
from email.message import Message
from http import HTTPStatus
from typing import Any

import billiard.exceptions
import celery.exceptions
import httpx
import kombu.exceptions
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relata_celery.domain import errors
from relata_celery.domain.classify import MAX_RETRY_AFTER_S, classify, describe, http_status, retry_after_s
from relata_celery.domain.job import ErrorClass

NOW_S = 1_700_000_000.0


class Shaped(Exception):
    """An exception with whatever attributes a client library gives its own."""

    def __init__(self, text: str = "refused", **attributes: Any) -> None:
        super().__init__(text)
        self.__dict__.update(attributes)


class Thing:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class FalsyResponse(Thing):
    """As in requests: a response is false when its status is an error."""

    def __bool__(self) -> bool:
        return False


def openai(status: int, code: str | None = None, **headers: str) -> Shaped:
    response = Thing(status_code=status, headers={k.replace("_", "-"): v for k, v in headers.items()})
    return Shaped(status_code=status, code=code, response=response, body={"code": code})


SHAPES: dict[str, Any] = {
    "openai": openai,
    "anthropic": lambda status: Shaped(status_code=status, response=Thing(status_code=status)),
    "httpx": lambda status: httpx.HTTPStatusError(
        "no", request=httpx.Request("GET", "http://h"), response=httpx.Response(status)
    ),
    "requests": lambda status: Shaped(response=FalsyResponse(status_code=status)),
    "google-genai": lambda status: Shaped(code=status, status="SOME_NAME"),
    "ollama": lambda status: Shaped(status_code=status, error="no"),
    "aiohttp": lambda status: Shaped(status=status),
    "enum": lambda status: Shaped(status_code=HTTPStatus(status)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504])
def test_statuses_that_pass_are_transient(shape: str, status: int) -> None:
    assert http_status(SHAPES[shape](status)) == status
    assert classify(SHAPES[shape](status)) is ErrorClass.TRANSIENT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 422])
def test_statuses_that_stay_are_permanent(shape: str, status: int) -> None:
    assert classify(SHAPES[shape](status)) is ErrorClass.PERMANENT


class Answer(pydantic.BaseModel):
    title: str


@pytest.mark.parametrize(
    "parse",
    [json.loads, Answer.model_validate_json, lambda text: httpx.Response(200, text=text).json()],
    ids=["json", "pydantic", "httpx"],
)
def test_an_answer_of_the_wrong_structure_is_invalid_and_its_words_are_not_kept(parse: Any) -> None:
    with pytest.raises(ValueError) as caught:
        parse("Here is the secret summary: {")
    info = describe(caught.value, "app")
    assert info.error_class is ErrorClass.INVALID
    assert "secret" not in f"{info}"


@pytest.mark.parametrize("status", [402, 405, 413, 418, 451])
def test_statuses_of_neither_list_are_transient(status: int) -> None:
    assert classify(Shaped(status_code=status)) is ErrorClass.TRANSIENT


def test_urllib_errors_are_recognised() -> None:
    with urllib.error.HTTPError("http://h", 404, "gone", Message(), None) as exc:
        assert classify(exc) is ErrorClass.PERMANENT


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        (errors.TransientError("x"), ErrorClass.TRANSIENT),
        (errors.RateLimited("x"), ErrorClass.TRANSIENT),
        (errors.PermanentError("x"), ErrorClass.PERMANENT),
        (errors.InvalidOutputError("x"), ErrorClass.INVALID),
        (errors.JobTimeout("x"), ErrorClass.TIMEOUT),
        (errors.JobCancelled("x"), ErrorClass.CANCELLED),
        (errors.LeaseLost("x"), ErrorClass.CANCELLED),
        (errors.JobError("x"), ErrorClass.TRANSIENT),
        (errors.JobError("x", error_class="invalid"), ErrorClass.INVALID),
        (ConnectionResetError("x"), ErrorClass.TRANSIENT),
        (TimeoutError("x"), ErrorClass.TRANSIENT),
        (OSError(errno.ENETUNREACH, "x"), ErrorClass.TRANSIENT),
        (billiard.exceptions.SoftTimeLimitExceeded(), ErrorClass.TIMEOUT),
        (billiard.exceptions.TimeLimitExceeded(5), ErrorClass.TIMEOUT),
        (celery.exceptions.SoftTimeLimitExceeded(), ErrorClass.TIMEOUT),
        (billiard.exceptions.WorkerLostError("x"), ErrorClass.TRANSIENT),
        (celery.exceptions.MaxRetriesExceededError("x"), ErrorClass.PERMANENT),
        (celery.exceptions.NotRegistered("x"), ErrorClass.PERMANENT),
        (kombu.exceptions.EncodeError("x"), ErrorClass.PERMANENT),
        (kombu.exceptions.DecodeError("x"), ErrorClass.PERMANENT),
        (kombu.exceptions.ContentDisallowed("x"), ErrorClass.PERMANENT),
        (kombu.exceptions.OperationalError("x"), ErrorClass.TRANSIENT),
        (ValueError("x"), ErrorClass.TRANSIENT),
        (KeyError("x"), ErrorClass.TRANSIENT),
        (SystemExit(404), ErrorClass.TRANSIENT),
        (Shaped(code=7), ErrorClass.TRANSIENT),
        (Shaped(code="404"), ErrorClass.TRANSIENT),
        (Shaped(status_code=True), ErrorClass.TRANSIENT),
        (Shaped(status_code=200, code=404), ErrorClass.TRANSIENT),
    ],
)
def test_the_table(exc: BaseException, expected: ErrorClass) -> None:
    assert classify(exc) is expected


def test_a_subclass_of_a_known_exception_is_known() -> None:
    class Mine(celery.exceptions.MaxRetriesExceededError):  # type: ignore[misc,unused-ignore]
        pass

    assert classify(Mine("x")) is ErrorClass.PERMANENT


def test_a_job_errors_own_class_wins_over_any_status() -> None:
    exc = errors.TransientError("x")
    exc.status_code = 404  # type: ignore[attr-defined]
    assert classify(exc) is ErrorClass.TRANSIENT


def test_a_job_error_with_a_strange_class_is_transient() -> None:
    exc = errors.JobError("x")
    exc.error_class = "strange"  # type: ignore[assignment]
    assert classify(exc) is ErrorClass.TRANSIENT


def test_a_spent_quota_is_permanent_and_never_waited_for() -> None:
    for exc in (
        openai(429, "insufficient_quota", retry_after="5"),
        Shaped(status_code=429, body={"error": {"type": "insufficient_quota"}}),
    ):
        assert classify(exc) is ErrorClass.PERMANENT
        assert retry_after_s(exc, NOW_S) is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry_after": "7"}, 7.0),
        ({"Retry_After": " 1.5 "}, 1.5),
        ({"retry_after_ms": "250", "retry_after": "9"}, 0.25),
        ({"retry_after_ms": "soon", "retry_after": "9"}, 9.0),
        ({"retry_after": "Tue, 14 Nov 2023 22:13:50 GMT"}, 30.0),
        ({"retry_after": "Tue, 14 Nov 2023 22:13:10 GMT"}, 0.0),
        ({"retry_after": "9999999"}, MAX_RETRY_AFTER_S),
        ({"retry_after": "-5"}, None),
        ({"retry_after": "nan"}, None),
        ({"retry_after": "inf"}, None),
        ({"retry_after": "soon"}, None),
        ({"retry_after": ""}, None),
        ({"retry_after": "٣"}, None),
        ({"x_ratelimit_reset_requests": "1s"}, 1.0),
        ({"x_ratelimit_reset_tokens": "6m0s"}, 360.0),
        ({"x_ratelimit_reset_tokens": "1h2m3.5s"}, 3723.5),
        ({"x_ratelimit_reset_tokens": "120ms"}, 0.12),
        ({"x_ratelimit_reset_tokens": "12q"}, None),
        ({"x_ratelimit_reset": "1700000060"}, 60.0),
        ({"x_ratelimit_reset_requests": "1s", "x_ratelimit_reset_tokens": "5s"}, 1.0),
        (
            {
                "x_ratelimit_reset_requests": "23h",
                "x_ratelimit_remaining_requests": "50",
                "x_ratelimit_reset_tokens": "5s",
                "x_ratelimit_remaining_tokens": "0",
            },
            5.0,
        ),
        ({}, None),
    ],
)
def test_how_long_a_429_asks_to_wait(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(openai(429, None, **headers), NOW_S) == expected


def test_headers_may_be_on_the_exception_and_bytes() -> None:
    assert retry_after_s(Shaped(status=429, headers={b"Retry-After": b"3"}), NOW_S) == 3.0
    response = httpx.Response(429, headers={"Retry-After": "4"})
    exc = httpx.HTTPStatusError("x", request=httpx.Request("GET", "http://h"), response=response)
    assert retry_after_s(exc, NOW_S) == 4.0


@pytest.mark.parametrize("status", [200, 404, 503])
def test_only_a_429_is_waited_for(status: int) -> None:
    assert retry_after_s(openai(status, None, retry_after="7"), NOW_S) is None


@pytest.mark.parametrize(
    ("given_s", "expected"),
    [
        (5, 5.0),
        (-1, 0.0),
        (10**400, MAX_RETRY_AFTER_S),
        (float("inf"), MAX_RETRY_AFTER_S),
        (float("nan"), None),
    ],
)
def test_rate_limited_says_how_long(given_s: float, expected: float | None) -> None:
    assert retry_after_s(errors.RateLimited(retry_after=given_s), NOW_S) == expected


@pytest.mark.parametrize("given_s", ["5", None, True, object()])
def test_rate_limited_with_nonsense_says_nothing(given_s: Any) -> None:
    assert retry_after_s(errors.RateLimited(retry_after=given_s), NOW_S) is None


class Thorny(Exception):
    """Every attribute that might be looked at raises."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("status_code", "response", "code", "status", "headers", "body", "type", "args"):
            raise RuntimeError("thorn")
        return super().__getattribute__(name)

    def __str__(self) -> str:
        raise RuntimeError("thorn")


class Liar:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("thorn")


class Odd(int):
    def __le__(self, other: Any) -> bool:
        raise RuntimeError("thorn")

    __ge__ = __lt__ = __gt__ = __le__
    __hash__ = int.__hash__


def test_thorny_exceptions_are_survived() -> None:
    exc = Thorny()
    assert classify(exc) is ErrorClass.TRANSIENT
    assert retry_after_s(exc, NOW_S) is None
    assert describe(exc, "app").text == "Thorny (its text cannot be shown)"


@pytest.mark.parametrize(
    "name", ["status_code", "response", "headers", "body", "code", "error_class", "retry_after"]
)
@pytest.mark.parametrize("kind", [Shaped, errors.JobError, errors.RateLimited])
def test_an_attribute_that_lies_about_its_class_is_survived(kind: type[Exception], name: str) -> None:
    exc = kind("x")
    exc.__dict__.update({"status_code": 429, name: Liar()})
    assert classify(exc) is ErrorClass.TRANSIENT
    assert retry_after_s(exc, NOW_S) in (None, 1.0)
    assert describe(exc, "app").text == "x"


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    st.sampled_from(
        [Thing(), Thing(status_code=404, headers=5), Odd(404), {1: 2}, Thorny(), httpx.Response(429)]
    ),
)
names = st.sampled_from(
    ["status_code", "response", "code", "status", "headers", "body", "type", "error_class"]
)
kinds = st.sampled_from(
    [Shaped, errors.JobError, errors.RateLimited, KeyError, ConnectionError, BaseException]
)


@given(kinds, st.dictionaries(names, values), st.text(st.characters(exclude_categories=())))
def test_nothing_that_an_exception_carries_can_make_these_raise(
    kind: type[BaseException], attributes: dict[str, Any], text: str
) -> None:
    exc = kind(text)
    exc.__dict__.update(attributes)
    assert isinstance(classify(exc), ErrorClass)
    wait_s = retry_after_s(exc, NOW_S)
    assert wait_s is None or 0 <= wait_s <= MAX_RETRY_AFTER_S
    info = describe(exc, "app.jobs")
    assert len(info.text) <= 2001
    info.text.encode()
    assert info.args_json is None or len(info.args_json) <= 2000
    json.loads(info.args_json or "null")


@given(st.text(max_size=40), st.sampled_from(["retry-after", "retry-after-ms", "x-ratelimit-reset-tokens"]))
def test_no_header_can_make_the_wait_unbounded(text: str, name: str) -> None:
    wait_s = retry_after_s(Shaped(status_code=429, headers={name: text}), NOW_S)
    assert wait_s is None or 0 <= wait_s <= MAX_RETRY_AFTER_S


@given(st.integers(0, 10**6))
def test_a_plain_number_of_seconds_is_taken_as_it_is(seconds: int) -> None:
    exc = Shaped(status_code=429, headers={"Retry-After": str(seconds)})
    assert retry_after_s(exc, NOW_S) == min(seconds, MAX_RETRY_AFTER_S)


def parse(document: dict[str, str]) -> str:
    return document["hunter2"]


def failing_on_purpose() -> None:
    try:
        parse({})
    except KeyError as exc:
        raise errors.PermanentError("document has no text") from exc


def test_what_is_raised_on_purpose_is_described_in_full() -> None:
    with pytest.raises(errors.PermanentError) as caught:
        failing_on_purpose()
    info = describe(caught.value, __name__)
    assert (info.error_class, info.text) == (ErrorClass.PERMANENT, "document has no text")
    assert (info.module, info.exception) == ("relata_celery.domain.errors", "PermanentError")
    assert info.args_json == '["document has no text"]'


def test_a_traceback_holds_places_and_types_of_the_whole_chain_and_no_values() -> None:
    with pytest.raises(errors.PermanentError) as caught:
        failing_on_purpose()
    traceback = describe(caught.value, __name__).traceback
    assert traceback is not None
    assert f'File "{__file__}", line ' in traceback
    assert "in parse\nKeyError\n... was the cause of:\n" in traceback
    assert traceback.endswith("in failing_on_purpose\nrelata_celery.domain.errors.PermanentError")
    assert "hunter2" not in traceback
    assert "document has no text" not in traceback


def test_a_panic_is_described_by_type_and_place() -> None:
    with pytest.raises(KeyError) as caught:
        parse({})
    info = describe(caught.value, __name__)
    line = parse.__code__.co_firstlineno + 1
    assert info.text == f"job handler raised KeyError at {__name__}:parse:{line}"
    assert (info.exception, info.args_json) == ("KeyError", None)
    assert "hunter2" not in repr(info)


def test_args_that_are_long_secret_or_not_json_are_not_kept() -> None:
    for args in (("x" * 2001,), (object(),), (float("nan"),), ("mongodb://u:p@h",), ({"a": {1, 2}},)):
        assert describe(RuntimeError(*args), None).args_json is None
    assert describe(RuntimeError("a", 1, [None]), None).args_json == '["a",1,[null]]'


def test_a_time_out_says_so() -> None:
    info = describe(billiard.exceptions.SoftTimeLimitExceeded(), None)
    assert (info.error_class, info.text) == (
        ErrorClass.TIMEOUT,
        "the job's time ran out (SoftTimeLimitExceeded)",
    )


def test_a_circle_of_causes_and_a_deep_stack_are_cut() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert (describe(first, None).traceback or "").count("ValueError") == 2

    def deeper(left: int) -> None:
        if not left:
            raise ValueError("bottom")
        deeper(left - 1)

    with pytest.raises(ValueError, match="bottom") as caught:
        deeper(300)
    traceback = describe(caught.value, None).traceback
    assert traceback is not None
    assert "more ..." in traceback
    assert len(traceback) <= 8001
