"""Claims jobs for slots that are free, or will be within ``claim_ahead`` seconds.

Nothing waits in a worker's memory. How far ahead of its slots a worker may claim follows from how
long its jobs have lately taken: dozens of 1 ms jobs lie ready for each slot, and no job at all lies
behind one that takes, or already runs, longer than ``claim_ahead``.

A claim is sent when half the room is free, not at each settled job: the round trips are shared by
a batch. An empty queue is looked at again after ``poll_interval`` or when a wake-up (a change
stream, a settled job, a due time that is known) says so. The wake-up is a hint; the poll is the truth.

One published job wakes every idle worker, and one of them will have it. So each waits a random part of
a spread before it looks, and does not look at all once it hears that the job was taken. The spread grows
with each look that comes too late and shrinks with each that does not: a worker that is alone looks at once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import monotonic

from relata_celery.domain.job import ClaimedJob, ClaimedJobs
from relata_celery.domain.outcome import Cancelled, Released
from relata_celery.domain.pauses import Paused

from .background import Background
from .held import Held, HeldJob, Phase, StopReason
from .limiting import Gate
from .ports import Admit, JobQueue
from .settling import Settler

logger = logging.getLogger("relata_celery")

#: Most jobs that may lie ready for one slot.
MAX_AHEAD_PER_SLOT = 128
#: Most jobs in one claim: bounds the documents of one answer.
MAX_BATCH = 256
#: The longest that an idle worker may wait with its look at a job it heard of, in seconds.
LONGEST_SPREAD_S = 0.1
#: The spread after the first look that came too late, in seconds; below it there is none.
LEAST_SPREAD_S = 0.002
#: After so long with more jobs than room nobody needs to be told of new ones, in seconds.
BUSY_S = 1.0
#: How many recent durations the estimate looks back on.
RECENT = 16


class Pace:
    """How long this worker's jobs lately took: the mean of the last few, in seconds.

    So many jobs behind one another wait their number times this.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)

    def observe(self, duration_s: float) -> None:
        self._recent.append(duration_s)

    @property
    def mean_s(self) -> float | None:
        recent = tuple(self._recent)
        return sum(recent) / len(recent) if recent else None


