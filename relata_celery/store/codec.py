"""The job document: its fields, and the ways between it and the classes of the domain.

Writing is strict: a job that BSON cannot hold is refused before anything is sent. Claiming is strict too,
because a job whose document cannot be read must not be executed. Reading for people is tolerant and has
a room of its own (:mod:`relata_celery.store.reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar

import bson
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument

from relata_celery.domain.errors import InvalidJob
from relata_celery.domain.job import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    SCHEMA_VERSION,
    Claim,
    ClaimedJob,
    JobState,
    NewJob,
)
from relata_celery.domain.outcome import Encoded, ErrorInfo

from .client import CODEC_OPTIONS, Document, value_problem
from .reading import job_from_document as job_from_document
from .reading import job_to_json as job_to_json
from .reading import moment, object_, text, whole

T = TypeVar("T")

COLLECTION = "relata_jobs"

#: Every field of a job document: its type, and its unit or meaning. No other room invents a name.
FIELDS: Mapping[str, str] = {
    "_id": "str: the Celery task id",
    "schema": "int: number of the document's layout",
    "type": "str: task name",
    "queue": "str",
    "state": "str: a JobState",
    "priority": "int 0..9, 9 first",
    "rank": "int 9..0: 9 - priority, so that one ascending index serves the highest priority first; "
    "100 more while its type is paused",
    "run_at": "date: not before",
    "created_at": "date: by an estimate of the server's clock that is never ahead of it",
    "started_at": "date: of the newest attempt",
    "finished_at": "date: only while terminal",
    "expires_at": "date: not to be started after (Celery's expires)",
    "expire_at": "date: the document is pruned then (TTL); only while terminal",
    "attempts": "int: counted attempts, this one included while running",
    "max_attempts": "int >= 1",
    "fence": "int: +1 at each claim, never lowered",
    "lease": "{owner str, until date, ticket str: which claim call took it}; only while running",
    "message": "object: the kombu message (body, headers, properties, content-type, content-encoding)",
    "leased": "bool: stored only when false (a plain task, removed when acknowledged)",
    "item_id": "str, optional",
    "tags": "[str], optional",
    "unique_key": "str, optional, kept for ever",
    "unique_live": "str: the unique_key while the job is unfinished; uniquely indexed",
    "root_id": "str, optional",
    "parent_id": "str, optional",
    "group_id": "str, optional",
    "history": "[{number, fence, started_at, ended_at, duration_ms, worker, outcome, error_class, error}]",
    "history_skipped": "int: attempts dropped between the first and the newest kept",
    "snoozes": "int: how often it was put back without spending an attempt",
    "snoozed_ms": "int: for how long in all, in milliseconds, each time counted as a second at least",
    "result": "{content_type str, content_encoding str, body str or bytes}",
    "ignored": "bool: the handler ended without a result to keep",
    "placeholder": "bool: the next job published under this id takes this document's place",
    "error": "str: the last error's text; none once succeeded",
    "error_class": "str: an ErrorClass; none once succeeded",
    "exception": "{type str, module str, args_json str, traceback str}: the last error's exception",
    "progress": "{fraction 0..1 or null, note str or null, at date}",
    "custom": "{state str, meta any, at date}: a state of the app's own, while running",
    "cancel_requested": "bool",
    "revoked": "bool: cancelled instead of queued when its attempt ends without a verdict",
    "forgotten": "bool: the result was dropped by its owner",
    "followups": "[object]: what must be published because the job ended; gone once published",
}

#: MongoDB's limit for a document is 16,777,216 bytes. A job gets 1 MiB less when published, because attempts,
#: errors and a lease are still to be written into it: at the limit it could never be claimed.
MAX_DOCUMENT_BYTES = 16_777_216
MAX_JOB_BYTES = MAX_DOCUMENT_BYTES - 1_048_576


class UnreadableJob(ValueError):
    """A job document that cannot be executed; says which field, what it was, what was expected."""


def new_document(job: NewJob, now: datetime, default_max_attempts: int) -> Document:
    """The document of a new job. ``now`` is the server's, or an estimate never ahead of it."""
    if not MIN_PRIORITY <= job.priority <= MAX_PRIORITY:
        raise InvalidJob(f"job type {job.type!r}: priority is {job.priority!r}, expected 0 to 9")
    max_attempts = default_max_attempts if job.max_attempts is None else job.max_attempts
    if max_attempts < 1:
        raise InvalidJob(f"job type {job.type!r}: max_attempts is {max_attempts!r}, expected 1 or more")
    document: Document = {
        "_id": job.id,
        "schema": SCHEMA_VERSION,
        "type": job.type,
        "queue": job.queue,
        "state": JobState.QUEUED.value,
        "priority": job.priority,
        "rank": MAX_PRIORITY - job.priority,
        "run_at": _due(job, now),
        "attempts": 0,
        "max_attempts": max_attempts,
        "fence": 0,
        "message": dict(job.message),
        "created_at": now,
    }
    optional: Document = {
        "item_id": job.item_id,
        "tags": list(job.tags) or None,
        "unique_key": job.unique_key,
        "unique_live": job.unique_key,
        "expires_at": job.expires_at,
        "root_id": job.root_id,
        "parent_id": job.parent_id,
        "group_id": job.group_id,
    }
    if job.failure is not None:
        optional.update(unique_live=None, **_never_run(job.failure, now))
    document.update((name, value) for name, value in optional.items() if value is not None)
    if not getattr(job, "leased", True):
        document["leased"] = False
    return document


