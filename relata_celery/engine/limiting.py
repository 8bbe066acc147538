"""Limits at work: admission of jobs at claim, and waiting for a slot inside a job.

*Admission* (:class:`Gate`). A worker that finds due jobs of a limited queue takes slots of the limit before
it claims them, and claims no more than it got. Who is refused stays queued: no worker slot waits, no attempt
is spent, other queues go on. The worker holds the slots under its own name, renews them in the round in which
it renews its jobs' leases, and gives each back when its job has ended, in the same update that asks for the
next. While a limit refuses, its queues are left out of the claims until a slot of this worker is freed, the
rate allows the next, or ``poll_interval`` has passed. So MongoDB is asked:

- by a worker that consumes no limited queue, or finds no due job in it: nothing more than without limits;
- for a batch of admitted jobs: one update more, between finding and leasing them (find, *ask*, lease, settle),
  and one when the last of them has ended and no other follows;
- while a backlog is refused: once per ``poll_interval`` find, *ask* (which changes nothing), and the find of
  the other queues;
- per heartbeat while slots are held: one update for all slots of a limit.

A slot is kept as long as the job's code may run: until the job has ended *and* the pool has said so. The slot
of an attempt that was taken away while its code goes on (lease lost, killed, drained) is renewed no more: it
comes back when the pool reports, at the latest when its lease runs out. So does every slot of a worker that
died. Those who wait inside a job (:func:`wait_for_slot`) go first: they hold a worker slot meanwhile.

Failure behaviour. While MongoDB is away nothing is admitted, as nothing is claimed. A limit that MongoDB
refuses to update (a document damaged by hand) closes its own queues and no others.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from relata_celery.domain.errors import LimitTimeout, StoreError, StoreUnavailable
from relata_celery.domain.limits import Answer, LimitSpec, pause_s

from .held import Held, HeldJob

logger = logging.getLogger("relata_celery")

#: A waiter that has not asked for this long is taken for dead, and no longer waited for.
PATIENCE_S = 5.0


class LimitStore(Protocol):
    """The limits of a database. Every method may be called again after StoreUnavailable."""

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
        patience_s: float = PATIENCE_S,
    ) -> Answer:
        """Free ``give_back``, then take as many of the slots ``want`` as are free."""

    def give_back(self, name: str, ids: Sequence[str], unused: int = 0) -> None:
        """Free these slots, forget these waiters."""

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
        """Push the end of these slots' leases on; return those that had been lost, and were taken again."""


@dataclass(frozen=True)
class Limited:
    """What a worker's limits are: the limit that each limited queue runs under, and what each allows here."""

    store: LimitStore
    queues: Mapping[str, str]
    specs: Mapping[str, LimitSpec]


def new_slot_id() -> str:
    return secrets.token_hex(8)


# ---------------------------------------------------------------- admission


class _Own:
    """This worker's slots of one limit. ``spare`` ones were granted and have no job yet."""

    def __init__(self) -> None:
        self.jobs: dict[str, HeldJob] = {}
        self.spare: list[str] = []
        self.leaving: list[str] = []
        self.unused = 0
        self.renewed_at: dict[str, float] = {}
        self.closed_until = 0.0
        self.waits_for_slot = False
        # Orders renewals and returns: a renewal sent before a return must not arrive after it.
        self.writing = threading.Lock()


