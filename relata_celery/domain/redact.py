"""What of an exception may be kept: its text, or only its type and place.

A text that a handler wrote for people to read is kept, capped, and masked where it shows a
credential in a URL, a header or a key. A *panic* is what no handler raises on purpose: the
interpreter's own complaints (``KeyError``, ``TypeError``, ...) and validators that quote their
input. Its text can hold a document's words or a password, so nothing but
``job handler raised KeyError at module:function:line`` is ever kept, wherever errors go.

Nothing here raises, whatever the exception's own methods do.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from opcode import opmap
from types import FrameType, TracebackType

from .errors import RelataError

#: Longest text of an error that is kept, in characters; what is longer ends in an ellipsis.
MAX_TEXT = 2000
ELLIPSIS = "…"

#: Raised by the interpreter, not by a sentence somebody wrote. Subclasses count too: many
#: libraries derive theirs from these and print the offending key or value.
PANICS: tuple[type[BaseException], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    RecursionError,
    ReferenceError,
    StopAsyncIteration,
    StopIteration,
    SyntaxError,
    SystemError,
    TypeError,
    UnicodeError,
)

#: Exceptions whose text quotes input, documents, parameters or command lines: (module's root, name).
QUOTING = frozenset(
    {
        ("jsonschema", "ValidationError"),
        ("openai", "ContentFilterFinishReasonError"),
        ("openai", "LengthFinishReasonError"),
        ("pydantic", "ValidationError"),
        ("pydantic_core", "ValidationError"),
        ("pymongo", "BulkWriteError"),
        ("pymongo", "WriteError"),
        ("sqlalchemy", "StatementError"),
        ("subprocess", "CalledProcessError"),
        ("subprocess", "TimeoutExpired"),
    }
)

#: Hosts whose own errors name tasks and queues, never data, though some are ``KeyError``s.
_HOSTS = frozenset({"billiard", "celery", "kombu"})
#: Parts of the standard library that raise again what a caller's code raised.
_CARRIERS = frozenset({"asyncio", "concurrent", "contextlib", "multiprocessing"})

_RAISE = opmap["RAISE_VARARGS"]
#: How much of an endless text is looked at; a credential is masked before the text is cut.
_WINDOW = 4 * MAX_TEXT
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LINE_ENDS = re.compile(r"\r\n?")
_USERINFO = re.compile(r"(?<=://)[^\s/?#'\"<>]+@")
#: Not the ``tokens`` that language models count, nor a ``tokenizer``.
_SECRET = r"(?:api[_-]?key|token(?!s|iz)|secret|passw(?:or)?d|pwd|credential|signature)[\w-]{0,40}[\"']?\s{0,9}"
_QUERY = re.compile(r"(?i)([?&](?:key|sig)=)[^&\s'\"<>#]+")
_ASSIGNED = re.compile(rf"(?i)({_SECRET}=\s{{0,9}})(?:\"[^\"]+\"|'[^']+'|[^\s\"'&<>]*[^\s\"'&<>,;])")
#: After a colon a word may be prose ("token: expected"); a value is quoted, or has a digit in it.
_NAMED = re.compile(
    rf"(?i)({_SECRET}:\s{{0,9}})(?:\"[^\"]+\"|'[^']+'|(?=[^\s\"',;<>]{{0,200}}\d)[^\s\"',;<>]{{4,}})"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{8,}")
_JWT = re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?")
_PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?")
_KEYS = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b(?:sk|pk|rk|xox[abp]|gh[pousr]|AIza)[-_]?[A-Za-z0-9_-]{16,}")


def is_panic(exc: BaseException) -> bool:
    """True when the exception's text was not written on purpose, so that it must not be kept.

    Errors of this package never are. A ``ValueError`` is one only when the interpreter or the
    standard library raised it (``int("secret")``), not a ``raise`` in anybody else's code.
    """
    if isinstance(exc, RelataError):
        return False
    if not isinstance(exc, Exception):
        return True
    if _root(type(exc)) in _HOSTS:
        return False
    if isinstance(exc, PANICS):
        return True
    if any((_root(cls), cls.__name__) in QUOTING for cls in type(exc).__mro__):
        return True
    return (
        isinstance(exc, ValueError) and not isinstance(exc, json.JSONDecodeError) and _raised_by_python(exc)
    )


def safe_text(exc: BaseException) -> str:
    """The exception's text as it may be stored and shown: the place only for a panic.

    An exception without a text, or whose text cannot be had, is named by its type.
    """
    return panic_text(exc, None) if is_panic(exc) else _written_text(exc)


def panic_text(exc: BaseException, task_module: str | None) -> str:
    """``job handler raised KeyError at module:function:line``: all that is kept of a panic."""
    text = f"job handler raised {type_name(exc)}"
    where = place(exc, task_module)
    return cap(f"{text} at {where}" if where else text)


def place(exc: BaseException, task_module: str | None) -> str | None:
    """``module:function:line`` where it was raised: the innermost frame of the task's module, else of all."""
    innermost = None
    for frame, line in frames(exc):
        here = (_module_of(frame), frame.f_code.co_name, line)
        if innermost is None or here[0] == task_module or innermost[0] != task_module:
            innermost = here
    if innermost is None:
        return None
    return one_line(":".join(str(part) for part in innermost), 300)


