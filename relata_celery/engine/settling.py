"""The one door: every ending of an attempt passes here, and nobody else writes one.

An outcome that a child returned, a killed process, a time-out, a cancellation, a drain: each is
handed to :meth:`Settler.settle`, which decides (:func:`relata_celery.domain.settle.decide`) and
writes in group commits. The flush starts when the previous one has returned: an idle worker
settles at once, a busy one in bulk, without a timer.

Failure behaviour. While MongoDB is away the batch is kept and tried again until the fence is found
to hold or not; the renewer goes on renewing what is being settled. In place of an outcome that cannot be
stored its job's failure is settled, through the same door; if that is too large too, without what the
failure calls for. What MongoDB refuses even then (a right was taken away) waits for its mending, behind
what it takes.
An outcome whose fence moved on is dropped: a refused verdict, one log line, no second write.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic, sleep

from relata_celery.domain.errors import StoreError
from relata_celery.domain.events import Event, JobRefused, JobSettled
from relata_celery.domain.job import AttemptOutcome, ErrorClass, JobState
from relata_celery.domain.outcome import (
    ErrorInfo,
    Failed,
    LeaseForfeited,
    Outcome,
    Released,
    Settlement,
    Verdict,
)
from relata_celery.domain.redact import clean
from relata_celery.domain.settle import decide

from .background import Background
from .following import Publisher
from .held import Held, HeldJob, Phase, StopReason
from .ports import JobQueue

logger = logging.getLogger("relata_celery")

OnVerdict = Callable[[Settlement, Verdict], None]

#: A busy worker writes its outcomes at most once in this time, in seconds. A write costs the parent
#: about 1 ms of processor time whatever it holds, and 3 to 5 ms until MongoDB has it in its journal.
GATHER_S = 0.01
#: The same while more jobs wait than it has room for: how long they waited is then a matter of its rate. An
#: update of 32 jobs costs the server twice as much processor time as one of 8.
GATHER_BACKLOG_S = 0.1
#: Before an outcome is tried again that MongoDB refused, in seconds.
REFUSED_PAUSE_S = 2.0
#: Most settlements in one write: keeps a flush's documents well below MongoDB's 48 MB message limit.
MAX_BATCH = 200


@dataclass(frozen=True)
class Retention:
    """How long ended jobs are kept, in seconds; None keeps them."""

    succeeded_s: float | None
    failed_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A settlement to be written. ``original`` is the one it stands for, if that could not be stored."""

    held: HeldJob
    settlement: Settlement
    on_verdict: OnVerdict | None
    original: Settlement | None = None
    dropped: int = 0


