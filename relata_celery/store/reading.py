"""Reading a job document for people and programs that look at it: tolerant, never raising.

People edit documents by hand, so this shows the best it can, and keeps what it could not understand
under the field's own name in ``Job.extra``, beside the fields that ``Job`` has no attribute for.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import Any, TypeVar

from relata_celery.domain.job import (
    MIN_PRIORITY,
    Attempt,
    AttemptOutcome,
    ErrorClass,
    Job,
    JobState,
    Lease,
    Progress,
)
from relata_celery.domain.privacy import ENCRYPTED, SEALED_TYPE, SHOWN_AS

T = TypeVar("T")

#: Kept for MongoDB's sake, or the same as another field: not shown as unknown.
_INTERNAL = ("schema", "rank", "unique_live")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ValueError
    return int(value)


def flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError


def moment(value: Any) -> datetime:
    if isinstance(value, datetime):
        return value
    raise ValueError


def object_(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ValueError


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(text(item) for item in value)
    raise ValueError


def _objects(value: Any) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, list):
        return tuple(object_(item) for item in value)
    raise ValueError


def _lease(value: Any) -> Lease:
    fields = object_(value)
    return Lease(owner=text(fields.get("owner")), until=moment(fields.get("until")))


def _progress(value: Any) -> Progress:
    fields = object_(value)
    fraction, note = fields.get("fraction"), fields.get("note")
    return Progress(
        fraction=None if fraction is None else float(fraction),
        note=None if note is None else text(note),
        at=moment(fields.get("at")),
    )


def _attempt(value: Any) -> Attempt:
    fields = object_(value)
    started_at, error, error_class = (fields.get(name) for name in ("started_at", "error", "error_class"))
    return Attempt(
        number=whole(fields.get("number")),
        fence=whole(fields.get("fence", 0)),
        started_at=started_at if isinstance(started_at, datetime) else None,
        ended_at=moment(fields.get("ended_at")),
        duration_ms=whole(fields.get("duration_ms", 0)),
        worker=str(fields.get("worker", "")),
        outcome=AttemptOutcome(fields.get("outcome")),
        error_class=None if error_class is None else ErrorClass(error_class),
        error=None if error is None else str(error),
    )


def _result(value: Any) -> Any:
    if not isinstance(value, Mapping) or "body" not in value:
        return value
    body = value["body"]
    if value.get("content_type") == SEALED_TYPE:
        return SHOWN_AS[ENCRYPTED]
    if value.get("content_type") != "application/json" or not isinstance(body, (str, bytes)):
        return body
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body


class _Reader:
    """Takes fields out of a document one by one; what is left, or was of the wrong type, is ``rest``."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.rest = {name: value for name, value in document.items() if name not in _INTERNAL}

    def take(self, name: str, read: Callable[[Any], T], default: T) -> T:
        value = self.rest.get(name)
        try:
            taken = default if value is None else read(value)
        except (ValueError, TypeError, OverflowError):
            return default
        self.rest.pop(name, None)
        return taken

    def maybe(self, name: str, read: Callable[[Any], T]) -> T | None:
        return self.take(name, read, None)

    def history(self) -> tuple[Attempt, ...]:
        """The entries that can be read; the others stay in ``rest``."""
        entries = self.rest.pop("history", None) or []
        if not isinstance(entries, list):
            self.rest["history"] = entries
            return ()
        good, bad = [], []
        for entry in entries:
            try:
                good.append(_attempt(entry))
            except (ValueError, TypeError, OverflowError):
                bad.append(entry)
        if bad:
            self.rest["history"] = bad
        return tuple(good)


def job_from_document(document: Mapping[str, Any]) -> Job:
    """The job that a document shows; never raises. A state that is none reads as ``failed``."""
    reader = _Reader(document)
    take, maybe = reader.take, reader.maybe
    return Job(
        id=take("_id", text, str(document.get("_id"))),
        type=take("type", text, ""),
        queue=take("queue", text, ""),
        state=take("state", JobState, JobState.FAILED),
        priority=take("priority", whole, MIN_PRIORITY),
        run_at=take("run_at", moment, _EPOCH),
        attempts=take("attempts", whole, 0),
        max_attempts=take("max_attempts", whole, 1),
        fence=take("fence", whole, 0),
        created_at=take("created_at", moment, _EPOCH),
        message=take("message", object_, {}),
        lease=maybe("lease", _lease),
        item_id=maybe("item_id", text),
        tags=take("tags", _texts, ()),
        unique_key=maybe("unique_key", text),
        expires_at=maybe("expires_at", moment),
        history=reader.history(),
        history_skipped=take("history_skipped", whole, 0),
        snoozes=take("snoozes", whole, 0),
        result=maybe("result", _result),
        error=maybe("error", text),
        error_class=maybe("error_class", ErrorClass),
        progress=maybe("progress", _progress),
        cancel_requested=take("cancel_requested", flag, False),
        followups=take("followups", _objects, ()),
        started_at=maybe("started_at", moment),
        finished_at=maybe("finished_at", moment),
        expire_at=maybe("expire_at", moment),
        extra=reader.rest,
    )


def job_to_json(job: Job) -> dict[str, Any]:
    """The job as JSON: the document's names, ``id`` for ``_id``, times in ISO 8601 UTC, bytes in base64."""
    fields: dict[str, Any] = {
        "id": job.id,
        "type": job.type,
        "queue": job.queue,
        "priority": job.priority,
        "state": job.state,
        "run_at": job.run_at,
        "attempts": job.attempts,
        "max_attempts": job.max_attempts,
        "fence": job.fence,
        "lease": job.lease and {"owner": job.lease.owner, "until": job.lease.until},
        "message": job.message,
        "item_id": job.item_id,
        "tags": job.tags,
        "unique_key": job.unique_key,
        "history": [_attempt_fields(attempt) for attempt in job.history],
        "history_skipped": job.history_skipped,
        "snoozes": job.snoozes,
        "result": job.result,
        "error": job.error,
        "error_class": job.error_class,
        "progress": job.progress
        and {"fraction": job.progress.fraction, "note": job.progress.note, "at": job.progress.at},
        "cancel_requested": job.cancel_requested,
        "followups": job.followups,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "expires_at": job.expires_at,
        "expire_at": job.expire_at,
    }
    shown: dict[str, Any] = _jsonable({**job.extra, **fields})
    return shown


def _attempt_fields(attempt: Attempt) -> dict[str, Any]:
    return {name: getattr(attempt, name) for name in Attempt.__slots__}


def _jsonable(value: Any) -> Any:
    """The value in JSON's types; what has no place there (a database's own types) as its text."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return str(value)
