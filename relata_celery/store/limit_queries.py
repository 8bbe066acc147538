"""Update pipelines of the limits. Pure: they return what :mod:`.limits` sends.

The document of a limit:

    _id          str     its name
    concurrency  int     slots at once; null: any number, 0: none
    rate         {count, period_s, burst}; null: any rate
    source       settings | hand    who wrote the two above; settings are written by whoever asks
    slots        [{id, owner, job, weight, since, until}]    leased; expired ones are dropped by the next update
    waiters      [{id, until}]    in the order in which they came
    bucket       {level, at}    permits left at the last start

An ask is one update: it drops what expired, gives back what the asker returns, and grants what is free, in
this order, by one ``$$NOW``. One that changes nothing leaves the document as it is, so refusals cost no
write. Whatever somebody edits by hand into the fields, no pipeline fails on it: what is no number or list
counts as none, and a concurrency that is no number lets nobody in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relata_celery.domain.limits import EPSILON, LimitSpec, Rate

from .client import Document
from .job_queries import NOW, REMOVE, Pipeline, has_type, later, literal, number_of

COLLECTION = "relata_limits"

#: A number of slots that nobody reaches: what "any number" is computed with.
ANY_NUMBER = 1_000_000_000
#: Waiters beyond this many are not written down (they ask again all the same, in no order).
MAX_WAITERS = 500


def _entries(field: str) -> Document:
    return {"$cond": [{"$isArray": field}, field, []]}


def _live(field: str) -> Document:
    """The entries of a list whose lease has not run out."""
    unexpired = {"$and": [has_type("$$entry.until", "date"), {"$gt": ["$$entry.until", NOW]}]}
    return {"$filter": {"input": _entries(field), "as": "entry", "cond": unexpired}}


def _without(entries: Any, ids: Any) -> Document:
    keep = {"$not": {"$in": ["$$entry.id", ids]}}
    return {"$filter": {"input": entries, "as": "entry", "cond": keep}}


def rate_document(rate: Rate | None) -> Document | None:
    return None if rate is None else {"count": rate.count, "period_s": rate.period_s, "burst": rate.burst}


def _unless_by_hand(field: str, value: Any) -> Document:
    return {"$cond": [{"$eq": ["$source", "hand"]}, f"${field}", literal(value)]}


def has_rate() -> Document:
    """Whether the document states a rate that can be computed with."""
    positive = [{"$gt": [number_of(f"$rate.{field}"), 0]} for field in ("count", "period_s", "burst")]
    return {"$and": positive}


def _level(refund: int) -> Document:
    """Permits in the bucket now; beyond any number when there is no rate."""
    known = {"$and": [{"$isNumber": "$bucket.level"}, has_type("$bucket.at", "date")]}
    elapsed_ms = {"$max": [0, {"$subtract": [NOW, "$bucket.at"]}]}
    gained = {"$divide": [{"$multiply": [elapsed_ms, "$rate.count"]}, {"$multiply": ["$rate.period_s", 1000]}]}
    level = {"$min": ["$rate.burst", {"$add": ["$bucket.level", gained, refund]}]}
    return {"$cond": [has_rate(), {"$cond": [known, level, "$rate.burst"]}, ANY_NUMBER]}


def _at_once() -> Document:
    missing = {"$in": [{"$type": "$concurrency"}, ["null", "missing"]]}
    return {"$cond": [missing, ANY_NUMBER, number_of("$concurrency")]}


def ask(
    spec: LimitSpec,
    *,
    want: Sequence[str],
    give_back: Sequence[str],
    unused: int,
    owner: str,
    job_id: str | None,
    weight: int,
    lease_s: float,
    waiter: str | None,
    patience_s: float,
) -> Pipeline:
    """Give back, then grant as many of ``want`` (slot ids, each the asker's own) as are free.

    ``unused`` permits go back into the bucket. An id that already has a slot keeps it and is charged no
    second time, so the same ask may be sent again. Waiters go first: of the free slots those in the queue
    before ``waiter`` (or all, without one) are left to them. A waiter that did not get all is put into the
    queue, or has its place prolonged; one that did leaves it.
    """
    given = {
        "concurrency": _unless_by_hand("concurrency", spec.concurrency),
        "rate": _unless_by_hand("rate", rate_document(spec.rate)),
        "source": {"$cond": [{"$eq": ["$source", "hand"]}, "hand", "settings"]},
        "slots": _without(_live("$slots"), literal(list(give_back))) if give_back else _live("$slots"),
        "waiters": _live("$waiters"),
    }
    place = {"$indexOfArray": ["$waiters.id", literal(waiter)]} if waiter is not None else -1
    sums = {
        "missing": {"$setDifference": [literal(list(want)), "$slots.id"]},
        "ahead": {"$cond": [{"$lt": [place, 0]}, {"$size": "$waiters"}, place]},
        "free": {"$subtract": [_at_once(), {"$sum": "$slots.weight"}]} if weight else ANY_NUMBER,
        "level": _level(unused),
    }
    permits = {"$floor": {"$add": ["$work.level", EPSILON]}}
    free = {"$subtract": [{"$min": ["$work.free", permits]}, "$work.ahead"]}
    number = {"$toInt": {"$max": [0, {"$min": [{"$size": "$work.missing"}, free]}]}}
    return [
        {"$set": given},
        {"$set": {"work": sums}},
        {"$set": {"work.n": number}},
        {
            "$set": {
                "slots": _with_granted(owner, job_id, weight, lease_s),
                "bucket": _bucket(unused),
                "waiters": "$waiters" if waiter is None else _queue(waiter, patience_s),
                "work": REMOVE,
            }
        },
    ]


def _with_granted(owner: str, job_id: str | None, weight: int, lease_s: float) -> Document:
    slot = {
        "id": "$$id",
        "owner": literal(owner),
        "job": literal(job_id),
        "weight": weight,
        "since": NOW,
        "until": later(lease_s),
    }
    # ``$slice`` does not take a zero.
    taken = {"$slice": ["$work.missing", {"$max": [1, "$work.n"]}]}
    granted = {"$map": {"input": taken, "as": "id", "in": slot}}
    return {"$cond": [{"$gt": ["$work.n", 0]}, {"$concatArrays": ["$slots", granted]}, "$slots"]}


def _bucket(unused: int) -> Document:
    changed = {"$or": [{"$gt": ["$work.n", 0]}, unused > 0]}
    after = {"level": {"$subtract": ["$work.level", "$work.n"]}, "at": NOW}
    kept = {"$cond": [has_type("$bucket", "object"), "$bucket", REMOVE]}
    return {"$cond": [has_rate(), {"$cond": [changed, after, kept]}, REMOVE]}


def _queue(waiter: str, patience_s: float) -> Document:
    me, until = literal(waiter), later(patience_s)
    mine = {"$eq": ["$$entry.id", me]}
    # Written again only when half of its time is gone: most tries of a waiter change nothing.
    late = {"$and": [mine, {"$lt": ["$$entry.until", later(patience_s / 2)]}]}
    prolonged = {"$cond": [late, {"id": "$$entry.id", "until": until}, "$$entry"]}
    joined = {"$concatArrays": ["$waiters", [{"id": me, "until": until}]]}
    full = {"$gte": [{"$size": "$waiters"}, MAX_WAITERS]}
    stay = {
        "$cond": [
            {"$in": [me, "$waiters.id"]},
            {"$map": {"input": "$waiters", "as": "entry", "in": prolonged}},
            {"$cond": [full, "$waiters", joined]},
        ]
    }
    served = {"$gte": ["$work.n", {"$size": "$work.missing"}]}
    return {"$cond": [served, _without("$waiters", [me]), stay]}


def give_back(ids: Sequence[str], unused: int) -> Pipeline:
    """Free these slots, and forget waiters of these ids; ``unused`` permits go back into the bucket."""
    gone = literal(list(ids))
    update: Document = {
        "slots": _without(_live("$slots"), gone),
        "waiters": _without(_live("$waiters"), gone),
    }
    if unused:
        after = {"level": _level(unused), "at": NOW}
        update["bucket"] = {"$cond": [has_rate(), after, REMOVE]}
    return [{"$set": update}]


def renew(ids: Sequence[str], owner: str, job_id: str | None, weight: int, lease_s: float) -> Pipeline:
    """Push the end of these slots' leases on; one that is gone is taken again, whoever holds slots now.

    Whoever renews does run: counting it keeps others out until there is room again.
    """
    mine, until = literal(list(ids)), later(lease_s)
    prolonged = {
        "$cond": [
            {"$in": ["$$entry.id", mine]},
            {"$mergeObjects": ["$$entry", {"until": until}]},
            "$$entry",
        ]
    }
    slot = {
        "id": "$$id",
        "owner": literal(owner),
        "job": literal(job_id),
        "weight": weight,
        "since": NOW,
        "until": until,
    }
    lost = {"$setDifference": [mine, "$slots.id"]}
    return [
        {"$set": {"slots": _live("$slots")}},
        {
            "$set": {
                "slots": {
                    "$concatArrays": [
                        {"$map": {"input": "$slots", "as": "entry", "in": prolonged}},
                        {"$map": {"input": lost, "as": "id", "in": slot}},
                    ]
                }
            }
        },
    ]


def by_hand(fields: Document, others: LimitSpec) -> Pipeline:
    """Set these fields for good; those not named stay, or are ``others`` when the limit is new."""
    known = has_type("$source", "string")
    update: Document = {
        "concurrency": {"$cond": [known, "$concurrency", literal(others.concurrency)]},
        "rate": {"$cond": [known, "$rate", literal(rate_document(others.rate))]},
    }
    update |= {name: literal(value) for name, value in fields.items()}
    return [{"$set": {**update, "source": "hand"}}]


#: What is read of a document; ``now`` is the server's answer.
FIELDS: Document = {
    "concurrency": 1,
    "rate": 1,
    "source": 1,
    "slots": 1,
    "waiters": 1,
    "bucket": 1,
    "now": NOW,
}
