"""Limits on MongoDB: one document each, changed by one atomic update at a time, by the server's clock.

Failure behaviour. After StoreUnavailable an update may or may not have happened. Every call may be sent
again: slots are named by the asker, so what was granted before the answer got lost is found, not granted
twice. A slot that nobody returns comes back when its lease runs out, with the next ask of anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, Final, Literal

from pymongo import ReturnDocument
from pymongo.collection import Collection

from relata_celery.domain.limits import (
    AI,
    Answer,
    Bucket,
    Limit,
    LimitSpec,
    Rate,
    Slot,
    Waiter,
    answer,
    as_rate,
    oldest_first,
)

from . import limit_queries as queries
from .client import Database, Document, translated
from .limit_queries import COLLECTION

#: A limit's name is an ``_id``, shown in tables and metrics.
MAX_NAME = 200


class _Unchanged(Enum):
    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged.UNCHANGED


class Limits:
    """All limits of a database (fulfils :class:`relata_celery.engine.limiting.LimitStore`). Safe from any thread."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # -- what askers do -------------------------------------------------------------------------

    def ask(
        self,
        name: str,
        spec: LimitSpec,
        *,
        want: Sequence[str],
        owner: str,
        lease_s: float,
        job_id: str | None = None,
        weight: int = 1,
        give_back: Sequence[str] = (),
        unused: int = 0,
        waiter: str | None = None,
        patience_s: float = 5.0,
    ) -> Answer:
        """Free ``give_back``, then take as many slots of ``want`` as are free. One round trip, one document.

        ``spec`` is what the asker's settings say; a limit set by hand has its own. ``unused`` permits are
        returned. A ``waiter`` that is refused is kept in the queue for ``patience_s`` after its last ask.
        """
        pipeline = queries.ask(
            spec,
            want=want,
            give_back=give_back,
            unused=unused,
            owner=owner,
            job_id=job_id,
            weight=weight,
            lease_s=lease_s,
            waiter=waiter,
            patience_s=patience_s,
        )
        with translated():
            found = self._limits().find_one_and_update(
                {"_id": name},
                pipeline,
                projection=queries.FIELDS,
                upsert=True,
                return_document=ReturnDocument.AFTER,
            )
        return answer(_limit(name, found or {}), want, waiter)

    def give_back(self, name: str, ids: Sequence[str], unused: int = 0) -> None:
        """Free these slots and forget these waiters; those that are gone already are no error."""
        with translated():
            self._limits().update_one({"_id": name}, queries.give_back(ids, unused))

    def renew(
        self,
        name: str,
        ids: Sequence[str],
        *,
        owner: str,
        lease_s: float,
        job_id: str | None = None,
        weight: int = 1,
    ) -> Sequence[str]:
        """Push the end of these slots to the server's now plus ``lease_s``; return those that had been lost.

        A lost slot is taken again even above the concurrency: its holder is running.
        """
        with translated():
            before = self._limits().find_one_and_update(
                {"_id": name},
                queries.renew(ids, owner, job_id, weight, lease_s),
                projection=queries.FIELDS,
                upsert=True,
                return_document=ReturnDocument.BEFORE,
            )
        held = {slot.id for slot in _limit(name, before).slots} if before else set()
        return [slot_id for slot_id in ids if slot_id not in held]

    # -- what people do -------------------------------------------------------------------------

    def list(self) -> Sequence[Limit]:
        """Every limit that was used or set, by name."""
        with translated():
            found = [*self._limits().find({}, queries.FIELDS).sort("_id", 1)]
        return [_limit(str(document["_id"]), document) for document in found]

    def get(self, name: str = AI) -> Limit | None:
        """One limit; None when it was neither used nor set."""
        with translated():
            found = self._limits().find_one({"_id": name}, queries.FIELDS)
        return None if found is None else _limit(name, found)

    def set(
        self,
        name: str,
        concurrency: int | Literal[_Unchanged.UNCHANGED] | None = UNCHANGED,
        rate: Rate | str | Literal[_Unchanged.UNCHANGED] | None = UNCHANGED,
        *,
        burst: float | None = None,
    ) -> Limit:
        """Set a limit by hand; from now on the settings of workers do not count for it.

        ``concurrency`` 0 lets nobody start, None any number. ``rate`` is a text such as ``"60/m"`` or None;
        ``burst`` how many of them may start at once (default: all of a period). What is left out stays.
        Slots that are held stay held. Raises ValueError.
        """
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or "\0" in name:
            raise ValueError(f"the name of a limit is a text of 1 to {MAX_NAME} characters, not {name!r}")
        fields: Document = {}
        if concurrency is not UNCHANGED:
            fields["concurrency"] = LimitSpec(concurrency).concurrency
        if rate is not UNCHANGED:
            fields["rate"] = queries.rate_document(as_rate(rate, burst))
        elif burst is not None:
            raise ValueError("a burst is part of a rate: give both")
        pipeline = queries.by_hand(fields, LimitSpec(None))
        with translated():
            found = self._limits().find_one_and_update(
                {"_id": name},
                pipeline,
                projection=queries.FIELDS,
                upsert=True,
                return_document=ReturnDocument.AFTER,
            )
        return _limit(name, found or {})

    def reset(self, name: str) -> bool:
        """Go back to what the workers' settings say, with the next ask; False when there is no such limit."""
        with translated():
            result = self._limits().update_one({"_id": name}, {"$set": {"source": "settings"}})
        return result.matched_count == 1

    def _limits(self) -> Collection[Document]:
        return self.database.collection(COLLECTION)


def _limit(name: str, document: Mapping[str, Any]) -> Limit:
    """A document read with tolerance: what is not of its type is left out, as the updates do."""
    now = document["now"]
    at_once = document.get("concurrency")
    if at_once is not None and (not isinstance(at_once, (int, float)) or isinstance(at_once, bool)):
        at_once = 0
    slots = [slot for entry in _entries(document, "slots") if (slot := _slot(entry)) and slot.until > now]
    waiters = [
        Waiter(str(entry.get("id")), entry["until"])
        for entry in _entries(document, "waiters")
        if isinstance(entry.get("until"), datetime) and entry["until"] > now
    ]
    return Limit(
        name=name,
        concurrency=None if at_once is None else int(at_once),
        rate=_rate(document.get("rate")),
        by_hand=document.get("source") == "hand",
        slots=tuple(oldest_first(slots)),
        waiters=tuple(waiters),
        bucket=_bucket(document.get("bucket")),
        now=now,
    )


def _entries(document: Mapping[str, Any], field: str) -> Iterable[Mapping[str, Any]]:
    entries = document.get(field)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def _slot(entry: Mapping[str, Any]) -> Slot | None:
    until, since, job_id, weight = (entry.get(field) for field in ("until", "since", "job", "weight"))
    if not isinstance(until, datetime):
        return None
    return Slot(
        id=str(entry.get("id")),
        owner=str(entry.get("owner")),
        job_id=None if job_id is None else str(job_id),
        weight=weight if isinstance(weight, int) else 1,
        since=since if isinstance(since, datetime) else None,
        until=until,
    )


def _rate(value: Any) -> Rate | None:
    if not isinstance(value, Mapping):
        return None
    numbers = [value.get(field) for field in ("count", "period_s", "burst")]
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        return None
    count, period_s, burst = (float(number) for number in numbers if number is not None)
    return Rate(count, period_s, max(burst, 1.0))


def _bucket(value: Any) -> Bucket | None:
    if not isinstance(value, Mapping):
        return None
    level, at = value.get("level"), value.get("at")
    return Bucket(float(level), at) if isinstance(level, (int, float)) and isinstance(at, datetime) else None
