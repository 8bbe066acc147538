"""What the engine asks of a store: the whole border between use cases and MongoDB.

The engine is written against these protocols; :mod:`relata_celery.store` fulfils them. Every
method takes and returns batches, may be called from any thread, has a deadline of its own
(seconds, never for ever), and raises :class:`~relata_celery.domain.errors.StoreUnavailable` when
the server cannot be reached and :class:`~relata_celery.domain.errors.StoreError` otherwise.
After ``StoreUnavailable`` it is unknown whether a write happened; each method says what calling it
again does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from relata_celery.domain.errors import RelataError
from relata_celery.domain.job import Claim, ClaimedJob, ClaimedJobs, NewJob
from relata_celery.domain.outcome import ErrorInfo, Loss, Reaped, Settlement, Verdict

#: For due jobs, by the queue of each and in their order: which may be claimed now.
Admit = Callable[[Sequence[str]], Sequence[bool]]

#: For a job that is about to be failed: what that calls for; None when only another worker can say it, to whom
#: the job is then left. Must not raise.
CalledFor = Callable[[Reaped], Sequence[Mapping[str, Any]] | None]


class AfterFailure(Protocol):
    """What the failure of a job calls for that neither its code nor its request can say any more.

    Both read the stored message and may raise when it is none; neither needs the job's type to be known.
    """

    def followups(self, message: Mapping[str, Any], queue: str, error: ErrorInfo) -> Sequence[Mapping[str, Any]]:
        """The errbacks to publish and the failure of the steps that waited. Publishes and calls nothing."""

    def tell(self, message: Mapping[str, Any], error: ErrorInfo) -> None:
        """Call those errbacks that Celery calls where the failure is noticed. For a failure on record."""


class JobQueue(Protocol):
    """The leased queue."""

    def enqueue(self, jobs: Sequence[NewJob]) -> list[bool]:
        """Insert jobs as ``queued``; for each, say whether it was inserted (True) or its id existed."""

    def claim(
        self,
        queues: Collection[str],
        limit: int,
        owner: str,
        lease_s: float,
        admit: Admit | None = None,
        paused_types: Collection[str] = (),
    ) -> ClaimedJobs:
        """Lease up to ``limit`` due jobs of ``queues`` to ``owner``, highest priority and oldest first.

        Of those found due only the ones that ``admit`` lets in are leased, and none of ``paused_types``; the
        others stay queued.
        """

    def claim_by_id(
        self, job_id: str, queues: Collection[str], owner: str, lease_s: float, paused_types: Collection[str] = ()
    ) -> ClaimedJob | None:
        """Lease this one job if it is queued in one of ``queues``, due, and of no paused type."""

    def unheard(self) -> list[ClaimedJob]:
        """Jobs that a claim from here was granted although its answer was lost; each is told once."""

    def renew(self, claims: Sequence[Claim], lease_s: float) -> list[Loss]:
        """Push the end of these leases to the server's now plus ``lease_s``; return the lost ones."""

    def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End attempts, each only if its claim holds; one verdict per settlement, in order.

        Of one that cannot be stored for what it holds, or that MongoDB refuses, the verdict says so.
        """

    def reap(
        self, limit: int, retention_s: float | None, called_for: CalledFor | None = None
    ) -> list[Reaped]:
        """Move jobs whose lease ran out back to ``queued``, or to ``failed`` when no attempt is left.

        ``called_for`` is asked before the write, and its answer written with the failure.
        """

    def publish(self, jobs: Sequence[NewJob]) -> list[bool | RelataError]:
        """Insert each job that can be (idempotent); for each, as :meth:`enqueue`, or why it was refused."""

    def clear_followups(self, ids: Sequence[str]) -> None:
        """These jobs' follow-ups are published."""

    def stuck_followups(self, limit: int) -> list[tuple[str, tuple[Mapping[str, Any], ...]]]:
        """Settled jobs whose follow-ups were not published within ten seconds of their end.

        A follow-up that was edited by hand may be anything.
        """

    def record_progress(self, claim: Claim, fraction: float | None, note: str | None) -> bool:
        """Write a running job's progress if the claim holds; False when it is lost."""

    def next_due_in(self, queues: Collection[str]) -> float | None:
        """Seconds until the earliest queued job of ``queues`` is due; None when there is none."""
