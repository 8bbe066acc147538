"""What a job's message holds, as far as it can be read without running anybody's code.

Only JSON is decoded. Pickle and YAML would run code of whoever wrote the message.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relata_celery.domain.job import Job
from relata_celery.domain.privacy import SHOWN_AS, message_privacy
from relata_celery.store.reading import job_to_json


@dataclass(frozen=True, slots=True)
class Payload:
    """The call's arguments, or ``unread``: why they are not shown."""

    args: Any = None
    kwargs: Any = None
    unread: str | None = None


def payload_of(message: Mapping[str, Any]) -> Payload:
    """The arguments in a kombu message of Celery's protocol 2; never raises."""
    headers, properties = _object(message.get("headers")), _object(message.get("properties"))
    body, content_type = message.get("body"), message.get("content-type")
    privacy = message_privacy(message)
    if privacy is not None:
        return Payload(unread=SHOWN_AS[privacy])
    if body is None:
        return Payload(unread="the message has no body")
    if headers.get("compression"):
        return Payload(unread=f"the body is compressed ({headers['compression']})")
    if content_type not in ("application/json", "json"):
        return Payload(unread=f"the body is {content_type or 'of no known type'}, and only JSON is decoded")
    try:
        if properties.get("body_encoding") == "base64":
            body = base64.b64decode(body, validate=True)
        content = json.loads(body)
    except (ValueError, TypeError, RecursionError, binascii.Error):
        return Payload(unread="the body says it is JSON but cannot be read as such")
    if not (isinstance(content, list) and len(content) == 3 and isinstance(content[1], dict)):
        return Payload(unread="the body is JSON, but not a Celery call")
    return Payload(args=content[0], kwargs=content[1])


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def plain_json(job: Job) -> dict[str, Any]:
    """The job's document in JSON as people may see it: of a private one no arguments, follow-ups or result."""
    shown = job_to_json(job)
    privacy = message_privacy(job.message)
    if privacy is not None:
        shown["message"]["body"] = SHOWN_AS[privacy]
        shown["result"] = None if job.result is None else SHOWN_AS[privacy]
        shown["followups"] = [SHOWN_AS[privacy]] * len(job.followups)
        if "custom" in shown:
            shown["custom"] = SHOWN_AS[privacy]
    else:
        shown["followups"] = [_plain_followup(one) for one in shown["followups"]]
    return shown


def _plain_followup(followup: Any) -> Any:
    privacy = message_privacy(_object(followup).get("message"))
    return followup if privacy is None else SHOWN_AS[privacy]
