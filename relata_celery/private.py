"""Which jobs are private, and what is done with their messages before anything is written.

A job is private when its task says so (``@job(sensitive=True)``, ``@job(encrypted=True)``), when its message
says so (a producer that does not have the task's code gives the header ``relata_privacy``), or when its body
names a private task: the step of a chain, a link, an errback or the body of a chord that waits in it. And all
that an encrypted job publishes is encrypted, with all that those publish.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kombu.compression import decompress

from .domain.errors import ConfigurationError, InvalidJob, MissingKey
from .domain.privacy import ENCRYPTED, HEADER, HIDDEN, SENSITIVE, stated_privacy, strictest
from .domain.redact import one_line
from .sealing import sealed_message

#: Where an app keeps its private tasks.
_KEY = "_relata_private"


def privacy_of_task(task: Any) -> str | None:
    """What a task says of its jobs."""
    if getattr(task, "encrypted", False):
        return ENCRYPTED
    return SENSITIVE if getattr(task, "sensitive", False) else None


def register(app: Any, task: Any) -> None:
    """Note a task that is bound to the app."""
    privacy = privacy_of_task(task)
    if privacy is not None:
        app.__dict__.setdefault(_KEY, {})[task.name] = privacy


def private_tasks(app: Any) -> Mapping[str, str]:
    """The app's private tasks by name, with what each says."""
    if not app.finalized and app.autofinalize:
        app.finalize(auto=True)  # until then its tasks are only promised
    found: Mapping[str, str] = app.__dict__.get(_KEY, {})
    return found


def protected(message: Mapping[str, Any], tasks: Mapping[str, str], *, sealed: bool = False) -> Mapping[str, Any]:
    """The message of a job as it may be stored, given the private tasks; ``sealed``: encrypted whatever it says.

    Raises InvalidJob when it must be encrypted and cannot be.
    """
    headers = message["headers"]
    privacy = ENCRYPTED if sealed else _privacy(message, tasks)
    if privacy is None:
        return message
    if privacy == SENSITIVE:
        return {**message, "headers": {**headers, HEADER: SENSITIVE, "argsrepr": HIDDEN, "kwargsrepr": HIDDEN}}
    try:
        return sealed_message(message)
    except (MissingKey, ConfigurationError) as exc:
        task = one_line(str(headers.get("task")), 200)
        raise InvalidJob(f'job type "{task}" is to be encrypted, and cannot be: {exc}') from None


def _privacy(message: Mapping[str, Any], tasks: Mapping[str, str]) -> str | None:
    headers = message["headers"]
    stated = [stated_privacy(headers)]
    if tasks:
        stated.append(tasks.get(headers.get("task")))
        named = _body(message)
        stated += [privacy for name, privacy in tasks.items() if _names(named, name)]
    return strictest(stated)


def _body(message: Mapping[str, Any]) -> bytes:
    """What the body says, whatever it is encoded with; nothing if it cannot be unpacked."""
    body, compression = message.get("body"), message["headers"].get("compression")
    if compression:
        try:
            body = decompress(body, compression)
        except Exception:
            return b""
    if isinstance(body, str):
        return body.encode("utf-8", "surrogatepass")
    return body if isinstance(body, bytes) else b""


def _names(body: bytes, task: str) -> bool:
    return task.encode() in body or json.dumps(task)[1:-1].encode() in body
