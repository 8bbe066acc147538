"""The jobs of an app, for programs: look, cancel, retry, pause, count."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from . import bootstrap
from .domain.job import ErrorClass, Job, JobState
from .domain.pauses import Paused
from .store.by_hand import Change
from .store.jobs import Jobs
from .store.limits import Limits
from .store.pauses import Pauses
from .store.stats import QueueDepth, Stats


@dataclass(frozen=True)
class StoreStats:
    """Counts of one moment. ``expired_leases`` wait for a reaper, ``pending_followups`` to be published."""

    by_state: Mapping[JobState, int]
    queues: tuple[QueueDepth, ...]
    expired_leases: int
    pending_followups: int
    paused: Paused


class JobStore:
    """Reads and steers jobs. Safe to share between threads; opens MongoDB at first use."""

    def __init__(self, jobs: Jobs, retention_failed_s: float | None) -> None:
        self.jobs = jobs
        self._retention_failed_s = retention_failed_s
        self._pauses = Pauses(jobs.database)
        #: The limits of the fleet: ``list``, ``get``, ``set`` and ``reset``.
        self.limits = Limits(jobs.database)

    @classmethod
    def from_app(cls, app: Any) -> JobStore:
        """The store behind a Celery app whose broker is ``relata+mongodb://``.

        Raises :class:`~relata_celery.domain.errors.ConfigurationError` for another broker.
        """
        return cls(bootstrap.stores_of(app).jobs, bootstrap.settings_of(app).retention_failed)

    def get(self, job_id: str) -> Job | None:
        """The job with this id; None when there is none."""
        return self.jobs.get(job_id)

    def find(
        self,
        *,
        state: JobState | str | Collection[JobState | str] = (),
        type: str | Collection[str] = (),
        queue: str | Collection[str] = (),
        error_class: ErrorClass | str | None = None,
        item_id: str | None = None,
        tag: str | None = None,
        text: str | None = None,
        created_since: datetime | None = None,
        created_until: datetime | None = None,
        sort: str = "-created_at",
        skip: int = 0,
        limit: int = 100,
    ) -> list[Job]:
        """The jobs of which all this is true, newest first; what is left out does not restrict.

        Raises ValueError for a state or class that does not exist.
        """
        return self.jobs.find(
            states=tuple(JobState(value) for value in _several(state)),
            types=_several(type),
            queues=_several(queue),
            error_class=None if error_class is None else ErrorClass(error_class),
            item_id=item_id,
            tag=tag,
            text=text,
            created_since=created_since,
            created_until=created_until,
            sort=sort,
            skip=skip,
            limit=limit,
        )

    def cancel(self, job_id: str | Sequence[str]) -> dict[str, Change]:
        """Cancel queued and running jobs for good; a running one is told within a heartbeat.

        One :class:`Change` per id, also for ids that do not exist or had ended.
        """
        return self.jobs.cancel(_several(job_id), self._retention_failed_s)

    def retry(self, job_id: str | Sequence[str]) -> dict[str, Change]:
        """Queue failed or cancelled jobs again, due now, with all their attempts; history is kept."""
        return self.jobs.retry(_several(job_id))

    def stats(self) -> StoreStats:
        """What stands in the database now: jobs by state, and each queue that has queued or running jobs."""
        stats = Stats(self.jobs.database)
        totals = stats.totals()
        return StoreStats(
            totals.by_state, tuple(stats.depths()), totals.expired_leases, totals.pending_followups, self.paused()
        )

    def pause_queue(self, name: str | Sequence[str]) -> dict[str, bool]:
        """Have no worker begin a job of these queues, from a second from now until they are resumed.

        What runs goes on, what is published waits. Durable: workers that start later obey too. Says of each
        queue whether that is new; any name may be paused, whether there are jobs or not. Raises ValueError.
        """
        return self._pauses.pause("queues", _several(name))

    def resume_queue(self, name: str | Sequence[str]) -> dict[str, bool]:
        """End the pause of these queues; says of each whether it was paused."""
        return self._pauses.resume("queues", _several(name))

    def pause_type(self, name: str | Sequence[str]) -> dict[str, bool]:
        """Have no worker begin a job of these types, as :meth:`pause_queue`.

        Their waiting jobs are put aside (some thousand a second), so that other types' jobs behind them come first.
        """
        return self._pauses.pause("types", _several(name))

    def resume_type(self, name: str | Sequence[str]) -> dict[str, bool]:
        """End the pause of these types; says of each whether it was paused. Waiting jobs have kept their order."""
        return self._pauses.resume("types", _several(name))

    def paused(self) -> Paused:
        """The queues and types that are paused, each with the moment since when."""
        return self._pauses.paused()


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value)