class Settler(Background):
    name = "settler"

    def __init__(
        self,
        queue: JobQueue,
        held: Held,
        retention: Retention,
        emit: Callable[[Event], None],
        publisher: Publisher,
        random: Callable[[], float],
        backlog: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(random=random)
        self._backlog = backlog
        self._queue = queue
        self._held = held
        self._retention = retention
        self._emit = emit
        self._publisher = publisher
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._flushed_at = 0.0
        self._idle = threading.Event()
        self._idle.set()

    def settle(self, held: HeldJob, outcome: Outcome, on_verdict: OnVerdict | None = None) -> bool:
        """Take the end of this attempt; return at once. False if it already had an end.

        ``on_verdict`` is called once, from the settling thread, when the database has answered.
        """
        if not self._held.begin_settling(held):
            return False
        if isinstance(outcome, LeaseForfeited):
            self._forfeit(held, outcome.reason)
            return True
        self._push(_Pending(held, self._decide(held, outcome), on_verdict))
        return True

    def give_back(
        self, held: HeldJob, reason: str, *, only: Phase | None = None, on_verdict: OnVerdict | None = None
    ) -> bool:
        """Put the job back, uncounted, and tell its code, if it runs or is about to, to stop.

        In this order: an attempt that was told before its end is decided reports that it gave up, and nobody
        would write that the job is free. False if it already had an end, or is in another phase than ``only``.
        """
        if not self._held.begin_settling(held, only=only):
            return False
        held.control.interrupt(StopReason.DRAINED)
        self._push(_Pending(held, self._decide(held, Released(reason)), on_verdict))
        return True

    def acknowledge(self, held: HeldJob) -> bool:
        """End a plain message or task that keeps no record: its document is removed."""
        if not self._held.begin_settling(held):
            return False
        settlement = Settlement(
            claim=held.claim,
            state=JobState.SUCCEEDED,
            recorded=AttemptOutcome.SUCCEEDED,
            attempt=held.job.attempt,
            delete=True,
        )
        self._push(_Pending(held, settlement, None))
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything handed in has its verdict; False when the time ran out first."""
        return self._idle.wait(timeout_s)

    def step(self) -> float | None:
        with self._lock:
            batch = self._pending[:MAX_BATCH]
        if not batch:
            return None
        if not any(entry.held.lingers for entry in batch):
            self._gather(len(batch))
        with self._lock:
            batch = self._pending[:MAX_BATCH]
        verdicts = self._queue.settle([entry.settlement for entry in batch])
        self.answered()
        written = [(entry, verdict) for entry, verdict in zip(batch, verdicts, strict=True) if not verdict.unstorable]
        self._conclude(written)
        unstorable = [(entry, verdict) for entry, verdict in zip(batch, verdicts, strict=True) if verdict.unstorable]
        if unstorable:
            return self._write_less(unstorable)
        return 0.0 if self._pending else None

    def _decide(self, held: HeldJob, outcome: Outcome) -> Settlement:
        job = held.job
        if job.max_attempts != held.max_attempts:
            job = replace(job, max_attempts=held.max_attempts)
        return decide(
            outcome,
            job,
            random_fraction=self._random(),
            retention_succeeded_s=self._retention.succeeded_s,
            retention_failed_s=self._retention.failed_s,
        )

    def _gather(self, waiting: int) -> None:
        """Let a busy worker's outcomes come together: their slots are free already, only the write waits.

        An outcome that comes alone, longer than that after the last, or whose slot waits for it, is written
        at once.
        """
        since_s = monotonic() - self._flushed_at
        together_s = GATHER_BACKLOG_S if self._backlog() else GATHER_S
        if waiting < MAX_BATCH and since_s < together_s and not self.stopping:
            sleep(together_s - since_s)
        self._flushed_at = monotonic()

    def _push(self, entry: _Pending) -> None:
        with self._lock:
            self._pending.append(entry)
            self._idle.clear()
        self.wake()

    def _write_less(self, unstorable: Sequence[tuple[_Pending, Verdict]]) -> float:
        """Have what cannot be stored followed by something smaller, at the end of the line; the pause before."""
        instead = {id(entry): self._less(entry, verdict) for entry, verdict in unstorable}
        with self._lock:
            others = [entry for entry in self._pending if id(entry) not in instead]
            self._pending = [*others, *instead.values()]
        kept = [verdict for entry, verdict in unstorable if instead[id(entry)].original is None]
        if not kept:
            return 0.0
        logger.error(
            "MongoDB refuses %d outcomes, trying again in %.0f s: %s", len(kept), REFUSED_PAUSE_S, kept[0].reason
        )
        return REFUSED_PAUSE_S

    def _less(self, entry: _Pending, verdict: Verdict) -> _Pending:
        """The job's failure; then that without what it calls for; then, as it cannot be the size, the original."""
        settlement = entry.settlement
        if entry.original is None:
            error = ErrorInfo(ErrorClass.PERMANENT, clean(verdict.reason or ""), "StoreError", StoreError.__module__)
            followups = entry.held.control.failure_followups(error)
            failed = Failed(error, followups, settlement.duration_ms, final=True)
            return replace(entry, settlement=self._decide(entry.held, failed), original=settlement)
        if settlement.followups:
            less = replace(settlement, followups=())
            return replace(entry, settlement=less, dropped=len(settlement.followups))
        return replace(entry, settlement=entry.original, original=None, dropped=0)

    def _conclude(self, written: Sequence[tuple[_Pending, Verdict]]) -> None:
        now = monotonic()
        self._publish([e.settlement for e, v in written if v.accepted and e.settlement.followups])
        with self._lock:
            done = {id(entry) for entry, _verdict in written}
            self._pending = [entry for entry in self._pending if id(entry) not in done]
            if not self._pending:
                self._idle.set()
        for entry, verdict in written:
            self._held.remove(entry.held)
            self._report(entry, verdict, now)
            if entry.on_verdict is not None:
                try:
                    entry.on_verdict(entry.settlement, verdict)
                except Exception:
                    logger.exception("job %s: a listener of its end failed", entry.held.claim.id)

    def _publish(self, settled: Sequence[Settlement]) -> None:
        """Publish follow-ups at once; what fails here is left in the documents, for the reaper."""
        try:
            self._publisher.publish([(s.claim.id, s.followups) for s in settled])
        except StoreError as exc:
            logger.warning("follow-ups of %d jobs are left to the reaper: %s", len(settled), exc)

    def _report(self, entry: _Pending, verdict: Verdict, now: float) -> None:
        job, settlement = entry.held.job, entry.settlement
        if not verdict.accepted:
            self._emit(JobRefused(job.claim.id, job.type, job.queue, job.attempt, verdict.reason or "lease lost"))
            return
        if entry.dropped:
            logger.error(
                "job %s: %d follow-ups of its failure cannot be stored: dropped", job.claim.id, entry.dropped
            )
        duration_ms = settlement.duration_ms
        if duration_ms is None and entry.held.started_at is not None:
            duration_ms = int((now - entry.held.started_at) * 1000)
        error = settlement.error
        self._emit(
            JobSettled(
                job_id=job.claim.id,
                type=job.type,
                queue=job.queue,
                attempt=job.attempt,
                item_id=job.item_id,
                outcome=settlement.recorded,
                state=settlement.state,
                error_class=error.error_class if error else None,
                error=error.text if error else None,
                duration_ms=duration_ms,
                worker=job.claim.owner,
            )
        )

    def _forfeit(self, held: HeldJob, reason: str) -> None:
        self._held.remove(held)
        job = held.job
        self._emit(JobRefused(job.claim.id, job.type, job.queue, job.attempt, reason))
