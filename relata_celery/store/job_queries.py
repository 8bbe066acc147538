"""Filters and update pipelines of the queue. Pure: they return what :mod:`.jobs` sends.

Three habits keep them right:

- Times are computed by the server: ``$$NOW``, which is one moment for the whole command.
- What came from outside (names, errors, messages) stands inside ``$literal``, or in a filter as a plain
  value, so a text that begins with ``$`` stays a text.
- A pipeline must not fail on a document that somebody edited by hand, since it runs on a batch: numbers,
  dates and lists are checked before they are computed with.

In an update pipeline ``$$REMOVE`` unsets, and every expression of one stage reads the document as it was
before that stage. What a person does by hand has its queries in :mod:`.by_hand_queries`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from relata_celery.domain.backoff import MAX_DOUBLINGS, lost_delay_s
from relata_celery.domain.job import AttemptOutcome, Claim, ErrorClass, JobState

from .client import Document

Pipeline = list[Mapping[str, Any]]

#: Of a job's history the first and the newest attempts are kept, and the dropped ones counted.
HISTORY_FIRST = 5
HISTORY_NEWEST = 45
LEASE_EXPIRED = "lease expired"
#: Follow-ups older than this are stuck: whoever settled the job died before publishing them.
STUCK_AFTER_MS = 10_000

QUEUED = JobState.QUEUED.value
RUNNING = JobState.RUNNING.value
FAILED = JobState.FAILED.value
CANCELLED = JobState.CANCELLED.value
RANKS = list(range(10))
#: What is added to the rank of a waiting job whose type is paused: no claim looks so far.
SHELVED = 100

#: At or after it is every date that a document can hold, and nothing of another type.
_FIRST_DATE = datetime.min.replace(tzinfo=timezone.utc)

NOW = "$$NOW"
REMOVE = "$$REMOVE"


# ---------------------------------------------------------------- pieces


def literal(value: Any) -> Document:
    """The value itself, whatever it looks like."""
    return {"$literal": value}


def later(seconds: float) -> Any:
    """The server's now plus ``seconds``."""
    return {"$add": [NOW, round(seconds * 1000)]} if seconds else NOW


def expire_at(retention_s: float | None) -> Any:
    return REMOVE if retention_s is None else later(retention_s)


def number_of(field: str) -> Document:
    return {"$cond": [{"$isNumber": field}, field, 0]}


def _list(field: str) -> Document:
    return {"$cond": [{"$isArray": field}, field, []]}


def has_type(field: str, kind: str) -> Document:
    return {"$eq": [{"$type": field}, kind]}


def by_fence(pairs: Iterable[tuple[Any, Any]]) -> Document:
    """A filter for these ids, each only under its own fence.

    ``_id`` stands at the top also when there are several fences: the ids' bounds then come from it, and
    the ``$or`` is only checked on the documents found.
    """
    # By what the fence looks like: one that was edited into a list or an object is no key of a dict.
    groups: dict[str, tuple[Any, list[Any]]] = {}
    for job_id, fence in pairs:
        groups.setdefault(repr(fence), (fence, []))[1].append(job_id)
    if len(groups) == 1:
        ((fence, ids),) = groups.values()
        return {"_id": {"$in": ids}, "fence": fence}
    every = [job_id for _fence, ids in groups.values() for job_id in ids]
    branches = [{"fence": fence, "_id": {"$in": ids}} for fence, ids in groups.values()]
    return {"_id": {"$in": every}, "$or": branches}


def held(claim: Claim) -> Document:
    """The filter of every write that assumes ownership."""
    return {"_id": claim.id, "state": RUNNING, "fence": claim.fence, "lease.owner": claim.owner}


