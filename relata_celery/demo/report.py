"""What came of the jobs, measured: states, retries, recovered, lost, doubled.

Nothing here asks the queue for its opinion of itself. The plan says which jobs had to be, the
journal says what handlers published and began, and the job documents are held against both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from relata_celery.demo.plan import STEPS, Planned, step_of
from relata_celery.domain.job import AttemptOutcome, Job, JobState

#: Outcomes that end a job; a job whose history shows two of them was accepted twice.
FINAL = (AttemptOutcome.SUCCEEDED, AttemptOutcome.FAILED, AttemptOutcome.CANCELLED)
CRASHED = (AttemptOutcome.LEASE_EXPIRED, AttemptOutcome.WORKER_LOST)


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that ended as failed, and why."""

    id: str
    error_class: str
    error: str


@dataclass(frozen=True, slots=True)
class DocumentResult:
    """What was extracted from one document; ``analysed`` counts its pieces with an analysis."""

    name: str
    format: str
    title: str
    words: int
    chunks: int
    analysed: int
    language: str
    keywords: tuple[str, ...]
    summary: str
    nearest: str | None = None
    similarity: float | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """The queue's side of the report. ``ran_again`` lists jobs begun more often than once, ``repeated`` counts
    the attempts beyond a job's first: after an error, or because the kill cut one off."""

    total: int
    by_state: Mapping[str, int]
    by_step: Mapping[str, Mapping[str, int]]
    attempts: int
    retries: Mapping[str, int]
    snoozed: int
    interrupted: Sequence[str]
    recovered: Sequence[str]
    lost: Sequence[str]
    doubled: Sequence[str]
    ran_again: Sequence[str]
    failures: Sequence[Failure]
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. ``ok`` is what the exit status says: nothing lost or doubled, and in time."""

    database: str
    seconds: float
    crashed: bool
    timed_out: bool
    counts: Counts
    documents: Sequence[DocumentResult]
    skipped: Sequence[str] = ()
    endpoint: str = ""
    endpoint_met: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not (self.counts.lost or self.counts.doubled or self.timed_out)

    def to_json(self) -> dict[str, Any]:
        """As plain values; the lists that matter come with their length under ``*_count``."""
        plain = asdict(self)
        counts = plain.pop("counts")
        for name in ("interrupted", "recovered", "lost", "doubled", "ran_again"):
            counts[f"{name}_count"] = len(counts[name])
        return {"ok": self.ok, **counts, **plain}


def count(
    planned: Sequence[Planned],
    jobs: Mapping[str, Job],
    noted: Iterable[str] = (),
    interrupted: Iterable[str] = (),
    begun: Mapping[str, int] | None = None,
) -> Counts:
    """Hold the job documents against the plan and the journal.

    ``noted`` are the ids in the journal, ``interrupted`` those that were running when the worker
    was killed, ``begun`` how often each was begun.
    """
    stopped_by_crash = set(interrupted)
    history = [attempt for job in jobs.values() for attempt in job.history]
    by_step: dict[str, Counter[str]] = {step: Counter() for step in STEPS}
    for job in jobs.values():
        by_step.setdefault(step_of(job.id), Counter())[str(job.state)] += 1
    return Counts(
        total=len(jobs),
        by_state=dict(Counter(str(job.state) for job in jobs.values())),
        by_step={step: dict(states) for step, states in by_step.items()},
        attempts=sum(job.attempts for job in jobs.values()),
        repeated=sum(max(job.attempts - 1, 0) for job in jobs.values()),
        retries=dict(
            Counter(
                str(attempt.error_class or "transient")
                for attempt in history
                if attempt.outcome is AttemptOutcome.RETRIED
            )
        ),
        snoozed=sum(job.snoozes for job in jobs.values()),
        interrupted=sorted(stopped_by_crash),
        recovered=sorted(id for id in stopped_by_crash if id in jobs and recovered(jobs[id])),
        lost=lost(planned, jobs, noted),
        doubled=sorted(job.id for job in jobs.values() if doubled(job)),
        ran_again=sorted(id for id, times in (begun or {}).items() if times > 1),
        failures=[
            Failure(job.id, str(job.error_class or ""), job.error or "")
            for job in sorted(jobs.values(), key=lambda job: job.id)
            if job.state is JobState.FAILED
        ],
    )


def lost(planned: Sequence[Planned], jobs: Mapping[str, Job], noted: Iterable[str] = ()) -> list[str]:
    """Jobs that had to come to an end and did not.

    A planned job had to if the one before it succeeded; one that a handler says it published or
    began had to in any case. Missing and unfinished are the same loss.
    """
    required = set(noted)
    for job in planned:
        before = jobs.get(job.after) if job.after else None
        if job.after is None or (before is not None and before.state is JobState.SUCCEEDED):
            required.add(job.id)
    return sorted(id for id in required if id not in jobs or not jobs[id].state.terminal)


def doubled(job: Job) -> bool:
    """Whether more than one end was accepted for the job."""
    return sum(attempt.outcome in FINAL for attempt in job.history) > 1


def recovered(job: Job) -> bool:
    """Whether a job that was running at the crash was taken up again and came to an end."""
    if not job.state.terminal:
        return False
    outcomes = [attempt.outcome for attempt in job.history]
    crashed_at = next((at for at, outcome in enumerate(outcomes) if outcome in CRASHED), None)
    return crashed_at is not None and any(outcome in FINAL for outcome in outcomes[crashed_at + 1 :])
