"""Brings back what nobody holds any more: leases that ran out, follow-ups that stuck.

Runs in every worker, as a thread and not as a job (a stalled-job task that stalls is a reported
defect elsewhere); the writes are conditional, so that several reapers do no harm. It needs no
registry of job types: what it does not know it must not discard. What a job's failure calls for is read
from its stored message and written with the failure, so it is published once, whoever reaped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relata_celery.domain.errors import JobError, MissingKey
from relata_celery.domain.events import Event, JobReaped
from relata_celery.domain.job import ErrorClass, JobState
from relata_celery.domain.outcome import ErrorInfo, Reaped

from .background import Background
from .following import Publisher
from .ports import JobQueue

logger = logging.getLogger("relata_celery")

#: Jobs per round trip; a round goes on until nothing is left.
BATCH = 100

#: What is told of a job whose lease ran out at its last attempt.
LEASE_EXPIRED = ErrorInfo(ErrorClass.TRANSIENT, "lease expired", JobError.__name__, JobError.__module__)


class Reaper(Background):
    name = "reaper"

    def __init__(
        self,
        queue: JobQueue,
        period_s: float,
        retention_failed_s: float | None,
        publisher: Publisher,
        on_requeued: Callable[[], None],
        emit: Callable[[Event], None],
        random: Callable[[], float],
    ) -> None:
        super().__init__(random=random)
        self._queue = queue
        self._period_s = period_s
        self._retention_failed_s = retention_failed_s
        self._publisher = publisher
        self._on_requeued = on_requeued
        self._emit = emit

    def first_wait_s(self) -> float:
        return self._random() * min(self._period_s, 2.0)

    def step(self) -> float | None:
        self._reap()
        self._publish_stuck()
        return self._period_s * (0.9 + 0.1 * self._random())

    def _reap(self) -> None:
        while not self.stopping:
            reaped = self._queue.reap(BATCH, self._retention_failed_s, self._called_for)
            self.answered()
            for job in reaped:
                self._emit(JobReaped(job.id, job.type, job.queue, job.attempt, job.state, job.owner))
            if any(job.state is JobState.QUEUED for job in reaped):
                self._on_requeued()
            self._follow([job for job in reaped if job.state is JobState.FAILED])
            if len(reaped) < BATCH:
                return

    def _called_for(self, job: Reaped) -> Sequence[Mapping[str, Any]] | None:
        try:
            return self._publisher.called_for(job.message, job.queue, LEASE_EXPIRED)
        except MissingKey as exc:
            logger.error("job %s, whose lease ran out, is left to a worker that has its key: %s", job.id, exc)
            return None

    def _follow(self, failed: Sequence[Reaped]) -> None:
        for job in failed:
            if job.dropped:
                logger.error("job %s: %d follow-ups of its failure cannot be stored: dropped", job.id, job.dropped)
            self._publisher.tell(job.message, LEASE_EXPIRED)
        self._publisher.publish([(job.id, job.followups) for job in failed if job.followups])

    def _publish_stuck(self) -> None:
        while not self.stopping:
            stuck = self._queue.stuck_followups(BATCH)
            self._publisher.publish(stuck)
            if len(stuck) < BATCH:
                return