def with_entry(entry: Document) -> Document:
    """``history`` and ``history_skipped`` with one more entry, capped."""
    history, cap = _list("$history"), HISTORY_FIRST + HISTORY_NEWEST
    size = {"$size": history}
    capped = [{"$slice": [history, HISTORY_FIRST]}, {"$slice": [history, 1 - HISTORY_NEWEST]}, [entry]]
    dropped = {"$max": [0, {"$subtract": [{"$add": [size, 1]}, cap]}]}
    skipped = {"$add": [number_of("$history_skipped"), dropped]}
    return {
        "history": {
            "$cond": [
                {"$lt": [size, cap]},
                {"$concatArrays": [history, [entry]]},
                {"$concatArrays": capped},
            ]
        },
        "history_skipped": {"$cond": [{"$gt": [skipped, 0]}, skipped, "$history_skipped"]},
    }


def entry_of(
    number: Any,
    outcome: AttemptOutcome,
    error_class: ErrorClass | None = None,
    error: Any = None,
    duration_ms: Any = None,
) -> Document:
    """A history entry. ``number``, ``error`` and ``duration_ms`` are expressions (a text in ``$literal``)."""
    entry: Document = {
        "number": number,
        "fence": "$fence",
        "started_at": "$started_at",
        "ended_at": NOW,
        "duration_ms": {"$cond": [has_type("$started_at", "date"), {"$subtract": [NOW, "$started_at"]}, 0]}
        if duration_ms is None
        else duration_ms,
        "worker": "$lease.owner",
        "outcome": outcome.value,
    }
    if error_class is not None:
        entry["error_class"] = error_class.value
    if error is not None:
        entry["error"] = error
    return entry


# ---------------------------------------------------------------- claim and renew


#: A queued job's time has come, by the server's clock. A ``run_at`` that is no date, set by hand, counts as past:
#: numbers and texts sort before every date.
DUE: Mapping[str, Any] = {"$lte": ["$run_at", NOW]}


def due(queues: Collection[str]) -> Document:
    """Queued jobs of these queues whose time has come, by the server's clock."""
    unshelved = {"$not": {"$gte": SHELVED}}
    return {"state": QUEUED, "queue": {"$in": list(queues)}, "rank": unshelved, "$expr": DUE}


def due_and_readable(job_id: str, queues: Collection[str], paused_types: Collection[str]) -> Document:
    """This job, if it is due, of no paused type, and all that executing needs of it is of the right type."""
    whole = {"$type": ["int", "long"]}
    numbers = dict.fromkeys(("fence", "attempts", "max_attempts"), whole)
    type_ = {"$type": "string", "$nin": list(paused_types)}
    return {"_id": job_id, **due(queues), "type": type_, "message": {"$type": "object"}, **numbers}


#: The order of claiming; the claim index gives it without a sort, by merging one scan per queue.
CLAIM_ORDER = [("rank", 1), ("run_at", 1)]

#: What a claim reads of a document. ``expired`` and ``now`` are the server's answers.
CLAIM_FIELDS: Mapping[str, Any] = {
    "type": 1,
    "queue": 1,
    "rank": 1,
    "priority": 1,
    "message": 1,
    "attempts": 1,
    "max_attempts": 1,
    "fence": 1,
    "item_id": 1,
    "snoozes": 1,
    "snoozed_ms": 1,
    "expired": {"$and": [has_type("$expires_at", "date"), {"$lte": ["$expires_at", NOW]}]},
    "now": NOW,
}


def shelve(ids: Sequence[Any]) -> tuple[Document, Document]:
    """Put these waiting jobs where no claim looks: the filter and the update."""
    return {"_id": {"$in": list(ids)}, "state": QUEUED, "rank": {"$lt": SHELVED}}, {"$inc": {"rank": SHELVED}}


def take(owner: str, ticket: str, lease_s: float) -> Pipeline:
    """Queued to running, under the next fence. ``ticket`` marks what this very call has won."""
    return [
        {
            "$set": {
                "state": RUNNING,
                "fence": {"$add": ["$fence", 1]},
                "attempts": {"$add": ["$attempts", 1]},
                "started_at": NOW,
                "lease": {
                    "owner": literal(owner),
                    "until": later(lease_s),
                    "ticket": literal(ticket),
                    # A change stream shows an update's own fields only: so it can tell whose claim this is.
                    "queue": "$queue",
                },
                # Left behind when somebody queued a finished job with a plain $set: TTL would
                # remove it while it runs.
                "finished_at": REMOVE,
                "expire_at": REMOVE,
                "custom": REMOVE,
            }
        }
    ]


