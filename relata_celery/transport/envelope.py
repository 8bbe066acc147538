"""Between a kombu message and a job: which of its headers say what about the job.

Outward (publish), the Celery headers ``id``, ``task``, ``eta``, ``expires``, ``root_id`` and our
own ``relata`` header (options of a leased task) become the fields that the queue works with; the
message itself is kept as it is. Inward (delivery) the copy carries no ``eta`` and no ``expires``:
the database has judged both by its own clock, and Celery would park a message with an ``eta`` in
memory even when it is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from relata_celery.domain.errors import InvalidJob
from relata_celery.domain.job import MAX_PRIORITY, MIN_PRIORITY, ClaimedJob, NewJob
from relata_celery.domain.privacy import hidden, message_privacy
from relata_celery.domain.redact import one_line
from relata_celery.sealing import opened_message

#: Our own header: options of a leased task that travel with its message.
HEADER = "relata"

#: Longest id, type and name of a queue, in characters.
MAX_ID = 500

#: The type under which a message that is no Celery task is kept.
PLAIN_MESSAGE = "kombu.message"


def is_task(message: Mapping[str, Any]) -> bool:
    """Whether this is a Celery task message (protocol 2, the only one since Celery 4)."""
    headers = message.get("headers")
    return isinstance(headers, Mapping) and "task" in headers and "id" in headers


def to_new_job(queue: str, message: Mapping[str, Any]) -> NewJob:
    """The job that publishing this message to ``queue`` makes.

    Raises :class:`InvalidJob` for an id, a priority or a time that the queue cannot take.
    """
    headers: Mapping[str, Any] = message["headers"]
    properties: Mapping[str, Any] = message["properties"]
    options = headers.get(HEADER)
    leased = isinstance(options, Mapping)
    options = options if isinstance(options, Mapping) else {}
    task = str(headers.get("task") or PLAIN_MESSAGE)
    if is_task(message):
        _check_name(task, "type", task)
        _check_id(task, headers["id"])
        _check_name(task, "queue", queue)
    return NewJob(
        id=_key(headers, leased) or str(properties["delivery_tag"]),
        type=task,
        queue=queue,
        message=stored_copy(message),
        priority=_priority(task, properties.get("priority")),
        run_at=_moment(task, "eta", headers.get("eta")),
        delay_s=options.get("delay_s"),
        expires_at=_moment(task, "expires", headers.get("expires")),
        max_attempts=options.get("max_attempts"),
        item_id=options.get("item_id"),
        tags=tuple(options.get("tags") or ()),
        unique_key=options.get("unique_key") if leased else None,
        root_id=headers.get("root_id"),
        parent_id=headers.get("parent_id"),
        group_id=headers.get("group"),
    )


def _check_id(task: str, value: object) -> None:
    """Whoever asks for a job's result asks by this id: it has to be the job's own."""
    if not isinstance(value, str) or not value:
        raise InvalidJob(f'job type "{task}": its id (task_id) must be text, not {value!r}')
    _check_name(task, "id (task_id)", value)


def _check_name(task: str, what: str, name: str) -> None:
    """Names stand in every line of the log and in every list: they may neither forge a line nor fill a screen."""
    if len(name) > MAX_ID or not name.isprintable():
        raise InvalidJob(
            f'job type "{one_line(task, 200)}": its {what} must be up to {MAX_ID} printable characters, '
            f"not {len(name)}: {one_line(name, 60)!r}"
        )


def with_max_attempts(message: Mapping[str, Any], max_attempts: int) -> dict[str, Any]:
    """The message of a leased task, saying that it may have so many attempts."""
    headers = message["headers"]
    options = {**_mapping(headers.get(HEADER)), "max_attempts": max_attempts}
    return {**message, "headers": {**headers, HEADER: options}}


def _key(headers: Mapping[str, Any], leased: bool) -> str:
    """What the job is kept under. A leased task has one document for all its attempts.

    A plain task that is retried or replaced publishes its id again while its first message may still
    be there, to be removed when it is acknowledged: the second one needs a key of its own.
    """
    key = str(headers.get("id") or "")
    turn = (headers.get("retries") or 0, headers.get("replaced_task_nesting") or 0)
    return f"{key}#{turn[0]}.{turn[1]}" if key and not leased and any(turn) else key


def followup_to_job(followup: Mapping[str, Any]) -> NewJob:
    """The job that a follow-up stored in a settled job stands for.

    With ``failure`` (:func:`~relata_celery.domain.outcome.never_run`) it is the record of a job that is not
    run, for which its id and type suffice. Raises :class:`InvalidJob` whatever else the follow-up may be.
    """
    try:
        queue, message = str(followup["queue"]), followup["message"]
        failure = followup.get("failure")
        return to_new_job(queue, message) if failure is None else _record(queue, message, failure)
    except InvalidJob:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise InvalidJob(f"it is no message of a job ({type(exc).__name__})") from exc


def _record(queue: str, message: Mapping[str, Any], failure: Mapping[str, Any]) -> NewJob:
    headers: Mapping[str, Any] = message["headers"]
    return NewJob(
        id=_text("id", headers["id"]),
        type=_text("type", headers["task"]),
        queue=queue,
        message=stored_copy({**message, "properties": _mapping(message.get("properties"))}),
        failure={**failure, **{name: _text(name, failure[name]) for name in ("error", "error_class")}},
        root_id=_text_or_none(headers.get("root_id")),
        parent_id=_text_or_none(headers.get("parent_id")),
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidJob(f"its {name} is {type(value).__name__}, not a text")
    return value


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def stored_copy(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "body": message.get("body"),
        "content-type": message.get("content-type"),
        "content-encoding": message.get("content-encoding"),
        "headers": dict(message.get("headers") or {}),
        "properties": dict(message.get("properties") or {}),
    }


def to_delivery(job: ClaimedJob) -> dict[str, Any]:
    """The raw kombu message for a claimed job.

    Raises TypeError, KeyError or ValueError when the stored message is not one: the caller
    records that on the job. Raises MissingKey when it is encrypted with a key that is not here.
    """
    message = job.message
    private = message_privacy(message) is not None
    headers, properties = message["headers"], message["properties"]
    if not isinstance(headers, Mapping) or not isinstance(properties, Mapping):
        raise TypeError("its headers or properties are not a mapping")
    message = opened_message(message)
    body = hidden(message["body"]) if private else message["body"]
    if not isinstance(body, (str, bytes)):
        raise TypeError(f"its body is {type(body).__name__}, not text or bytes")
    task_headers: dict[str, Any] = dict(headers)
    if "task" in headers:
        task_headers.update(eta=None, expires=None)
        if HEADER in headers:
            task_headers.update(retries=job.attempt - 1)
    return {
        "body": body,
        "content-type": message.get("content-type"),
        "content-encoding": message.get("content-encoding"),
        "headers": task_headers,
        "properties": {
            **properties,
            "priority": job.priority,
            "body_encoding": None,
            "delivery_tag": f"{job.claim.id}#{job.claim.fence}",
            "delivery_info": {
                **_mapping(properties.get("delivery_info")),
                "redelivered": job.attempt > 1,
            },
        },
    }


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _priority(task: str, value: object) -> int:
    if value is None:
        return MIN_PRIORITY
    if isinstance(value, bool) or not isinstance(value, int) or not MIN_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidJob(
            f'job type "{task}": priority must be a whole number from {MIN_PRIORITY} to {MAX_PRIORITY} '
            f"(9 is served first), not {value!r}"
        )
    return value


def _moment(task: str, what: str, value: object) -> datetime | None:
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError as exc:
        raise InvalidJob(f'job type "{task}": {what} is not a time in ISO 8601: {value!r}') from exc
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
