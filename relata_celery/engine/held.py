"""What this worker holds: every claim between its grant and the verdict on its settlement.

A held job is *reserved* (claimed, not begun), *running*, or *settling* (its outcome is known, the
write is under way). Only reserved and running ones take a slot; all of them are renewed, so an
outcome that waits for MongoDB to come back keeps its lease meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from time import monotonic
from typing import Any, Protocol

from relata_celery.domain.job import Claim, ClaimedJob
from relata_celery.domain.outcome import ErrorInfo


class StopReason(str, Enum):
    """Why an attempt is told to stop before its handler returned."""

    LEASE_LOST = "lease_lost"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    SOFT_TIMEOUT = "soft_timeout"
    DRAINED = "drained"


class AttemptControl(Protocol):
    """The seam's hold on the place where the attempt runs (a pool process, a thread)."""

    def interrupt(self, reason: StopReason) -> None:
        """Raise in the handler, or have its next ``check()`` raise. Never blocks."""

    def kill(self) -> None:
        """End the attempt by force where the pool can (a process); otherwise do nothing."""

    def failure_followups(self, error: ErrorInfo) -> tuple[Mapping[str, Any], ...]:
        """What is to be published if the job fails for good while its code cannot say so."""

    def patience(self) -> float:
        """How many leases the attempt may stay reserved before it counts as forgotten."""

    def lease_extended(self, lease_deadline: float) -> None:
        """Tell the attempt the monotonic time until which its lease now holds."""


class _Nobody:
    """In place of a control that is not there: nothing runs, so there is nobody to be told."""

    def interrupt(self, reason: StopReason) -> None:
        pass

    def kill(self) -> None:
        pass

    def failure_followups(self, error: ErrorInfo) -> tuple[Mapping[str, Any], ...]:
        return ()

    def patience(self) -> float:
        return 1

    def lease_extended(self, lease_deadline: float) -> None:
        pass


_NOBODY: AttemptControl = _Nobody()


def _no_control() -> AttemptControl | None:
    return None


class Phase(Enum):
    RESERVED = 1
    RUNNING = 2
    SETTLING = 3


class HeldJob:
    """One held claim. Changed under :class:`Held`'s lock only, but for its seam's own fields."""

    __slots__ = (
        "_control",
        "adopted",
        "ended",
        "hard_deadline",
        "interrupted",
        "job",
        "lease_deadline",
        "limits",
        "lingers",
        "max_attempts",
        "phase",
        "reserved_at",
        "retry_on_timeout",
        "soft_deadline",
        "started_at",
    )

    def __init__(self, job: ClaimedJob, lease_deadline: float) -> None:
        self.job = job
        self.phase = Phase.RESERVED
        self.reserved_at = monotonic()
        self.lease_deadline = lease_deadline
        #: Whether a seam took responsibility for the attempt: then its end is the engine's to write.
        self.adopted = False
        self._control: Callable[[], AttemptControl | None] = _no_control
        self.started_at: float | None = None
        self.soft_deadline: tuple[float, StopReason] | None = None
        self.hard_deadline: float | None = None
        self.interrupted: StopReason | None = None
        #: Set when the pool says that the attempt's code runs no more, whatever became of the claim.
        self.ended = False
        #: The claim's end is decided, but its code still runs and takes the slot.
        self.lingers = False
        #: The limits of which the job was given a slot when it was claimed.
        self.limits: tuple[str, ...] = ()
        self.retry_on_timeout = False
        self.max_attempts = job.max_attempts

    @property
    def claim(self) -> Claim:
        return self.job.claim

    @property
    def control(self) -> AttemptControl:
        """The seam's hold on the attempt, for as long as the seam itself has it; then, and before, nobody.

        A weak reference: with a strong one each job would be a cycle, left to the garbage collector.
        """
        return self._control() or _NOBODY

    def adopt(self, control: AttemptControl) -> None:
        """Let this control be told about the attempt. It is the caller's to keep."""
        self.adopted, self._control = True, weakref.ref(control)


class Held:
    """The set of held jobs, keyed by job id. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, HeldJob] = {}
        self._occupying = 0

    def add(self, held: HeldJob) -> HeldJob | None:
        """Hold a new claim; return the one of the same job that it supersedes, if any."""
        with self._lock:
            before = self._jobs.get(held.claim.id)
            self._jobs[held.claim.id] = held
            self._occupying += 1
            if before is not None and before.phase is not Phase.SETTLING:
                self._leave(before)
            return before

    def begin(self, held: HeldJob, started_at: float) -> None:
        with self._lock:
            if held.phase is Phase.RESERVED:
                held.phase = Phase.RUNNING
                held.started_at = started_at

    def begin_settling(self, held: HeldJob, *, only: Phase | None = None) -> bool:
        """Enter the one-way phase in which the outcome is written.

        False if another got there first, or the job is not in the phase that the caller relies on.
        """
        with self._lock:
            if held.phase is Phase.SETTLING or only not in (None, held.phase):
                return False
            self._leave(held)
            return True

    def end(self, held: HeldJob) -> None:
        """The pool is done with this attempt's code: its slot is free, whatever became of the claim."""
        with self._lock:
            held.ended = True
            if held.lingers:
                held.lingers = False
                self._occupying -= 1

    def _leave(self, held: HeldJob) -> None:
        held.phase = Phase.SETTLING
        if held.started_at is not None and not held.ended:
            held.lingers = True
        else:
            self._occupying -= 1

    def remove(self, held: HeldJob) -> None:
        with self._lock:
            if self._jobs.get(held.claim.id) is held:
                del self._jobs[held.claim.id]
            if held.phase is not Phase.SETTLING:
                self._leave(held)

    def __contains__(self, held: HeldJob) -> bool:
        return self._jobs.get(held.claim.id) is held

    def snapshot(self, only: Callable[[HeldJob], bool] | None = None) -> list[HeldJob]:
        with self._lock:
            jobs = list(self._jobs.values())
        return jobs if only is None else [held for held in jobs if only(held)]

    @property
    def occupying(self) -> int:
        """How many held jobs take a slot, or wait for one, in this worker."""
        return self._occupying

    def __len__(self) -> int:
        return len(self._jobs)