class Claimer(Background):
    name = "claimer"

    def __init__(
        self,
        queue: JobQueue,
        held: Held,
        settler: Settler,
        *,
        owner: str,
        lease_s: float,
        poll_s: float,
        claim_ahead_s: float,
        slots: Callable[[], int],
        deliver: Callable[[Sequence[HeldJob]], None],
        on_lost: Callable[[HeldJob, StopReason, str], None],
        random: Callable[[], float],
        gate: Gate | None = None,
        paused: Callable[[], Paused | None] = Paused,
    ) -> None:
        super().__init__(random=random)
        #: Told True when for a while there were more jobs than room, and False when that is over.
        self.on_busy: Callable[[bool], None] = lambda busy: None
        #: Told, on the claimer's thread, that the queues are others than before.
        self.on_queues: Callable[[], None] = lambda: None
        self._gate = gate
        self._paused = paused
        self._queue = queue
        self._held = held
        self._settler = settler
        self._owner = owner
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._claim_ahead_s = claim_ahead_s
        self._slots = slots
        self._deliver = deliver
        self._on_lost = on_lost
        self._queues: tuple[str, ...] = ()
        self._told_queues: tuple[str, ...] = ()
        self._queues_lock = threading.Lock()
        self._draining = False
        self._due_at: float | None = None
        self._ask_due = False
        self._hinted = True
        self._asked = False
        self._look_at = 0.0
        #: Jobs heard of: when each is due, and when to look for it.
        self._expected: dict[str, tuple[float, float]] = {}
        self._expected_lock = threading.Lock()
        self._spread_s = 0.0
        self._backlog = False
        self._backlog_since: float | None = None
        self._busy = False
        self._target = 0
        self.pace = Pace()

    # -- what to claim from -----------------------------------------------------------------

    @property
    def consumed(self) -> Collection[str]:
        """The queues that this worker was told to consume."""
        return self._queues

    @property
    def queues(self) -> tuple[str, ...]:
        """Those of them that are not paused; none as long as that is not known."""
        paused = self._paused()
        return () if paused is None else tuple(name for name in self._queues if name not in paused.queues)

    def _paused_types(self) -> Collection[str]:
        paused = self._paused()
        return () if paused is None else paused.types

    def consume(self, queue: str) -> None:
        with self._queues_lock:
            if queue not in self._queues:
                self._queues = (*self._queues, queue)
        self.hint()

    def cancel(self, queue: str) -> None:
        with self._queues_lock:
            self._queues = tuple(name for name in self._queues if name != queue)

    # -- when to claim ------------------------------------------------------------------------

    def first_wait_s(self) -> float:
        return self._random() * min(self._poll_s, 0.2)

    def wake(self) -> None:
        """Look now."""
        self._asked = True
        super().wake()

    def hint(self) -> None:
        """Something may be due that nobody can tell the time of: look now."""
        self._hinted = True
        self.wake()

    def added(self, job_id: str, due_in_s: float) -> None:
        """A job that is due in so many seconds waits in one of the queues."""
        spread_s = self._random() * self._spread_s
        if due_in_s > LONGEST_SPREAD_S:
            self.due_in(due_in_s + spread_s)
        else:
            due_at = monotonic() + due_in_s
            with self._expected_lock:
                self._expected[job_id] = due_at, due_at + spread_s
        super().wake()

    def taken(self, job_id: str) -> None:
        """A job was claimed, here or elsewhere: it is no reason to look any more."""
        with self._expected_lock:
            self._expected.pop(job_id, None)

    def due_in(self, delay_s: float) -> None:
        """A job is due in ``delay_s`` seconds."""
        due_at = monotonic() + delay_s
        if self._due_at is None or due_at < self._due_at:
            self._due_at = due_at

    def slot_freed(self) -> None:
        """A held job no longer takes a slot: if more were waiting, claim once half of the room is free."""
        if self._backlog and self._held.occupying * 2 <= self._target:
            self.wake()

    def stop_claiming(self) -> None:
        """From now on no claim is sent; one that is in flight is handed back when it returns."""
        self._draining = True
        self.wake()

    @property
    def backlog(self) -> bool:
        """Whether the last claim filled all the room there was: more jobs wait."""
        return self._backlog

    def most(self) -> int:
        """How many jobs may be held now, those that run included."""
        slots = self._slots()
        mean_s = self.pace.mean_s
        if not self._claim_ahead_s or mean_s is None:
            return slots
        per_slot = min(int(self._claim_ahead_s / max(mean_s, 1e-6)), MAX_AHEAD_PER_SLOT)
        if not per_slot:
            return slots
        began_before = monotonic() - self._claim_ahead_s
        slow = self._held.snapshot(
            lambda held: held.phase is Phase.RUNNING
            and held.started_at is not None
            and held.started_at < began_before
        )
        return slots + per_slot * max(slots - len(slow), 0) if not slow else slots

    # -- the round ----------------------------------------------------------------------------

    def step(self) -> float | None:
        self._give_back_unheard()
        if self._draining:
            self._return_slots()
            return None
        queues = self.queues
        if self._told_queues != queues:
            self._told_queues = queues
            self.on_queues()
        asked, self._asked = self._asked, False
        now = monotonic()
        look_at, heard = self._next_look()
        if now < look_at and not asked:
            return look_at - now
        if not (heard and not asked and self._one_heard_of()):
            self._look_at = monotonic() + self._round(heard and not asked)
        self._notice_busy()
        return max(self._next_look()[0] - monotonic(), 0.0)

    def _next_look(self) -> tuple[float, bool]:
        """When to look, and whether that is for a job heard of."""
        at = self._look_at if self._due_at is None else min(self._look_at, self._due_at)
        with self._expected_lock:
            heard = min((look_at for _due_at, look_at in self._expected.values()), default=None)
        return (at, False) if heard is None or at <= heard else (heard, True)

    def _heard_of(self, now: float) -> list[str]:
        """The jobs heard of that are due."""
        with self._expected_lock:
            return [job_id for job_id, (due_at, _look_at) in self._expected.items() if due_at <= now]

    def _one_heard_of(self) -> bool:
        """Claim by its id the only job that is due as far as is known: one round trip instead of two.

        False, and nothing done, when there may be more to claim or somebody to ask. The time of the next look
        stays as it is: what was not heard of waits no longer.
        """
        due = self._heard_of(monotonic())
        if len(due) != 1 or self._backlog or self._held.occupying >= self.most():
            return False
        queues = self.queues
        if self._gate is not None and self._gate.guards(queues):
            return False
        self.taken(due[0])
        sent_at = monotonic()
        job = self._queue.claim_by_id(due[0], queues, self._owner, self._lease_s, self._paused_types())
        self.answered()
        self._take([] if job is None else [job], sent_at + self._lease_s)
        self._note_race(won=job is not None)
        return True

    def _round(self, heard: bool) -> float:
        """Claim for the room there is; return how long until it is worth another look, in seconds."""
        now = monotonic()
        due = self._heard_of(now)
        for job_id in due:
            self.taken(job_id)
        if self._due_at is not None and self._due_at <= now:
            # Past, it is no reason to look again; when the next job is due is asked once there is room.
            self._due_at, self._ask_due = None, True
        self._target = self.most()
        queues, room = self.queues, min(self._target - self._held.occupying, MAX_BATCH)
        if not queues or room <= 0:
            self._backlog = self._backlog or self._hinted or self._ask_due or bool(due)
            self._return_slots()
            self._give_back_stranded()
            return self._poll_s
        self._hinted, hinted = False, self._hinted
        jobs = self._claim(queues, room) if self._gate is None else self._claim_admitted(self._gate, queues, room)
        claimed, self._backlog = len(jobs), jobs.more
        if heard:
            self._note_race(won=bool(claimed))
        if self._backlog:
            more_fit = room == MAX_BATCH or self._held.occupying * 2 <= self._target
            return 0.0 if more_fit else self._poll_s
        look_ahead = self._ask_due or (hinted and not claimed)
        if self._gate is None:
            return self._until_next(queues, look_ahead)
        pause = self._until_next(self._gate.open(queues), look_ahead)
        opens_in_s = self._gate.opens_in(queues)
        return pause if opens_in_s is None else min(pause, opens_in_s)

    def _note_race(self, won: bool) -> None:
        """Widen the spread after a look that came too late, narrow it after one that did not."""
        if won:
            self._spread_s = self._spread_s / 2 if self._spread_s > LEAST_SPREAD_S else 0.0
        else:
            self._spread_s = min(max(self._spread_s * 2, LEAST_SPREAD_S), LONGEST_SPREAD_S)

    def _notice_busy(self) -> None:
        now = monotonic()
        if not self._backlog:
            self._backlog_since = None
        elif self._backlog_since is None:
            self._backlog_since = now
        busy = self._backlog_since is not None and now - self._backlog_since > BUSY_S
        if busy is not self._busy:
            self._busy = busy
            self.on_busy(busy)

    def _claim(self, queues: Collection[str], room: int, admit: Admit | None = None) -> ClaimedJobs:
        sent_at = monotonic()
        claimed = self._queue.claim(queues, room, self._owner, self._lease_s, admit, self._paused_types())
        self.answered()
        self._take(claimed, sent_at + self._lease_s)
        return claimed

    def _claim_admitted(self, gate: Gate, queues: Collection[str], room: int) -> ClaimedJobs:
        """Claim what the limits let in; where one refuses, fill the rest of the room from the other queues."""
        gate.begin()
        claimed = ClaimedJobs()
        while len(claimed) < room and (open_now := gate.open(queues)):
            admit = gate.admit if gate.guards(open_now) else None
            jobs = self._claim(open_now, room - len(claimed), admit)
            # Of what a limit refused it is not known whether it could be claimed.
            claimed = ClaimedJobs([*claimed, *jobs], jobs.more and admit is None)
            if len(gate.open(open_now)) == len(open_now):  # none of them was refused anything
                break
        gate.flush()
        return ClaimedJobs(claimed, claimed.more or len(claimed) == room)

    def _return_slots(self) -> None:
        if self._gate is not None:
            self._gate.flush()

    def _give_back_unheard(self) -> None:
        """Jobs claimed by a call whose answer was lost: nothing of them is here, not even a limit's slot.

        While MongoDB does not answer this either, no other claim is sent: each would be granted as many again.
        """
        for job in self._queue.unheard():
            held = HeldJob(job, monotonic() + self._lease_s)
            self._held.add(held)
            self._settler.give_back(held, "the answer to its claim was lost")
            self.hint()

    def _give_back_stranded(self) -> None:
        """Jobs claimed ahead of slots whose jobs turned out slow: another worker may have room for them now."""
        began_before = monotonic() - self._claim_ahead_s
        running = self._held.snapshot(lambda held: held.phase is Phase.RUNNING)
        slow = [held for held in running if held.started_at is not None and held.started_at < began_before]
        if len(slow) < max(self._slots(), 1):
            return
        for held in self._held.snapshot(lambda held: held.phase is Phase.RESERVED):
            self._settler.give_back(held, "the jobs before it take long", only=Phase.RESERVED)

    def hold(self, job: ClaimedJob, lease_deadline: float) -> HeldJob | None:
        """Hold a claimed job; None when it is not to be run, as it has expired or the worker drains."""
        held = HeldJob(job, lease_deadline)
        superseded = self._held.add(held)
        if superseded is not None:
            self._on_lost(superseded, StopReason.LEASE_LOST, "the job was claimed again by this worker")
        if self._gate is not None:
            self._gate.assign(held)
        if self._draining:
            self._settler.settle(held, Released("claimed while the worker began to drain"))
        elif job.expired:
            self._settler.settle(held, Cancelled("expired before it was started"))
        else:
            return held
        return None

    def _take(self, claimed: Sequence[ClaimedJob], lease_deadline: float) -> None:
        taken = [held for job in claimed if (held := self.hold(job, lease_deadline)) is not None]
        if taken:
            self._deliver(taken)

    def _until_next(self, queues: Collection[str], look_ahead: bool) -> float:
        """After a claim that did not fill the room: how long until it is worth another look."""
        now = monotonic()
        if look_ahead:
            due_in_s = self._queue.next_due_in(queues)
            self._ask_due = False
            self._due_at = None if due_in_s is None else now + due_in_s
        pause = self._poll_s * (0.8 + 0.2 * self._random())
        if self._due_at is not None:
            pause = min(pause, max(self._due_at - monotonic(), 0.001))
        return pause
