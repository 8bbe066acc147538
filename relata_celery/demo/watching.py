"""The state of the run's jobs, read from the queue again and again."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from relata_celery.demo.journal import Journal
from relata_celery.demo.plan import Plan, step_of
from relata_celery.demo.report import lost
from relata_celery.domain.errors import JobNotFound
from relata_celery.domain.job import Job, JobState


class Jobs(Protocol):
    """What is asked of the job store: one job by its id."""

    def get(self, job_id: str, /) -> Job | None:
        """The job; None or JobNotFound when there is none."""


class Watcher:
    """Keeps the last seen document of each job. Ended jobs are not read again until the final look."""

    def __init__(self, store: Jobs, plan: Plan, journal: Journal) -> None:
        self._store = store
        self._planned = plan.jobs()
        self._journal = journal
        self.jobs: dict[str, Job] = {}

    def look(self, everything: bool = False) -> None:
        """Read what may have changed, or all that was planned or noted in the journal."""
        self._journal.read()
        ids = self._journal.ids()
        if everything:
            ids |= {planned.id for planned in self._planned} | set(self.jobs)
        ids.update(self.unfinished())
        for id in sorted(ids):
            known = self.jobs.get(id)
            if known is not None and known.state.terminal and not everything:
                continue
            job = self._get(id)
            if job is not None:
                self.jobs[id] = job
            elif everything:
                self.jobs.pop(id, None)

    def _get(self, id: str) -> Job | None:
        try:
            return self._store.get(id)
        except JobNotFound:
            return None

    def unfinished(self) -> list[str]:
        """Jobs that have to come to an end and have not, as far as is known."""
        return lost(self._planned, self.jobs, self._journal.ids())

    def finished(self) -> int:
        return sum(job.state.terminal for job in self.jobs.values())

    def running(self) -> list[str]:
        """Jobs that somebody holds a lease on."""
        return sorted(job.id for job in self.jobs.values() if job.state is JobState.RUNNING)

    def done_by_step(self) -> dict[str, int]:
        return dict(Counter(step_of(job.id) for job in self.jobs.values() if job.state.terminal))

    def note(self) -> str:
        """What has gone wrong so far and what says how far it is, in a few words."""
        attempts = Counter(str(a.outcome) for job in self.jobs.values() for a in job.history)
        parts = [
            f"{name.replace('_', ' ')} {attempts[name]}"
            for name in ("retried", "snoozed", "failed", "lease_expired", "worker_lost")
            if attempts[name]
        ]
        for job in self.jobs.values():
            if job.state is JobState.RUNNING and job.progress is not None and job.progress.note:
                parts.append(f"{job.id}: {job.progress.note}")
                break
        return ", ".join(parts)