def frames(exc: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames an exception passed, outermost first, with the line in each."""
    step: TracebackType | None = exc.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lineno or 0
        step = step.tb_next


def type_name(exc: BaseException) -> str:
    """The name of the exception's type, on one line."""
    return one_line(type(exc).__name__, 200)


def clean(text: str) -> str:
    """The text as it can be stored: masked, without lone surrogates and control characters, capped.

    Line ends and tabs are kept; other control characters (a terminal obeys them) are replaced.
    """
    start = str.__getitem__(text, slice(0, _WINDOW))
    cut = str.__len__(text) > _WINDOW
    start = _SURROGATES.sub("\ufffd", start)
    start = _CONTROLS.sub("\ufffd", _LINE_ENDS.sub("\n", start))
    masked = mask_secrets(start)
    if cut and len(masked) <= MAX_TEXT:  # its last word may be half a credential
        masked = re.sub(r"\S{1,500}\Z", "", masked) + ELLIPSIS
    return cap(masked)


def cap(text: str, limit: int = MAX_TEXT) -> str:
    """The text, or its first ``limit`` characters and an ellipsis."""
    return text if len(text) <= limit else text[:limit] + ELLIPSIS


def mask_secrets(text: str) -> str:
    """The text with ``***`` for user and password in URLs, for values that are named a secret, and for keys."""
    text = _USERINFO.sub("***@", text)
    for named in (_QUERY, _ASSIGNED, _NAMED):
        text = named.sub(r"\1***", text)
    text = _BEARER.sub(r"\1 ***", text)
    for key in (_PRIVATE, _JWT, _KEYS):
        text = key.sub("***", text)
    return text


def one_line(text: str, limit: int = MAX_TEXT) -> str:
    r"""The text fit for one line of a log: whatever could break or forge a line is shown as ``\n``, ``\x1b``."""
    text = cap(text, limit)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\u00a0" else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _written_text(exc: BaseException) -> str:
    try:
        text = clean(str(exc))
    except BaseException:  # the exception's own __str__ may raise anything at all, or return no string
        return f"{type_name(exc)} (its text cannot be shown)"
    return text if text.strip() else type_name(exc)


def _raised_by_python(exc: BaseException) -> bool:
    """True when the innermost frame is the standard library's, or did not ``raise`` but called C code."""
    step = exc.__traceback__
    if step is None:
        return False
    while step.tb_next is not None:
        step = step.tb_next
    root = _module_of(step.tb_frame).partition(".")[0]
    if root in sys.stdlib_module_names:
        return root not in _CARRIERS
    code, at = step.tb_frame.f_code.co_code, step.tb_lasti
    return not 0 <= at < len(code) or code[at] != _RAISE


def _module_of(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else "?"


def _root(cls: type) -> str:
    module = cls.__module__
    return module.partition(".")[0] if type(module) is str else ""
