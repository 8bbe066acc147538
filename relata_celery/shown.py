"""What of an exception Celery's tracer, log, events and hooks get to see."""

from __future__ import annotations

import pickle
from typing import Any

from relata_celery.domain.errors import JobError
from relata_celery.domain.outcome import ErrorInfo
from relata_celery.domain.redact import MAX_TEXT, is_panic, mask_secrets


def drop_context(exc: BaseException) -> BaseException:
    """An exception that brings no other one along: what it was made from may hold secrets."""
    exc.__cause__ = exc.__context__ = None
    exc.__suppress_context__ = True
    return exc


def shown_exception(exc: BaseException, info: ErrorInfo) -> BaseException:
    """What of a final failure Celery's tracer, log, events and hooks get to see.

    The exception itself when it was raised on purpose, is short, shows no credential (nor does what
    it was raised from, which a log prints too), and can be pickled and rebuilt; otherwise a
    :class:`JobError` with the text that may be shown.
    """
    if isinstance(exc, Exception) and all(map(_may_be_shown, _chain(exc))) and _is_portable(exc):
        return exc
    return drop_context(JobError(info.text, error_class=info.error_class).with_traceback(exc.__traceback__))


def _chain(exc: BaseException) -> list[BaseException]:
    """The exception, what it was raised from, and what it groups."""
    found: dict[int, BaseException] = {}
    to_see: list[Any] = [exc]
    while to_see:
        link = to_see.pop()
        if isinstance(link, BaseException) and id(link) not in found:
            found[id(link)] = link
            grouped = _grouped(link)
            to_see += [link.__cause__, link.__context__, *(grouped if isinstance(grouped, tuple) else ())]
    return list(found.values())


def _grouped(exc: BaseException) -> Any:
    try:
        return getattr(exc, "exceptions", None)
    except Exception:
        return None


def _may_be_shown(exc: BaseException) -> bool:
    if is_panic(exc):
        return False
    try:
        text, shown = str(exc), repr(exc)
        if len(text) > MAX_TEXT or len(shown) > 2 * MAX_TEXT:
            return False
        return mask_secrets(text) == text and mask_secrets(shown) == shown
    except Exception:
        return False


def _is_portable(exc: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(exc))
    except Exception:
        return False
    return True
