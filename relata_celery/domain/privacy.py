"""Jobs whose arguments and results are not for everybody: what marks them, and what is shown in their place.

The mark is a header of the message, so that whoever meets the job (a worker, a command line) knows it without
knowing the task. ``sensitive``: kept as it is, and not shown. ``encrypted``: sealed in the database too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: The header, and what it may say; a message that says anything else is not private.
HEADER = "relata_privacy"
SENSITIVE, ENCRYPTED = "sensitive", "encrypted"

#: The content type of a body or a result that is encrypted.
SEALED_TYPE = "application/x-relata-sealed"

#: What is shown instead.
HIDDEN = "(hidden)"
SHOWN_AS: Mapping[str, str] = {SENSITIVE: HIDDEN, ENCRYPTED: "(encrypted)"}


class HiddenText(str):
    """A text whose repr shows nothing of it: Celery's log prints the body of a message in many places."""

    __slots__ = ()

    def __repr__(self) -> str:
        return HIDDEN


class HiddenBytes(bytes):
    """Bytes whose repr shows nothing of them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return HIDDEN


class HiddenList(list[Any]):
    """A list whose repr shows nothing of it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return HIDDEN


class HiddenDict(dict[str, Any]):
    """A dictionary whose repr shows nothing of it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return HIDDEN


_HIDDEN_TYPES: Mapping[type, type] = {
    str: HiddenText, bytes: HiddenBytes, list: HiddenList, tuple: HiddenList, dict: HiddenDict
}  # fmt: skip


def hidden(value: Any) -> Any:
    """The same body or arguments, with a repr that shows nothing of them."""
    kind = _HIDDEN_TYPES.get(type(value))
    return value if kind is None else kind(value)


def stated_privacy(headers: object) -> str | None:
    """What a message's headers say: ``sensitive``, ``encrypted`` or None."""
    stated = headers.get(HEADER) if isinstance(headers, Mapping) else None
    return stated if isinstance(stated, str) and stated in SHOWN_AS else None


def message_privacy(message: object) -> str | None:
    """What a stored message says of itself."""
    if not isinstance(message, Mapping):
        return None
    return ENCRYPTED if message.get("content-type") == SEALED_TYPE else stated_privacy(message.get("headers"))


def strictest(stated: Iterable[str | None]) -> str | None:
    """``encrypted`` if any is, else ``sensitive`` if any is."""
    found = set(stated)
    return next((privacy for privacy in (ENCRYPTED, SENSITIVE) if privacy in found), None)