class Gate:
    """Admits jobs of limited queues. ``begin`` to ``flush`` are the claimer's; the rest is safe from any thread."""

    def __init__(
        self, limited: Limited, held: Held, *, owner: str, lease_s: float, poll_s: float, random: Callable[[], float]
    ) -> None:
        self._store = limited.store
        self._limit_of = limited.queues
        self._specs = limited.specs
        self._held = held
        self._owner = owner
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._random = random
        self._lock = threading.Lock()
        self._own = {limit: _Own() for limit in limited.queues.values()}

    @property
    def holding(self) -> bool:
        """Whether any slot is held: then the end of a job matters to the limit."""
        return any(own.jobs or own.leaving for own in self._own.values())

    # -- a round of the claimer -----------------------------------------------------------------

    def begin(self) -> None:
        """Find out whose jobs have ended: their slots leave with the next ask, and can be asked for again."""
        now = monotonic()
        with self._lock:
            for own in self._own.values():
                own.leaving += own.spare  # of a claim that failed half-way
                own.unused += len(own.spare)
                own.spare = []
                for slot_id, held in list(own.jobs.items()):
                    if held in self._held:
                        continue
                    lapsed = now - own.renewed_at[slot_id] > self._lease_s
                    if held.started_at is None or held.ended or lapsed:
                        own.leaving.append(slot_id)
                        del own.jobs[slot_id], own.renewed_at[slot_id]
                if own.leaving and own.waits_for_slot:
                    own.closed_until = 0.0

    def open(self, queues: Iterable[str]) -> tuple[str, ...]:
        """Those of the queues that may be claimed from now."""
        now = monotonic()
        return tuple(
            queue
            for queue in queues
            if queue not in self._limit_of or self._own[self._limit_of[queue]].closed_until <= now
        )

    def opens_in(self, queues: Iterable[str]) -> float | None:
        """Seconds until the first closed one of the queues opens; None when none is closed."""
        now = monotonic()
        waits = [self._own[self._limit_of[queue]].closed_until - now for queue in queues if queue in self._limit_of]
        return min((wait_s for wait_s in waits if wait_s > 0), default=None)

    def guards(self, queues: Collection[str]) -> bool:
        return any(queue in self._limit_of for queue in queues)

    def admit(self, queues: Sequence[str]) -> list[bool]:
        """For due jobs, by the queue of each and in their order: which may be claimed now.

        Raises StoreUnavailable; slots granted meanwhile are given back by the next round.
        """
        places: dict[str, list[int]] = defaultdict(list)
        for place, queue in enumerate(queues):
            if queue in self._limit_of:
                places[self._limit_of[queue]].append(place)
        admitted = [True] * len(queues)
        for limit, wanting in places.items():
            granted = self._take(limit, len(wanting))
            for place in wanting[granted:]:
                admitted[place] = False
        return admitted

    def _take(self, limit: str, number: int) -> int:
        own, now = self._own[limit], monotonic()
        want = [new_slot_id() for _ in range(number)]
        try:
            with own.writing:
                leaving, unused = tuple(own.leaving), own.unused
                answer = self._store.ask(
                    limit,
                    self._specs[limit],
                    want=want,
                    owner=self._owner,
                    lease_s=self._lease_s,
                    give_back=leaving,
                    unused=unused,
                )
                self._left(own, leaving, unused)
        except StoreUnavailable:
            with self._lock:
                own.leaving += want  # it may have been granted
            raise
        except StoreError as exc:
            logger.error("limit %s cannot be asked, its queues wait: %s", limit, exc)
            own.closed_until = now + self._pause_s()
            return 0
        with self._lock:
            own.spare += answer.granted
            own.renewed_at |= dict.fromkeys(answer.granted, now)
        if len(answer.granted) < number:
            own.waits_for_slot = answer.wait_s is None
            wait_s = self._pause_s() if answer.wait_s is None else min(answer.wait_s + 0.002, self._pause_s())
            own.closed_until = monotonic() + wait_s
        return len(answer.granted)

    def assign(self, held: HeldJob) -> None:
        """A job was claimed: it has one of the slots granted for its queue."""
        limit = self._limit_of.get(held.job.queue)
        if limit is None:
            return
        own = self._own[limit]
        with self._lock:
            if own.spare:
                own.jobs[own.spare.pop()] = held
                held.limits = (limit,)
                return
        logger.warning("job %s came without a slot of limit %s: its queue was changed", held.claim.id, limit)

    def flush(self) -> None:
        """Give back what no job needs: slots of ended jobs, and those granted for jobs that others got."""
        self.begin()
        for limit, own in self._own.items():
            with own.writing:
                leaving, unused = tuple(own.leaving), own.unused
                if not leaving:
                    continue
                try:
                    self._store.give_back(limit, leaving, unused)
                except StoreUnavailable:
                    raise
                except StoreError as exc:
                    logger.error("limit %s: %d slots come back when their leases run out: %s", limit, len(leaving), exc)
                self._left(own, leaving, unused)

    def _left(self, own: _Own, leaving: Sequence[str], unused: int) -> None:
        with self._lock:
            own.leaving = [slot_id for slot_id in own.leaving if slot_id not in leaving]
            own.unused -= unused
            for slot_id in leaving:
                own.renewed_at.pop(slot_id, None)

    def _pause_s(self) -> float:
        return self._poll_s * (0.9 + 0.2 * self._random())

    # -- between rounds -------------------------------------------------------------------------

    def renew(self) -> None:
        """Keep the slots of jobs that are held."""
        for limit, own in self._own.items():
            with own.writing:
                with self._lock:
                    ids = [slot_id for slot_id, held in own.jobs.items() if held in self._held]
                if not ids:
                    continue
                sent_at = monotonic()
                try:
                    lost = self._store.renew(limit, ids, owner=self._owner, lease_s=self._lease_s)
                except StoreError as exc:
                    logger.warning("limit %s: renewal of %d slots failed: %s", limit, len(ids), exc)
                    continue
                with self._lock:
                    own.renewed_at |= {slot_id: sent_at for slot_id in ids if slot_id in own.jobs}
            if lost:
                logger.warning("limit %s: %d slots had run out and were taken again", limit, len(lost))

    def close(self) -> None:
        """The worker ends: give everything back. What cannot be returned comes back with its lease."""
        with self._lock:
            for own in self._own.values():
                own.leaving += own.jobs
                own.jobs = {}
        try:
            self.flush()
        except StoreError as exc:
            logger.warning("slots of limits come back when their leases run out: %s", exc)


