"""What may be kept of an exception, and that nothing else is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relata_celery.domain import errors
from relata_celery.domain.job import ErrorClass
from relata_celery.domain.redact import (
    ELLIPSIS,
    MAX_TEXT,
    PANICS,
    clean,
    is_panic,
    mask_secrets,
    one_line,
    place,
    safe_text,
)

SECRET = "hunter2-is-in-the-document"


def raised(action: Any) -> BaseException:
    try:
        action()
    except BaseException as exc:
        return exc
    raise AssertionError("nothing was raised")


def raise_(exc: BaseException) -> None:
    raise exc


class Age(pydantic.BaseModel):
    age: int


PANIC_CASES: dict[str, Any] = {
    "key": lambda: dict[str, str]()[SECRET],
    "attribute": lambda: getattr(object(), SECRET),
    "type": lambda: raise_(TypeError(SECRET)),
    "assertion": lambda: raise_(AssertionError(SECRET)),
    "index": lambda: raise_(IndexError(SECRET)),
    "division": lambda: 1 / 0,
    "recursion": lambda: raise_(RecursionError(SECRET)),
    "memory": lambda: raise_(MemoryError(SECRET)),
    "exit": lambda: raise_(SystemExit(SECRET)),
    "interrupt": lambda: raise_(KeyboardInterrupt(SECRET)),
    "cancelled": lambda: raise_(asyncio.CancelledError(SECRET)),
    "import": lambda: raise_(ImportError(SECRET)),
    "unicode": lambda: SECRET.encode("utf-16").decode("utf-8"),
    "validation": lambda: Age(age=SECRET),  # type: ignore[arg-type]
    "int": lambda: int(SECRET),
    "float": lambda: float(SECRET),
}


@pytest.mark.parametrize("case", PANIC_CASES)
def test_a_panic_keeps_its_type_and_place_and_nothing_it_said(case: str) -> None:
    exc = raised(PANIC_CASES[case])
    text = safe_text(exc)
    assert is_panic(exc)
    assert text.startswith(f"job handler raised {type(exc).__name__} at ")
    assert SECRET not in text


@pytest.mark.parametrize("kind", [kind for kind in PANICS if kind is not UnicodeError])
def test_every_panic_is_one_and_so_is_what_derives_from_it(kind: type[Exception]) -> None:
    derived = type("Derived", (kind,), {})
    assert is_panic(kind(SECRET))
    assert is_panic(derived(SECRET))


@pytest.mark.parametrize(
    "exc",
    [
        errors.PermanentError("no such document"),
        errors.JobError("strange", error_class=ErrorClass.INVALID),
        errors.ConfigurationError("wrong"),
        ValueError("amount must be positive"),
        RuntimeError("the index is being rebuilt"),
        NotImplementedError("xls is not supported"),
        OSError(28, "No space left on device"),
    ],
)
def test_what_is_raised_on_purpose_keeps_its_text(exc: Exception) -> None:
    caught = raised(lambda: raise_(exc))
    assert not is_panic(caught)
    assert safe_text(caught) == str(exc)


def test_a_job_error_is_on_purpose_whatever_else_it_is() -> None:
    class Missing(errors.PermanentError, KeyError):
        pass

    assert not is_panic(Missing("gone"))


def test_json_errors_are_on_purpose() -> None:
    exc = raised(lambda: json.loads("{" + SECRET))
    assert not is_panic(exc)
    assert SECRET not in safe_text(exc)


def test_celerys_own_errors_name_tasks_and_are_kept() -> None:
    from celery.exceptions import NotRegistered

    assert "app.unknown" in safe_text(NotRegistered("app.unknown"))


def test_the_place_is_the_innermost_frame_of_the_task_module() -> None:
    exc = raised(lambda: json.loads("{"))
    assert (place(exc, __name__) or "").startswith(f"{__name__}:")
    assert (place(exc, None) or "").startswith("json.decoder:")
    assert (place(exc, "not.there") or "").startswith("json.decoder:")
    assert place(ValueError("never raised"), __name__) is None


def test_text_is_capped_at_2000_characters_then_an_ellipsis() -> None:
    assert safe_text(ValueError("x" * 2000)) == "x" * 2000
    assert safe_text(ValueError("x" * 2001)) == "x" * 2000 + "…"
    assert len(safe_text(ValueError("x y" * 10_000_000))) == 2001


def test_an_exception_without_text_is_named_by_its_type() -> None:
    assert safe_text(ValueError()) == "ValueError"
    assert safe_text(TimeoutError()) == "TimeoutError"


class Hostile(Exception):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __str__(self) -> str:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]

    __repr__ = __str__


class Bent(str):
    def __len__(self) -> int:
        raise RuntimeError

    def __getitem__(self, key: Any) -> str:
        raise RuntimeError

    def strip(self, *args: Any) -> str:
        raise RuntimeError


@pytest.mark.parametrize("answer", [RuntimeError("x"), SystemExit(1), KeyboardInterrupt(), None, 5, b"bytes"])
def test_an_exception_that_cannot_be_shown_is_named(answer: Any) -> None:
    assert safe_text(Hostile(answer)) == "Hostile (its text cannot be shown)"


def test_a_string_that_lies_about_itself_is_read_as_it_is() -> None:
    assert safe_text(Hostile(Bent("plain text"))) == "plain text"


def test_lone_surrogates_and_control_characters_are_replaced_and_line_ends_kept() -> None:
    assert safe_text(ValueError("a\ud800b\x00c\x1b[31md\r\ne\tf")) == "a\ufffdb\ufffdc\ufffd[31md\ne\tf"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mongodb://user:p%40ss@h1,h2/db?x=1", "mongodb://***@h1,h2/db?x=1"),
        ("relata+mongodb+srv://u:p@host", "relata+mongodb+srv://***@host"),
        ("two: amqp://a:b@c and redis://:pw@d", "two: amqp://***@c and redis://***@d"),
        ("for url: https://x/v1?key=AIzaSyA&alt=json", "for url: https://x/v1?key=***&alt=json"),
        ("/v1?alt=1&access_token=abc", "/v1?alt=1&access_token=***"),
        ("Authorization: Bearer abcdef.ghijkl", "Authorization: Bearer ***"),
        ("password=QwertyZz99, user=x", "password=***, user=x"),
        ("db_password = 'x y' refused", "db_password = *** refused"),
        ('{"api_key": "abc", "max_tokens": 100}', '{"api_key": ***, "max_tokens": 100}'),
        ("client-secret: Abc123 next", "client-secret: *** next"),
        ("unexpected token: expected ','; max_tokens=100", "unexpected token: expected ','; max_tokens=100"),
        ("AWS AKIAIOSFODNN7EXAMPLE", "AWS ***"),
        ("jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4 refused", "jwt *** refused"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nread", "***\nread"),
        ("Incorrect API key provided: sk-abcdefghijklmnopqrstu.", "Incorrect API key provided: ***."),
        ("https://example.org/a@b?monkey=1", "https://example.org/a@b?monkey=1"),
        ("a basic idea; the keyboard; skill", "a basic idea; the keyboard; skill"),
    ],
)
def test_credentials_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
    assert safe_text(ValueError(text)) == masked


def test_a_credential_cut_in_half_is_not_shown() -> None:
    text = "mongodb://" + "u" * 7980 + ":" + SECRET + "@host"
    assert SECRET[:5] not in clean(text)
    assert len(clean(text)) <= MAX_TEXT + len(ELLIPSIS)


@given(st.text(st.characters(exclude_categories=()), max_size=3000))
def test_any_text_can_be_stored_and_is_capped(text: str) -> None:
    kept = clean(text)
    kept.encode()
    assert len(kept) <= MAX_TEXT + len(ELLIPSIS)
    assert clean(kept) == kept


@given(st.text(st.characters(exclude_categories=())))
def test_one_line_is_one_line_of_printable_text(text: str) -> None:
    line = one_line(text)
    assert len(line.splitlines()) <= 1
    assert "\n" not in line
    assert line.replace("\u00a0", " ").isprintable()
    line.encode()


def test_one_line_shows_what_it_replaced() -> None:
    assert one_line("ok\nERROR forged\x1b[0m") == "ok\\nERROR forged\\x1b[0m"
    assert one_line("déjà vu, 日本") == "déjà vu, 日本"
