"""Results as Celery reads them: from job documents, and those of plain tasks that keep none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bson.binary import Binary

from relata_celery.domain.job import JobState
from relata_celery.domain.outcome import Encoded

from .client import Database, translated

JOBS = "relata_jobs"
RESULTS = "relata_results"
#: Results of one round trip.
CHUNK = 1000

_FIELDS = {
    "state": 1, "type": 1, "queue": 1, "attempts": 1, "result": 1, "error": 1, "exception": 1,
    "custom": 1, "finished_at": 1, "forgotten": 1, "placeholder": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What is known of one task's end. ``state`` is None for a plain task, whose state is custom."""

    state: JobState | None
    custom_state: str | None = None
    result: Encoded | None = None
    error: str | None = None
    exception: Mapping[str, Any] | None = None
    traceback: str | None = None
    type: str | None = None
    queue: str | None = None
    attempts: int = 0
    finished_at: datetime | None = None
    forgotten: bool = False


class Results:
    def __init__(self, database: Database) -> None:
        self.database = database

    def get(self, task_id: str) -> StoredResult | None:
        """The result of a job or plain task; None when there is none, or when it was forgotten."""
        with translated():
            document = self.database.collection(JOBS).find_one({"_id": task_id}, _FIELDS)
            if document is None or _is_replaced(document):
                document = self.database.collection(RESULTS).find_one({"_id": task_id})
                return None if document is None else _plain_result(document)
        found = _job_result(document)
        return None if found.forgotten else found

    def get_many(self, task_ids: Sequence[str]) -> dict[str, StoredResult]:
        """The results of these that have one, by id: as :meth:`get`, in two round trips per thousand."""
        found: dict[str, StoredResult] = {}
        for start in range(0, len(task_ids), CHUNK):
            chunk = list(task_ids[start : start + CHUNK])
            with translated():
                for document in self.database.collection(JOBS).find({"_id": {"$in": chunk}}, _FIELDS):
                    if not _is_replaced(document):
                        found[document["_id"]] = _job_result(document)
                missing = [task_id for task_id in chunk if task_id not in found]
                for document in self.database.collection(RESULTS).find({"_id": {"$in": missing}}) if missing else ():
                    found[document["_id"]] = _plain_result(document)
        return {task_id: stored for task_id, stored in found.items() if not stored.forgotten}

    def store_plain(
        self,
        task_id: str,
        state: str,
        result: Encoded,
        traceback: str | None,
        expires_s: float | None,
    ) -> None:
        """Keep the result of a plain task. A stored SUCCESS is never overwritten."""
        with translated():
            fields: dict[str, Any] = {
                "status": {"$literal": state},
                "result": {"$literal": _encode(result)},
                "traceback": {"$literal": traceback},
                "finished_at": "$$NOW",
            }
            if expires_s is not None:
                fields["expire_at"] = {"$add": ["$$NOW", int(expires_s * 1000)]}
            kept = {"$eq": ["$status", "SUCCESS"]}
            self.database.collection(RESULTS).update_one(
                {"_id": task_id},
                [{"$replaceWith": {"$cond": [kept, "$$ROOT", {"$mergeObjects": ["$$ROOT", fields]}]}}],
                upsert=True,
            )

    def set_custom_state(self, task_id: str, state: str, meta: Encoded) -> None:
        """Show a state of the handler's own (``update_state``) while the job runs."""
        with translated():
            self.database.collection(JOBS).update_one(
                {"_id": task_id, "state": JobState.RUNNING.value},
                {"$set": {"custom": {"state": state, "meta": _encode(meta)}}},
            )

    def forget(self, task_id: str) -> None:
        """Drop the result; the job's own record stays until its retention ends."""
        with translated():
            self.database.collection(JOBS).update_one(
                {"_id": task_id}, {"$set": {"forgotten": True}, "$unset": {"result": "", "exception": ""}}
            )
            self.database.collection(RESULTS).delete_one({"_id": task_id})

    def save_group(self, group_id: str, ids_json: str, expires_s: float | None) -> None:
        fields: dict[str, Any] = {"group": {"$literal": ids_json}}
        if expires_s is not None:
            fields["expire_at"] = {"$add": ["$$NOW", int(expires_s * 1000)]}
        with translated():
            self.database.collection(RESULTS).update_one({"_id": _group(group_id)}, [{"$set": fields}], upsert=True)

    def restore_group(self, group_id: str) -> str | None:
        with translated():
            document = self.database.collection(RESULTS).find_one({"_id": _group(group_id)})
        return None if document is None else str(document["group"])

    def delete_group(self, group_id: str) -> None:
        with translated():
            self.database.collection(RESULTS).delete_one({"_id": _group(group_id)})

    def ensure_indexes(self) -> None:
        with translated():
            self.database.collection(RESULTS).create_index("expire_at", name="expire", expireAfterSeconds=0)


def _is_replaced(document: Mapping[str, Any]) -> bool:
    """Whether the job's handler put a workflow in its place, whose end is still to come."""
    return bool(document.get("placeholder")) and document.get("state") == JobState.SUCCEEDED.value


def _group(group_id: str) -> str:
    return f"group:{group_id}"


def _encode(encoded: Encoded) -> dict[str, Any]:
    body = encoded.body if isinstance(encoded.body, str) else Binary(encoded.body)
    return {
        "content_type": encoded.content_type,
        "content_encoding": encoded.content_encoding,
        "body": body,
    }


def _decode(value: Any) -> Encoded | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("body"), (str, bytes)):
        return None
    return Encoded(str(value.get("content_type")), str(value.get("content_encoding")), value["body"])


def _job_result(document: Mapping[str, Any]) -> StoredResult:
    try:
        state = JobState(document.get("state"))
    except ValueError:
        state = JobState.FAILED
    custom = document.get("custom") if state is JobState.RUNNING else None
    custom = custom if isinstance(custom, Mapping) else {}
    exception = document.get("exception")
    exception = exception if isinstance(exception, Mapping) else None
    attempts = document.get("attempts")
    return StoredResult(
        state=state,
        custom_state=str(custom["state"]) if custom.get("state") else None,
        result=_decode(custom.get("meta") if custom else document.get("result")),
        error=document.get("error"),
        exception=exception,
        traceback=exception.get("traceback") if exception else None,
        type=document.get("type"),
        queue=document.get("queue"),
        attempts=attempts if isinstance(attempts, int) else 0,
        finished_at=document.get("finished_at"),
        forgotten=bool(document.get("forgotten")),
    )


def _plain_result(document: Mapping[str, Any]) -> StoredResult:
    return StoredResult(
        state=None,
        custom_state=str(document.get("status")),
        result=_decode(document.get("result")),
        traceback=document.get("traceback"),
        finished_at=document.get("finished_at"),
    )
