"""The engine of one worker: what holds, renews, settles, reaps and drains its jobs.

One instance per worker process, made in the parent after its pool was forked. Seams call it; it
calls back through what it was given (``deliver``, ``slots``, ``emit``) and the
:class:`~relata_celery.engine.held.AttemptControl` of each attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relata_celery.domain.events import Event
from relata_celery.domain.job import ClaimedJob, JobState
from relata_celery.domain.outcome import LeaseForfeited, Outcome, Released, Settlement, Verdict
from relata_celery.domain.pauses import Paused

from .claiming import Claimer
from .deadlines import Deadlines
from .draining import Drain
from .following import FollowupToJob, NothingFollows, Publisher
from .held import AttemptControl, Held, HeldJob, Phase, StopReason
from .limiting import Gate, Limited
from .pausing import PauseStore, Pausing
from .ports import AfterFailure, JobQueue
from .pulse import Pulse
from .reaping import Reaper
from .renewing import Renewer
from .settling import OnVerdict, Retention, Settler

logger = logging.getLogger("relata_celery")


@dataclass(frozen=True)
class EngineSettings:
    """Times in seconds, as validated by :mod:`relata_celery.conf`."""

    lease_s: float
    heartbeat_s: float
    poll_s: float
    claim_ahead_s: float
    reap_period_s: float
    drain_s: float
    grace_s: float
    retention: Retention


class LeaseService:
    """Starts and stops the background parts together, and is their one face to the seams."""

    def __init__(
        self,
        queue: JobQueue,
        settings: EngineSettings,
        *,
        owner: str,
        slots: Callable[[], int],
        deliver: Callable[[Sequence[HeldJob]], None],
        followup_to_job: FollowupToJob,
        after_failure: AfterFailure | None = None,
        emit: Callable[[Event], None],
        random: Callable[[], float],
        on_overrun: Callable[[], None] = lambda: None,
        limited: Limited | None = None,
        pauses: PauseStore | None = None,
    ) -> None:
        self.owner = owner
        self._drain_asked = self._stop_asked = False
        self.settings = settings
        self.held = Held()
        self.gate: Gate | None = None
        if limited is not None:
            self.gate = Gate(
                limited, self.held, owner=owner, lease_s=settings.lease_s, poll_s=settings.poll_s, random=random
            )
        publisher = Publisher(
            queue, followup_to_job, after_failure or NothingFollows(), settings.retention.failed_s
        )
        self.settler = Settler(
            queue, self.held, settings.retention, emit, publisher, random, lambda: self.claimer.backlog
        )
        self.deadlines = Deadlines(self.held, self.settler, self.lose, settings.grace_s, self._drain_if_asked, random)
        self.renewer = Renewer(
            queue,
            self.held,
            settings.lease_s,
            settings.heartbeat_s,
            self.lose,
            self.give_back,
            emit,
            random,
            self.gate,
        )
        self.claimer = Claimer(
            queue,
            self.held,
            self.settler,
            owner=owner,
            lease_s=settings.lease_s,
            poll_s=settings.poll_s,
            claim_ahead_s=settings.claim_ahead_s,
            slots=slots,
            deliver=deliver,
            on_lost=self.lose,
            random=random,
            gate=self.gate,
            paused=self.known_paused,
        )
        self.pausing: Pausing | None = None
        if pauses is not None:
            self.pausing = Pausing(pauses, lambda: self.claimer.consumed, self.claimer.hint, random)
        self.reaper = Reaper(
            queue,
            settings.reap_period_s,
            settings.retention.failed_s,
            publisher,
            self.claimer.hint,
            emit,
            random,
        )
        self.drain = Drain(self.held, self.claimer, self.settler, settings.drain_s, on_overrun)

        parts = (self.settler, self.renewer, self.deadlines, self.reaper, self.claimer, self.pausing)
        self.parts = tuple(part for part in parts if part is not None)
        self.pulse = Pulse(self.parts, random)

    def start(self) -> None:
        for part in (*self.parts, self.pulse):
            part.start()

    def stop(self, flush_s: float = 15.0) -> None:
        """Give back what is left, wait for the last writes, end the threads. May be called twice."""
        self.drain.begin()
        if not self.drain.finish(flush_s):
            logger.error("%d outcomes could not be written before the worker ended", len(self.held))
        for part in (self.pulse, *reversed(self.parts)):
            part.stop()
        if self.gate is not None:
            self.gate.close()

    def ask_to_drain(self) -> None:
        """Begin to drain soon, from a thread of the engine: all that a signal handler may do is set a flag."""
        self._drain_asked = True

    def ask_to_stop_now(self) -> None:
        """Give everything back soon, without waiting for what runs; for signal handlers, as above."""
        self._stop_asked = True

    def _drain_if_asked(self) -> None:
        if self._stop_asked:
            self.drain.now()
        elif self._drain_asked:
            self.drain.begin()

    # -- what is paused -------------------------------------------------------------------------

    def known_paused(self) -> Paused | None:
        """What is paused as far as is known; None before the first answer. Asks nobody."""
        return Paused() if self.pausing is None else self.pausing.known

    def paused(self) -> Paused:
        """What is paused; asks only while nothing is known."""
        if self.pausing is None:
            return Paused()
        return self.pausing.known or self.pausing.look()

    # -- what seams report ----------------------------------------------------------------------

    def adopt(
        self,
        held: HeldJob,
        control: AttemptControl,
        *,
        max_attempts: int | None = None,
        retry_on_timeout: bool = False,
    ) -> None:
        """Take responsibility for telling this claim's executor about its lease."""
        held.adopt(control)
        held.retry_on_timeout = retry_on_timeout
        if max_attempts is not None:
            held.max_attempts = max_attempts

    def begin(
        self,
        held: HeldJob,
        started_at: float,
        *,
        soft: tuple[float, StopReason] | None = None,
        hard_s: float | None = None,
    ) -> bool:
        """The attempt began; ``soft`` and ``hard_s`` are its limits in seconds from the start.

        False when the claim's end was decided before: then the attempt is told to stop, and killed if it goes on.
        """
        if soft is not None:
            held.soft_deadline = (started_at + soft[0], soft[1])
        if hard_s is not None:
            held.hard_deadline = started_at + hard_s
        self.held.begin(held, started_at)
        begun = held.phase is Phase.RUNNING
        if not begun:
            control = held.control
            control.interrupt(held.interrupted or StopReason.DRAINED)
            self.deadlines.doom(control)
        self.deadlines.wake_if_idle()
        return begun

    def end(
        self, held: HeldJob, outcome: Outcome, ran_s: float | None, on_verdict: OnVerdict | None = None
    ) -> bool:
        """The pool is done with the attempt, which came to this after running for ``ran_s`` seconds.

        The slot of a quick job is free now, while its outcome is on its way; that of a slow one when the
        outcome is written, so that the database never shows more running jobs than there are slots. For a lease
        that the attempt gave up itself nothing is written: its slot is free too.
        False if the attempt's end was decided before.
        """
        if ran_s is not None:
            self.claimer.pace.observe(ran_s)

        def written(settlement: Settlement, verdict: Verdict) -> None:
            self.held.end(held)
            self.claimer.slot_freed()
            if on_verdict is not None:
                on_verdict(settlement, verdict)

        quick = ran_s is not None and ran_s < self.settings.claim_ahead_s
        free_now = quick or isinstance(outcome, LeaseForfeited)
        if free_now:
            self.held.end(held)
        if self.settle(held, outcome, on_verdict if free_now else written):
            return True
        self.held.end(held)
        if self.gate is not None and self.gate.holding:
            self.claimer.wake()
        return False

    def settle(self, held: HeldJob, outcome: Outcome, on_verdict: OnVerdict | None = None) -> bool:
        """The claim's end is this, whether or not its code still runs. False if it was decided before."""
        accepted = self.settler.settle(held, outcome, self._concluded(held, on_verdict))
        self.claimer.slot_freed()
        return accepted

    def _concluded(self, held: HeldJob, on_verdict: OnVerdict | None) -> OnVerdict:
        """What the claimer hears of a verdict, besides whoever asked for it."""

        def concluded(settlement: Settlement, verdict: Verdict) -> None:
            if verdict.accepted and settlement.state is JobState.QUEUED:
                self.claimer.due_in(settlement.delay_s)
                self.claimer.hint()
            if on_verdict is not None:
                on_verdict(settlement, verdict)
            if held.limits:
                self.claimer.wake()

        return concluded

    def acknowledge(self, held: HeldJob) -> bool:
        accepted = self.settler.acknowledge(held)
        self.claimer.slot_freed()
        return accepted

    def give_back(self, held: HeldJob, reason: str) -> bool:
        """Put a job that has not begun back, uncounted; one that is on its way into the pool does not run.

        False if it has begun, or its end was decided before.
        """
        accepted = self.settler.give_back(held, reason, only=Phase.RESERVED, on_verdict=self._concluded(held, None))
        self.claimer.slot_freed()
        return accepted

    def hold(self, job: ClaimedJob, lease_deadline: float) -> HeldJob | None:
        """Hold a job that a seam claimed by itself; None when it is not to be run."""
        held = self.claimer.hold(job, lease_deadline)
        if held is not None and self.gate is not None and self.gate.guards([job.queue]) and not held.limits:
            self.settle(held, Released("another had its slot of the limit"))
            return None
        return held

    def lose(self, held: HeldJob, reason: StopReason, why: str) -> None:
        """The lease is gone: tell the attempt, write nothing for it."""
        if self.settler.settle(held, LeaseForfeited(why)):
            self.stop_attempt(held, reason)
        self.claimer.slot_freed()

    def stop_attempt(self, held: HeldJob, reason: StopReason) -> None:
        """Interrupt an attempt whose end is already decided, and kill it if it goes on regardless."""
        if held.interrupted is None:
            held.interrupted = reason
            held.control.interrupt(reason)
        if held.started_at is not None:
            self.deadlines.doom(held.control)

    def running(self) -> list[HeldJob]:
        return self.held.snapshot(lambda held: held.phase is Phase.RUNNING)