def _never_run(failure: Mapping[str, Any], now: datetime) -> Document:
    """The end of a job that could not be published, or that waited for a step that failed.

    Should that step succeed later, the job is published in this document's place.
    """
    retention_s = failure.get("retention_s")
    return {
        "state": JobState.FAILED.value,
        "error": failure["error"],
        "error_class": failure["error_class"],
        "exception": failure.get("exception") or {},
        "placeholder": True if failure.get("replaceable", True) else None,
        "followups": failure.get("followups") or None,
        "finished_at": now,
        "expire_at": None if retention_s is None else now + timedelta(seconds=retention_s),
    }


def _due(job: NewJob, now: datetime) -> datetime:
    if job.delay_s is None:
        return now if job.run_at is None else job.run_at
    try:
        return now + timedelta(seconds=job.delay_s)
    except (OverflowError, ValueError):
        raise InvalidJob(f"job type {job.type!r}: delay_s is {job.delay_s!r}, beyond the calendar") from None


def encode_new(job: NewJob, now: datetime, default_max_attempts: int) -> RawBSONDocument:
    """The new job's document as bytes, encoded once; raises InvalidJob if BSON cannot hold it."""
    try:
        encoded = bson.encode(new_document(job, now, default_max_attempts), codec_options=CODEC_OPTIONS)
    except (BSONError, OverflowError, UnicodeError, RecursionError, TypeError, ValueError) as exc:
        if isinstance(exc, InvalidJob):
            raise
        raise InvalidJob(
            f"job type {job.type!r} (id {job.id!r}) cannot be stored: {value_problem(exc)}"
        ) from None
    if len(encoded) > MAX_JOB_BYTES:
        raise InvalidJob(
            f"job type {job.type!r} (id {job.id!r}) is {len(encoded):,} bytes; the limit is "
            f"{MAX_JOB_BYTES:,} bytes. Store large input elsewhere and pass a reference to it"
        )
    return RawBSONDocument(encoded)


def encoded_document(value: Encoded) -> Document:
    """A return value as the field ``result``."""
    return {
        "content_type": value.content_type,
        "content_encoding": value.content_encoding,
        "body": value.body,
    }


def exception_document(error: ErrorInfo) -> Document:
    """An error's exception as the field ``exception``."""
    parts = {
        "type": error.exception,
        "module": error.module,
        "args_json": error.args_json,
        "traceback": error.traceback,
    }
    return {name: value for name, value in parts.items() if value is not None}


def claimed_from_document(document: Mapping[str, Any], owner: str) -> ClaimedJob:
    """The claim on the job that ``document`` showed before it was claimed (``now`` is the server's).

    Raises UnreadableJob when a field that executing needs is missing or of the wrong type.
    """

    def need(name: str, read: Callable[[Any], T], expected: str) -> T:
        value = document.get(name)
        try:
            return read(value)
        except (ValueError, TypeError, OverflowError):
            seen = "missing" if value is None else f"a {type(value).__name__}"
            raise UnreadableJob(f"{name} is {seen}, expected {expected}") from None

    priority, snoozes, snoozed_ms, item_id = (
        document.get(name) for name in ("priority", "snoozes", "snoozed_ms", "item_id")
    )
    return ClaimedJob(
        claim=Claim(need("_id", text, "a text"), need("fence", whole, "a whole number") + 1, owner),
        type=need("type", text, "a text"),
        queue=need("queue", text, "a text"),
        priority=priority if isinstance(priority, int) else MIN_PRIORITY,
        message=need("message", object_, "an object"),
        attempt=need("attempts", whole, "a whole number") + 1,
        max_attempts=need("max_attempts", whole, "a whole number"),
        claimed_at=need("now", moment, "a date"),
        item_id=item_id if isinstance(item_id, str) else None,
        snoozes=snoozes if isinstance(snoozes, int) else 0,
        snoozed_s=snoozed_ms / 1000 if isinstance(snoozed_ms, (int, float)) else 0.0,
        expired=document.get("expired") is True,
    )
