"""The leased queue on MongoDB: every conditional write of a worker on ``relata_jobs``.

Invariants:

- A claim raises the fence by one; whoever renews or settles names the fence it was given. A filter that
  matches nothing means that the lease is lost, and is reported, never passed over.
- Each batch is one write. Only when it matched fewer documents than were sent is anything read back.
- No document, however it was edited, keeps the others of its batch from being claimed, settled or reaped.

After StoreUnavailable a write may or may not have happened. Enqueue, publish, renew, settle, reap and
clear_followups may simply be called again. Before claim is called again, ``unheard`` tells which jobs the
lost answer had leased: nobody else would know of them until their lease runs out.
"""

from __future__ import annotations

import random
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pymongo import DeleteMany, UpdateMany, UpdateOne
from pymongo.errors import OperationFailure

from relata_celery.domain.errors import StoreError, StoreUnavailable
from relata_celery.domain.job import Claim, ClaimedJob, ClaimedJobs, JobState
from relata_celery.domain.outcome import Loss, Reaped, Settlement, Verdict

from . import job_queries as queries
from .client import Database, Document, translated
from .codec import UnreadableJob, claimed_from_document
from .indexes import CLAIM, ensure_indexes
from .inserting import Inserts
from .settle_queries import Entry, grouped, prepare, settle, still_held
from .standing import STANDING_FIELDS, cancelled, holds, shows_end, why_lost
from .unheard import UnheardClaims

#: After a claim lost candidates to others, the next one chooses its own among this many times as many.
SPREAD = 4
#: MongoDB merges at most 200 scans: ten ranks of twenty queues.
_QUEUES_PER_SCAN = 20


