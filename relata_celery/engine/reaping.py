"""Brings back what nobody holds any more: leases that ran out, follow-ups that stuck.

Runs in every worker, as a thread and not as a job (a stalled-job task that stalls is a reported
defect elsewhere); the writes are conditional, so that several reapers do no harm. It needs no
registry of job types: what it does not know it must not discard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from relata_celery.domain.events import Event, JobReaped
from relata_celery.domain.job import JobState

from .background import Background
from .ports import JobQueue
from .settling import FollowupToJob, publish_followups

logger = logging.getLogger("relata_celery")

#: Jobs per round trip; a round goes on until nothing is left.
BATCH = 100


class Reaper(Background):
    name = "reaper"

    def __init__(
        self,
        queue: JobQueue,
        period_s: float,
        retention_failed_s: float | None,
        followup_to_job: FollowupToJob,
        on_requeued: Callable[[], None],
        emit: Callable[[Event], None],
        random: Callable[[], float],
    ) -> None:
        super().__init__(random=random)
        self._queue = queue
        self._period_s = period_s
        self._retention_failed_s = retention_failed_s
        self._followup_to_job = followup_to_job
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
            reaped = self._queue.reap(BATCH, self._retention_failed_s)
            for job in reaped:
                self._emit(JobReaped(job.id, job.type, job.queue, job.attempt, job.state, job.owner))
            if any(job.state is JobState.QUEUED for job in reaped):
                self._on_requeued()
            if len(reaped) < BATCH:
                return

    def _publish_stuck(self) -> None:
        while not self.stopping:
            stuck = self._queue.stuck_followups(BATCH)
            for job_id, followups in stuck:
                try:
                    publish_followups(self._queue, [(job_id, followups)], self._followup_to_job)
                except ValueError as exc:
                    logger.error("follow-ups of job %s cannot be published: %s", job_id, exc)
            if len(stuck) < BATCH:
                return