def refuse(reason: str, retention_s: float | None) -> Pipeline:
    """Queued to failed, touching nothing that may be of the wrong type."""
    return [
        {
            "$set": {
                "state": FAILED,
                "error": literal(reason),
                "error_class": ErrorClass.PERMANENT.value,
                "finished_at": NOW,
                "expire_at": expire_at(retention_s),
                "unique_live": REMOVE,
                "lease": REMOVE,
            }
        }
    ]


#: The same for a document that may not grow: "failed" is as long as "queued".
REFUSE_WITHOUT_A_WORD: Pipeline = [{"$set": {"state": FAILED, "unique_live": REMOVE, "lease": REMOVE}}]


def renewable(claims: Iterable[Claim], owner: str) -> Document:
    """The documents of these claims of one owner that still hold, and that nobody asked to stop."""
    return {
        **by_fence((claim.id, claim.fence) for claim in claims),
        "state": RUNNING,
        "lease.owner": owner,
        "cancel_requested": {"$ne": True},
    }


def prolong(lease_s: float) -> Pipeline:
    """Push the lease's end to the server's now plus ``lease_s``."""
    return [{"$set": {"lease.until": later(lease_s)}}]


def progress(fraction: float | None, note: str | None) -> Pipeline:
    """Note how far the job says it is."""
    return [{"$set": {"progress": {"fraction": literal(fraction), "note": literal(note), "at": NOW}}}]


def custom_state(state: str, meta: Any) -> Pipeline:
    """Note a state of the app's own (Celery's ``update_state``)."""
    return [{"$set": {"custom": {"state": literal(state), "meta": literal(meta), "at": NOW}}}]


# ---------------------------------------------------------------- revoked


#: The job is not to be run again, whatever becomes of the attempt that runs.
REVOKED: Mapping[str, Any] = {"$eq": ["$revoked", True]}


def cancelled_if(
    condition: Mapping[str, Any], retention_s: float | None, otherwise: Mapping[str, Any] = MappingProxyType({})
) -> Document:
    """The fields of a job that ends as revoked if ``condition`` holds, else those of ``otherwise`` or as they are."""
    fields = {
        "state": CANCELLED,
        "error": "revoked",
        "error_class": ErrorClass.CANCELLED.value,
        "exception": REMOVE,
        "finished_at": NOW,
        "expire_at": expire_at(retention_s),
        "unique_live": REMOVE,
    }
    return {name: {"$cond": [condition, value, otherwise.get(name, f"${name}")]} for name, value in fields.items()}


# ---------------------------------------------------------------- reap


def expired() -> Document:
    """Running jobs whose lease ran out, by the server's clock."""
    return {"state": RUNNING, "$expr": {"$lt": ["$lease.until", NOW]}}


#: How long ago the lease of an expired job ran out.
LATE_FIELDS: Mapping[str, Any] = {"_id": 0, "late_ms": {"$subtract": [NOW, "$lease.until"]}}


def still_expired(documents: Iterable[Mapping[str, Any]]) -> Document:
    """The same jobs, each only if its lease has not been renewed or its fence moved since it was read."""
    return {**expired(), **by_fence((document["_id"], document.get("fence")) for document in documents)}


_ASKED_TO_CANCEL: Mapping[str, Any] = {"$or": [{"$eq": ["$cancel_requested", True]}, REVOKED]}
_SPENT: Mapping[str, Any] = {"$gte": ["$attempts", "$max_attempts"]}