# ---------------------------------------------------------------- waiting inside a job


def wait_for_slot(
    store: LimitStore,
    name: str,
    spec: LimitSpec,
    *,
    slot_id: str,
    owner: str,
    job_id: str | None,
    weight: int,
    lease_s: float,
    timeout_s: float | None,
    check: Callable[[], None],
    sleep: Callable[[float], None],
    random: Callable[[], float],
) -> Answer:
    """Return when the slot is held; who came earlier goes first.

    ``check`` is called before every try and may raise (lease lost, cancelled, time up). Raises LimitTimeout
    after ``timeout_s`` (None: never; 0: after one try). Whatever is raised, nothing stays behind. While
    MongoDB is away the waiting goes on; StoreUnavailable is raised when it is so at the end.
    """
    began, tries = monotonic(), 0
    try:
        while True:
            check()
            refusal: Answer | StoreUnavailable
            try:
                refusal = store.ask(
                    name,
                    spec,
                    want=[slot_id],
                    owner=owner,
                    job_id=job_id,
                    weight=weight,
                    lease_s=lease_s,
                    waiter=slot_id,
                    patience_s=PATIENCE_S,
                )
                if refusal.granted:
                    return refusal
                pause = pause_s(tries, refusal, random())
            except StoreUnavailable as exc:
                refusal, pause = exc, 0.5 + random() / 2
            tries += 1
            if timeout_s is not None:
                left_s = began + timeout_s - monotonic()
                if left_s <= 0:
                    raise _gave_up(name, timeout_s, refusal)
                pause = min(pause, left_s)
            sleep(pause)
    except BaseException:
        _forget(store, name, slot_id)
        raise


def _gave_up(name: str, timeout_s: float, refusal: Answer | StoreUnavailable) -> Exception:
    if isinstance(refusal, StoreUnavailable):
        return refusal
    limit = refusal.limit
    allowed = "any number" if limit.concurrency is None else limit.concurrency
    lacking = "slot" if refusal.wait_s is None else f"permit of its rate ({limit.rate})"
    return LimitTimeout(
        f"no {lacking} of limit {name!r} within {timeout_s:g} s: "
        f"{limit.in_use} slots of {allowed} in use, {refusal.ahead} waiting before this one"
    )


def _forget(store: LimitStore, name: str, slot_id: str) -> None:
    try:
        store.give_back(name, [slot_id])
    except StoreError as exc:
        logger.warning("a place in the queue of limit %s lapses by itself: %s", name, exc)