class Jobs(Inserts):
    """The leased queue (fulfils :class:`relata_celery.engine.ports.JobQueue`), and jobs by hand.

    ``default_max_attempts`` is for jobs published without their own; ``retention_failed_s`` for jobs that end
    here without an attempt (cancelled by hand, or unreadable). Safe from any thread and over a fork.
    """

    #: Whether the last claim lost candidates to another.
    _contended = False

    def __init__(
        self,
        database: Database,
        *,
        default_max_attempts: int = 5,
        retention_failed_s: float | None = None,
    ) -> None:
        super().__init__(
            database, default_max_attempts=default_max_attempts, retention_failed_s=retention_failed_s
        )
        self._unheard = UnheardClaims()

    # ------------------------------------------------------------ claim

    def claim(
        self,
        queues: Collection[str],
        limit: int,
        owner: str,
        lease_s: float,
        admit: Callable[[Sequence[str]], Sequence[bool]] | None = None,
        paused_types: Collection[str] = (),
    ) -> ClaimedJobs:
        """Lease up to ``limit`` due jobs of ``queues`` to ``owner``, highest priority and oldest first.

        Eligible: queued, ``run_at`` reached. Changed: state, fence, attempts, started_at, lease. Two round
        trips, three when others claimed the same jobs meanwhile. A document that cannot be read is
        failed here (permanent), and the rest is claimed. ``admit`` is asked between finding and leasing,
        with the queue of each job found; those that it does not let in are left as they are. Jobs of
        ``paused_types`` are put where no claim looks until their type is resumed.
        """
        if limit < 1 or not queues:
            return ClaimedJobs()
        seen = head = self._head(queues, limit * SPREAD, {"rank": 1}) if self._contended else self._head(queues, limit)
        if self._contended:
            seen = self._spread(head, limit)
        if paused_types:
            seen = self._shelve(seen, paused_types)
        if admit is not None and seen:
            admitted = admit([str(document.get("queue")) for document in seen])
            seen = [document for document, lets_in in zip(seen, admitted, strict=True) if lets_in]
        return ClaimedJobs(self._take(seen, owner, lease_s), more=len(head) >= limit)

    def claim_by_id(
        self, job_id: str, queues: Collection[str], owner: str, lease_s: float, paused_types: Collection[str] = ()
    ) -> ClaimedJob | None:
        """Lease this one job if it is queued in one of ``queues``, due, and of no paused type. One round trip.

        None also for a document that is not as a job's should be: :meth:`claim` judges it.
        """
        ticket = secrets.token_hex(4)
        query = queries.due_and_readable(job_id, queues, paused_types)
        pipeline = queries.take(owner, ticket, lease_s)
        with self._unheard.noted(owner, ticket, [job_id]), translated():
            seen = self._jobs().find_one_and_update(query, pipeline, queries.CLAIM_FIELDS, hint="_id_")
        return None if seen is None else claimed_from_document(seen, owner)

    def unheard(self) -> list[ClaimedJob]:
        """Jobs that a claim from here was granted without an answer; [] and no round trip when all were answered.

        Each is told once. What the server does with such a claim later still, nobody hears before its lease
        runs out.
        """
        claim = self._unheard.oldest()
        if claim is None:
            return []
        query = {"_id": {"$in": list(claim.ids)}, "lease.ticket": claim.ticket}
        with translated():
            granted = list(self._jobs().find(query, queries.CLAIM_FIELDS))
        self._unheard.answered(claim)
        return [
            claimed_from_document({**job, "fence": job["fence"] - 1, "attempts": job["attempts"] - 1}, claim.owner)
            for job in granted
        ]

    def _head(
        self, queues: Collection[str], limit: int, fields: Mapping[str, Any] = queries.CLAIM_FIELDS
    ) -> list[Document]:
        query = queries.due(queues)

        def find(**hint: str) -> list[Document]:
            cursor = self._jobs().find(query, fields, sort=queries.CLAIM_ORDER, limit=limit, **hint)
            return list(cursor)

        with translated():
            try:
                # Without the hint the planner tries other indexes too, now and then, and remembers a bad one.
                return find(hint=CLAIM)
            except OperationFailure as exc:
                if "hint" not in str(exc):
                    raise
                ensure_indexes(self.database)
                return find()

    def _shelve(self, seen: Sequence[Document], paused_types: Collection[str]) -> list[Document]:
        """Those of no paused type; the others are put aside, or each claim would pass them by anew."""
        paused = [document["_id"] for document in seen if document.get("type") in paused_types]
        if paused:
            which, update = queries.shelve(paused)
            with translated():
                self._jobs().update_many(which, update, hint="_id_")
        return [document for document in seen if document.get("type") not in paused_types]

    def _spread(self, head: list[Document], limit: int) -> list[Document]:
        """Candidates chosen at random among these, within each priority."""
        random.shuffle(head)
        head.sort(key=lambda document: str(document.get("rank")))
        place = {_name(document): index for index, document in enumerate(head[:limit])}
        if not place:
            self._contended = False
            return []
        with translated():
            query = {"_id": {"$in": [document["_id"] for document in head[:limit]]}, "state": queries.QUEUED}
            seen = list(self._jobs().find(query, queries.CLAIM_FIELDS))
        return sorted(seen, key=lambda document: place[_name(document)])

    def _take(self, seen: Sequence[Document], owner: str, lease_s: float) -> list[ClaimedJob]:
        """Lease those of the seen documents that are still queued under the fence seen."""
        candidates: list[ClaimedJob] = []
        unreadable: list[tuple[Any, str]] = []
        for document in seen:
            try:
                candidates.append(claimed_from_document(document, owner))
            except UnreadableJob as problem:
                unreadable.append((document["_id"], str(problem)))
        self._refuse(unreadable)
        if not candidates:
            return []
        ticket = secrets.token_hex(4)
        with self._unheard.noted(owner, ticket, [job.claim.id for job in candidates]):
            return self._take_candidates(seen, candidates, owner, ticket, lease_s)

    def _take_candidates(
        self, seen: Sequence[Document], candidates: list[ClaimedJob], owner: str, ticket: str, lease_s: float
    ) -> list[ClaimedJob]:
        fences = queries.by_fence((job.claim.id, job.claim.fence - 1) for job in candidates)
        pipeline = queries.take(owner, ticket, lease_s)
        try:
            with translated():
                query = {**fences, "state": queries.QUEUED}
                taken = self._jobs().update_many(query, pipeline, hint="_id_").modified_count
        except StoreUnavailable:
            raise
        except StoreError as problem:
            if len(candidates) == 1:
                self._refuse([(candidates[0].claim.id, str(problem))])
                return []
            # One of them cannot be updated (it is at the size limit, say): find out which.
            won = self._won(candidates, ticket)
            done = {job.claim.id for job in won}
            rest = [document for document in seen if _name(document) not in done]
            return won + [job for document in rest for job in self._take([document], owner, lease_s)]
        self._contended = taken < len(candidates)
        return self._won(candidates, ticket) if self._contended else candidates

    def _won(self, candidates: Sequence[ClaimedJob], ticket: str) -> list[ClaimedJob]:
        """Those of the candidates that carry this call's ticket."""
        query = {"_id": {"$in": [job.claim.id for job in candidates]}, "lease.ticket": ticket}
        with translated():
            won = {document["_id"] for document in self._jobs().find(query, {"_id": 1})}
        return [job for job in candidates if job.claim.id in won]

    def _refuse(self, unreadable: Sequence[tuple[Any, str]]) -> None:
        for job_id, reason in unreadable:
            query = {"_id": job_id, "state": queries.QUEUED}
            text = f"job document cannot be read: {reason}"
            try:
                with translated():
                    self._jobs().update_one(query, queries.refuse(text, self._retention_failed_s))
            except StoreUnavailable:
                raise
            except StoreError:
                # Full to the last byte: there is no room even for the reason.
                with translated():
                    self._jobs().update_one(query, queries.REFUSE_WITHOUT_A_WORD)

    # ------------------------------------------------------------ renew

    def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Loss]:
        """Push the end of these leases to the server's now plus ``lease_s``; return the lost ones.

        A job that somebody asked to cancel is not renewed and comes back as lost.
        """
        by_owner: dict[str, dict[Claim, None]] = defaultdict(dict)
        for claim in claims:
            by_owner[claim.owner][claim] = None
        losses: list[Loss] = []
        for owner, mine in by_owner.items():
            with translated():
                result = self._jobs().update_many(
                    queries.renewable(mine, owner), queries.prolong(lease_s), hint="_id_"
                )
            if result.matched_count < len(mine):
                losses += self._lost(mine)
        return losses

    def _lost(self, claims: Iterable[Claim]) -> list[Loss]:
        claims = list(claims)
        documents = self._standing(claim.id for claim in claims)
        losses = []
        for claim in claims:
            document = documents.get(claim.id)
            stopped = cancelled(document)
            if not holds(document, claim):
                losses.append(Loss(claim, stopped, why_lost(document, claim)))
            elif stopped:
                losses.append(Loss(claim, True, "job was asked to cancel"))
        return losses

    def _standing(self, ids: Iterable[str]) -> dict[str, Document]:
        with translated():
            found = self._jobs().find({"_id": {"$in": list(ids)}}, STANDING_FIELDS)
            return {document["_id"]: document for document in found}

    # ------------------------------------------------------------ settle

    def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End attempts, each only if its claim holds; one verdict per settlement, in order.

        One bulk write. What matched nothing is read back: accepted if the document already shows this very
        end (an earlier try whose answer was lost), else refused with the reason. Of one that BSON cannot hold,
        or that MongoDB refuses by itself, nothing is written, and the verdict says that it is unstorable.
        """
        verdicts: dict[int, Verdict] = {}
        entries: dict[int, Entry] = {}
        for place, settlement in enumerate(settlements):
            try:
                entries[place] = prepare(settlement)
            except StoreError as problem:
                verdicts[place] = _unstorable(settlement, problem)
        if entries:
            verdicts |= zip(entries, self._settle(list(entries.values())), strict=True)
        return [verdicts[place] for place in range(len(settlements))]

    def _settle(self, entries: Sequence[Entry]) -> list[Verdict]:
        try:
            if self._send(entries) == len(entries):
                return [Verdict(entry.settlement.claim, True) for entry in entries]
        except StoreUnavailable:
            raise
        except StoreError as problem:
            if len(entries) == 1:
                return [_unstorable(entries[0].settlement, problem)]
            return [verdict for entry in entries for verdict in self._settle([entry])]
        documents = self._standing(entry.settlement.claim.id for entry in entries)
        return [_verdict(entry.settlement, documents.get(entry.settlement.claim.id)) for entry in entries]

    def _send(self, entries: Sequence[Entry]) -> int:
        """One bulk write for all; how many documents it ended."""
        operations: list[UpdateOne | UpdateMany | DeleteMany] = []
        for group in grouped(entries):
            query = still_held(group)
            if group[0].shape.delete:
                operations.append(DeleteMany(query, hint="_id_"))
            else:
                # An update of one is retried by the driver after a lost connection, one of many is not.
                update = UpdateOne if len(group) == 1 else UpdateMany
                operations.append(update(query, settle(group, self._retention_failed_s), hint="_id_"))
        with translated():
            result = self._jobs().bulk_write(operations, ordered=False)
        return result.matched_count + result.deleted_count

    # ------------------------------------------------------------ reap

    def reap(
        self,
        limit: int,
        retention_s: float | None,
        called_for: Callable[[Reaped], Sequence[Mapping[str, Any]] | None] | None = None,
    ) -> list[Reaped]:
        """Move jobs whose lease ran out back to ``queued``, or to ``failed`` when no attempt is left.

        A job that somebody asked to cancel becomes ``cancelled``. ``called_for`` is asked, of each job that is to
        fail, what must be published because of it; that is written with the failure, or not at all if MongoDB
        cannot store it. Where the answer is None the job is left as it is, to another reaper.
        Returns only what this very call moved, oldest first: of several reapers each job is reported by one.
        """
        with translated():
            seen = list(
                self._jobs().find(
                    queries.expired(),
                    queries.REAP_FIELDS,
                    sort=[("lease.until", 1)],
                    limit=limit,
                )
            )
        if not seen:
            return []
        ticket = secrets.token_hex(4)
        rest: list[Document] = []
        more: dict[str, dict[str, Any]] = {}
        for document in seen:
            followups: tuple[Mapping[str, Any], ...] = ()
            if called_for is not None and document.get("fails") is True:
                answer = called_for(_reaped(document, queries.FAILED))
                if answer is None:
                    continue
                followups = tuple(answer)
            if followups and self._reap_one(document, queries.reap(retention_s, ticket, followups)):
                more[_name(document)] = {"followups": followups}
                continue
            rest.append(document)
            if followups:
                more[_name(document)] = {"dropped": len(followups)}
        with translated():
            if rest:
                query = queries.still_expired(rest)
                pipeline = queries.reap(retention_s, ticket, random_fraction=random.random())
                self._jobs().update_many(query, pipeline, hint="_id_")
            mine = {"_id": {"$in": [document["_id"] for document in seen]}, "history.ticket": ticket}
            states = {_name(found): found["state"] for found in self._jobs().find(mine, {"state": 1})}
        return [
            _reaped(document, state, more.get(_name(document), {}) if state == queries.FAILED else {})
            for document in seen
            if (state := states.get(_name(document))) is not None
        ]

    def _reap_one(self, document: Document, pipeline: queries.Pipeline) -> bool:
        """Reap a job together with its follow-ups; False if MongoDB cannot store them."""
        try:
            with translated():
                self._jobs().update_one(queries.still_expired([document]), pipeline, hint="_id_")
        except StoreUnavailable:
            raise
        except StoreError:
            return False
        return True

    # ------------------------------------------------------------ follow-ups, progress, time

    def clear_followups(self, ids: Sequence[str]) -> None:
        """Remove ``followups`` from these jobs: they are published."""
        if ids:
            with translated():
                query = {"_id": {"$in": list(ids)}, "followups": {"$exists": True}}
                self._jobs().update_many(query, {"$unset": {"followups": ""}}, hint="_id_")

    def stuck_followups(self, limit: int) -> list[tuple[str, tuple[Mapping[str, Any], ...]]]:
        """Settled jobs whose follow-ups were not published within ten seconds of their end, oldest first.

        They are as stored: edited by hand they may be anything; what is no list counts as one of them.
        """
        with translated():
            found = self._jobs().find(
                queries.stuck(), {"followups": 1}, sort=[("finished_at", 1)], limit=limit
            )
            several = [(document["_id"], document["followups"]) for document in found]
        return [(job_id, tuple(stored) if isinstance(stored, list) else (stored,)) for job_id, stored in several]

    def record_progress(self, claim: Claim, fraction: float | None, note: str | None) -> bool:
        """Write a running job's progress if the claim holds; False when it is lost."""
        with translated():
            result = self._jobs().update_one(
                queries.held(claim), queries.progress(fraction, note), hint="_id_"
            )
        return result.matched_count == 1

    def set_custom_state(self, job_id: str, state: str, meta: Any) -> bool:
        """Note a state of the app's own on a running job (field ``custom``); the attempt's end clears it."""
        with translated():
            query = {"_id": job_id, "state": queries.RUNNING}
            result = self._jobs().update_one(query, queries.custom_state(state, meta))
        return result.matched_count == 1

    def next_due_in(self, queues: Collection[str]) -> float | None:
        """Seconds until the earliest queued job of ``queues`` is due (0: one is); None when there is none."""
        names = list(queues)
        waits = []
        for start in range(0, len(names), _QUEUES_PER_SCAN):
            query = queries.waiting(names[start : start + _QUEUES_PER_SCAN])
            with translated():
                found = self._jobs().find_one(query, queries.WAIT_FIELDS, sort=[("run_at", 1)])
            if found is not None and isinstance(found.get("wait_ms"), (int, float)):
                waits.append(max(0.0, found["wait_ms"] / 1000))
        return min(waits, default=None)


def _unstorable(settlement: Settlement, problem: StoreError) -> Verdict:
    return Verdict(settlement.claim, False, f"the outcome cannot be stored: {problem}", unstorable=True)


def _verdict(settlement: Settlement, document: Document | None) -> Verdict:
    if shows_end(document, settlement):
        return Verdict(settlement.claim, True)
    return Verdict(settlement.claim, False, why_lost(document, settlement.claim))


def _name(document: Document) -> str:
    """A job's id as text: one that was inserted by hand may be anything, an object too."""
    return str(document["_id"])


def _reaped(document: Document, state: str, more: Mapping[str, Any] = MappingProxyType({})) -> Reaped:
    lease, message, attempts, fence = (document.get(name) for name in ("lease", "message", "attempts", "fence"))
    return Reaped(
        id=_name(document),
        type=str(document.get("type")),
        queue=str(document.get("queue")),
        fence=fence if isinstance(fence, int) else 0,
        attempt=attempts if isinstance(attempts, int) else 0,
        state=JobState(state),
        owner=str(lease.get("owner")) if isinstance(lease, Mapping) else "",
        message=message if isinstance(message, Mapping) else None,
        **more,
    )