def reap(
    retention_s: float | None,
    ticket: str,
    followups: Sequence[Mapping[str, Any]] = (),
    random_fraction: float = 0.0,
) -> Pipeline:
    """Back to queued while attempts are left, else to failed; cancelled if that was asked for.

    Due at once after the first attempt, later after each further one (:func:`lost_delay_s`).
    ``ticket`` in the history entry tells the reaper that did it from others who saw the same job.
    ``followups`` are written if it fails.
    """
    state = {"$cond": [_ASKED_TO_CANCEL, CANCELLED, {"$cond": [_SPENT, FAILED, QUEUED]}]}
    entry = entry_of("$attempts", AttemptOutcome.LEASE_EXPIRED, ErrorClass.TRANSIENT, LEASE_EXPIRED)
    first = {
        "state": state,
        "error": LEASE_EXPIRED,
        "error_class": ErrorClass.TRANSIENT.value,
        "exception": REMOVE,
        **with_entry({**entry, "ticket": literal(ticket)}),
    }
    queued = {"$eq": ["$state", QUEUED]}
    second = {
        "run_at": {"$cond": [queued, {"$add": [NOW, _lost_delay_ms(random_fraction)]}, "$run_at"]},
        "finished_at": {"$cond": [queued, REMOVE, NOW]},
        "expire_at": {"$cond": [queued, REMOVE, expire_at(retention_s)]},
        "unique_live": {"$cond": [queued, "$unique_live", REMOVE]},
        "lease": REMOVE,
        "custom": REMOVE,
    }
    if followups:
        asked_for = literal([dict(followup) for followup in followups])
        second["followups"] = {"$cond": [{"$eq": ["$state", FAILED]}, asked_for, "$followups"]}
    return [{"$set": first}, {"$set": second}]


def _lost_delay_ms(random_fraction: float) -> Document:
    """By the number of attempts, which may have been edited into anything."""
    delays = [round(lost_delay_s(attempts, random_fraction) * 1000) for attempts in range(MAX_DOUBLINGS + 2)]
    place = {"$max": [0, {"$min": [{"$floor": number_of("$attempts")}, len(delays) - 1]}]}
    return {"$arrayElemAt": [literal(delays), place]}


#: What reaping reads of a document. ``fails`` is the server's answer.
REAP_FIELDS: Mapping[str, Any] = {
    "type": 1,
    "queue": 1,
    "fence": 1,
    "attempts": 1,
    "lease": 1,
    "message": 1,
    "fails": {"$and": [{"$not": [_ASKED_TO_CANCEL]}, _SPENT]},
}


# ---------------------------------------------------------------- follow-ups and time


def stuck() -> Document:
    """Jobs that ended a while ago and whose follow-ups are still there."""
    too_old = {"$lt": ["$finished_at", {"$subtract": [NOW, STUCK_AFTER_MS]}]}
    return {"followups": {"$exists": True}, "$expr": too_old}


def with_followups() -> Document:
    """Jobs whose follow-ups are not published yet. Naming ``finished_at`` lets their own index serve it."""
    return {"followups": {"$exists": True}, "finished_at": {"$gte": _FIRST_DATE}}


def placeholder(job_id: str) -> Document:
    """The document that keeps a job's place, if this is one."""
    ended = [state.value for state in JobState if state.terminal]
    return {"_id": job_id, "placeholder": True, "state": {"$in": ended}}


def take_place(document: Any) -> Pipeline:
    """A new job in the place that was kept for it. The fence is never lowered, and what was done is kept."""
    kept = {name: f"${name}" for name in ("fence", "history", "history_skipped", "created_at")}
    return [{"$replaceWith": {"$mergeObjects": [literal(document), kept]}}]


def waiting(queues: Collection[str]) -> Document:
    """Queued jobs of these queues whose ``run_at`` is a date. Naming every rank lets the claim index give them
    by ``run_at``, by merging one scan per queue and rank."""
    return {"state": QUEUED, "queue": {"$in": list(queues)}, "rank": {"$in": RANKS}, "run_at": {"$gte": _FIRST_DATE}}


#: How long until a queued job is due, by the server's clock; below zero when it is.
WAIT_FIELDS: Mapping[str, Any] = {"_id": 0, "wait_ms": {"$subtract": ["$run_at", NOW]}}
