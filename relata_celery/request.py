"""A leased job in the worker's parent, between its delivery and the verdict on its end.

Celery's ``Request`` acknowledges, and with that the broker forgets. This one reports: every callback
of the pool becomes an outcome handed to the engine's one door, and Celery's events are sent when
the database has accepted it. ``acknowledge`` and ``reject`` are local book-keeping.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import threading
from collections.abc import Mapping
from time import monotonic
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, WorkerLostError
from celery import signals
from celery.exceptions import TaskRevokedError
from celery.utils.time import rate
from celery.worker import state
from celery.worker.request import Request
from kombu.utils.encoding import safe_repr

from . import bootstrap
from .attempt import Ticket, trace_job
from .domain.job import AttemptOutcome, ErrorClass, JobState
from .domain.outcome import Cancelled, ErrorInfo, Failed, Outcome, Settlement, Succeeded, Verdict, WorkerLost
from .domain.privacy import HIDDEN, hidden, stated_privacy, strictest
from .domain.redact import clean
from .engine.held import HeldJob, Phase, StopReason
from .following import failure_followups
from .interrupt import ThreadSignal
from .private import privacy_of_task
from .transport.envelope import HEADER

logger = logging.getLogger("relata_celery")

#: An attempt that the pool has may wait so many leases for a process: a new one is on its way, on a busy machine
#: slowly. To give it back earlier would only have the process begin with something that is nobody's any more.
LEASES_IN_THE_POOL = 5


class LeasedRequest(Request):
    """The parent's view of one attempt, and the engine's hold on where it runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Celery derives a class per task whose shortcuts bypass ours; take ours back.
        super().__init_subclass__(**kwargs)
        for name in ("on_success", "execute_using_pool"):
            if name in cls.__dict__:
                delattr(cls, name)

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        self._held: HeldJob | None = getattr(message, "held", None)
        self._pool: Any = None
        self._signal: ThreadSignal | None = None
        self._slot: tuple[int, int] | None = None
        self._finished = False
        self._handed_over: tuple[Any, ...] | None = None
        self._private = False
        if self._held is None:
            return
        # A job that could be claimed is not revoked, whatever this worker was told of its id before.
        state.revoked.discard(self.id)
        self._worker = bootstrap.worker_of(self.app)
        # Of a document edited into nonsense this raises, before anything has begun with the job.
        self._limits = self._stated_limits()
        self._private = strictest((privacy_of_task(self.task), stated_privacy(self.request_dict))) is not None
        if self._private:
            self._hide()
        stated = int(self._options.get("max_attempts") or self.task.max_attempts)
        self._worker.service.adopt(
            self._held, self, max_attempts=stated, retry_on_timeout=self.task.retry_on_timeout
        )

    def _hide(self) -> None:
        """Leave nothing in Celery's hands that its log and its events would show."""
        request = self.request_dict
        self._argsrepr = self._kwargsrepr = request["argsrepr"] = request["kwargsrepr"] = HIDDEN
        request["args"], request["kwargs"] = hidden(request["args"]), hidden(request["kwargs"])
        self._body = hidden(self.body)

    @property
    def _options(self) -> dict[str, Any]:
        options = self.request_dict.get(HEADER)
        return options if isinstance(options, dict) else {}

    # -- into the pool --------------------------------------------------------------------------

    def execute_using_pool(self, pool: Any, **kwargs: Any) -> Any:
        """Hand the job to the pool.

        Raises TaskRevokedError, and nothing else, when the pool does not run it: its end is then settled or
        was settled before, and only whoever raises this is given the pool's slot back.
        """
        held = self._held
        if held is None:
            return super().execute_using_pool(pool, **kwargs)
        self._pool = pool
        try:
            if held.phase is Phase.RESERVED:
                if not self.revoked():
                    return self._apply(pool, held)
            else:  # given back while it waited for a slot
                self._leave_worker()
        except Exception as exc:
            self._refused(held, exc)
            raise TaskRevokedError(self.id) from exc
        raise TaskRevokedError(self.id)

    def _refused(self, held: HeldJob, exc: Exception) -> None:
        """The job did not get into the pool: it fails for good if its own message is to blame."""
        kind = type(exc).__name__
        text = f"the worker's pool did not take the job: {kind}"
        error_class = ErrorClass.TRANSIENT
        if self._handed_over is None or not _can_be_sent(self._handed_over):
            text = f"the job cannot be handed to a process: {kind} ({clean(str(exc))[:200]})"
            error_class = ErrorClass.PERMANENT
        logger.error("job %s: %s: %s", self.id, text, exc)
        self._give_back_slot()
        error = ErrorInfo(error_class, text, kind, type(exc).__module__)
        followups = self.failure_followups(error) if error_class is ErrorClass.PERMANENT else ()
        self._worker.service.settle(held, Failed(error, followups))
        self._leave_worker()

    def _leave_worker(self) -> None:
        """Take this request out of Celery's books, but not a newer one of the same job."""
        newer = state.requests.get(self.id)
        state.task_ready(self)
        if newer is not None and newer is not self:
            state.requests[self.id] = newer
        self.acknowledge()

    def _apply(self, pool: Any, held: HeldJob) -> Any:
        self._handed_over = (
            self.type,
            self.id,
            self.request_dict,
            self.body,
            self.content_type,
            self.content_encoding,
            self._ticket(held, pool),
        )
        return pool.apply_async(
            trace_job,
            args=(*self._handed_over, self._signal),
            accept_callback=self.on_accepted,
            callback=self.on_success,
            error_callback=self.on_failure,
            correlation_id=self.id,
        )

    def _ticket(self, held: HeldJob, pool: Any) -> Ticket:
        board = None
        if _runs_in_processes(pool):
            self._slot = self._worker.board.take(held.lease_deadline)
            board = self._slot and (self._worker.board.path, *self._slot)
        else:
            self._signal = ThreadSignal(held.lease_deadline)
        soft, _hard = self._limits
        return Ticket(
            job_id=held.claim.id,
            type=held.job.type,
            attempt=held.job.attempt,
            max_attempts=held.max_attempts,
            fence=held.claim.fence,
            owner=held.claim.owner,
            item_id=held.job.item_id,
            lease_s=self._worker.settings.lease_duration,
            time_left_s=soft[0],
            board=board,
            max_result_bytes=self._worker.settings.max_result_bytes,
            limits=held.limits,
            snooze_left_s=max(self._worker.settings.snooze_limit - held.job.snoozed_s, 0.0),
        )

    def _stated_limits(self) -> tuple[tuple[float, StopReason], float]:
        """The attempt's soft limit with its reason, and its hard limit, in seconds from its start.

        Celery's own limits (of the call, the task, the worker or its configuration) are honoured in every
        pool; the earlier one wins.
        """
        settings = self._worker.settings
        timeout = float(self._options.get("timeout") or self.task.timeout or settings.job_timeout)
        time_limit, soft_time_limit = self.time_limits or (None, None)
        worker_soft, worker_hard = self._worker.time_limits
        soft_time_limit = float(soft_time_limit or self.task.soft_time_limit or worker_soft or 0)
        time_limit = time_limit or self.task.time_limit or worker_hard
        soft = (timeout, StopReason.TIMEOUT)
        if soft_time_limit and soft_time_limit < timeout:
            soft = (soft_time_limit, StopReason.SOFT_TIMEOUT)
        hard = timeout + settings.timeout_grace
        return soft, min(hard, float(time_limit)) if time_limit else hard

    def info(self, safe: bool = False) -> Any:
        """What ``celery inspect`` shows; of a private job only the repr made for showing."""
        return super().info(safe=safe or self._private)

    # -- what the pool reports ------------------------------------------------------------------

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        if self._held is not None:
            self.worker_pid = pid
            soft, hard = self._limits
            if not self._worker.service.begin(self._held, monotonic(), soft=soft, hard_s=hard):
                return  # given back on its way here: it has been told to stop
        super().on_accepted(pid, time_accepted)

    def on_success(self, failed__retval__runtime: Any, **kwargs: Any) -> None:
        if self._held is None:
            super().on_success(failed__retval__runtime, **kwargs)
            return
        _failed, (outcome, shown), runtime = failed__retval__runtime
        self._ended(outcome, shown, runtime)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        """The pool itself reports: the process died, was terminated, or sent what cannot be read."""
        if self._held is None:
            super().on_failure(exc_info, send_failed_event, return_ok)
            return
        exc = exc_info.exception
        if isinstance(exc, ExceptionWithTraceback):
            exc = exc.exc
        if isinstance(exc, Terminated):
            reason = f"terminated ({exc})"
            outcome: Outcome = Cancelled(reason) if self._terminated_by_user else WorkerLost(reason)
        elif isinstance(exc, (WorkerLostError, SystemExit, KeyboardInterrupt)):
            outcome = WorkerLost(str(exc)[:200] or type(exc).__name__)
        else:
            from .domain.classify import describe

            outcome = Failed(describe(exc, self.task.__module__))
        self._ended(outcome, None, None)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Not used: time limits are the engine's, the same in every pool."""

    def on_retry(self, exc_info: Any) -> None:
        """Not used: a retry is an outcome."""

    def _ended(self, outcome: Outcome, shown: str | None, runtime: float | None) -> None:
        self._finished = True
        held = self._held
        assert held is not None
        self._give_back_slot()
        if threading.current_thread() is threading.main_thread():
            state.task_ready(self, successful=isinstance(outcome, Succeeded))
        else:
            self._worker.call_soon(lambda: state.task_ready(self, successful=isinstance(outcome, Succeeded)))
        self.acknowledge()

        def on_verdict(settlement: Settlement, verdict: Verdict) -> None:
            if verdict.accepted and self.eventer and self.eventer.enabled and self.task.send_events:
                self._worker.call_soon(lambda: self._send_outcome_event(settlement, shown, runtime))

        if isinstance(outcome, WorkerLost):
            outcome = self._with_errbacks(outcome, held)
        self._worker.service.end(held, outcome, runtime, on_verdict)

    def _give_back_slot(self) -> None:
        if self._slot is not None:
            self._worker.board.give_back(*self._slot)

    def _with_errbacks(self, outcome: WorkerLost, held: HeldJob) -> WorkerLost:
        if held.job.attempt < held.max_attempts:
            return outcome
        text = f"worker lost: {outcome.reason}"
        error = ErrorInfo(ErrorClass.TRANSIENT, text, "WorkerLostError", "billiard.exceptions")
        return WorkerLost(outcome.reason, self.failure_followups(error))

    def failure_followups(self, error: ErrorInfo) -> tuple[Mapping[str, Any], ...]:
        """What is published if the job fails for good without its code having a say in it."""
        try:
            _args, _kwargs, embed = self._payload
            return failure_followups(self.task, self._context, embed or {}, error)
        except Exception as exc:
            logger.error("job %s: its errbacks cannot be published: %s", self.id, type(exc).__name__)
            return ()

    def _send_outcome_event(self, settlement: Settlement, shown: str | None, runtime: float | None) -> None:
        error = settlement.error
        text = f"{error.exception}({error.text!r})" if error else ""
        if settlement.state is JobState.SUCCEEDED:
            self.send_event("task-succeeded", result=HIDDEN if self._private else shown, runtime=runtime)
        elif settlement.state is JobState.CANCELLED:
            self.send_event("task-revoked", terminated=True, signum=None, expired=False)
        elif settlement.state is JobState.FAILED:
            self.send_event("task-failed", exception=text, traceback=(error and error.traceback) or "")
        elif settlement.recorded is not None and settlement.recorded is not AttemptOutcome.SUCCEEDED:
            self.send_event("task-retried", exception=text, traceback=(error and error.traceback) or "")

    # -- what the engine asks (AttemptControl) --------------------------------------------------

    def interrupt(self, reason: StopReason) -> None:
        if self._finished:
            return
        if self._signal is not None:
            self._signal.interrupt(reason)
        elif self._slot is not None and self.worker_pid:
            self._worker.board.mark(*self._slot, reason)
            _send(self.worker_pid, signal.SIGUSR1)
        else:  # not begun: whichever process comes to it finds that its place on the board is gone
            self._give_back_slot()

    def kill(self) -> None:
        """Kill the process of this attempt, in the worker's loop: the pool gives a process its next job there,
        after it has read this one's result, so the process runs this attempt or nothing."""
        if self._pool is not None and self._signal is None:
            self._worker.call_soon(self._kill_process)

    def _kill_process(self) -> None:
        if self._finished or not self.worker_pid:
            return
        try:
            self._pool.terminate_job(self.worker_pid, signal.SIGKILL)
        except (NotImplementedError, OSError):
            pass

    def patience(self) -> float:
        """Without end under a rate limit of Celery's, which makes jobs wait in the worker; long in the pool."""
        if rate(self.task.rate_limit):
            return math.inf
        return 1 if self._handed_over is None else LEASES_IN_THE_POOL

    def lease_extended(self, lease_deadline: float) -> None:
        if self._signal is not None:
            self._signal.extend(lease_deadline)
        elif self._slot is not None:
            self._worker.board.extend(*self._slot, lease_deadline)

    # -- what a person asks ---------------------------------------------------------------------

    _terminated_by_user = False

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Revoke a running job: it is cancelled now; its code is interrupted, and killed if it goes on."""
        held = self._held
        if held is None:
            super().terminate(pool, signal)
            return
        self._terminated_by_user = True
        if held.phase is Phase.RUNNING:
            self._announce_revoked("terminated", True, signal, False)
            self._worker.service.stop_attempt(held, StopReason.CANCELLED)
        else:
            state.revoked.add(self.id)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Celery stops what runs: after a lost connection, and in a cold shutdown.

        The first is nothing to us: the lease holds, the job goes on. In the second, known by a retry that is
        not to be announced or by a task that asks for early acknowledgement, all is given back.
        """
        if self._held is None:
            super().cancel(pool, signal, emit_retry)
        elif not emit_retry or not self.task.acks_late:
            self._worker.service.ask_to_stop_now()

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        if self._held is None:
            super()._announce_revoked(reason, terminated, signum, expired)
            return
        state.task_ready(self)
        self._already_revoked = True
        self.send_event("task-revoked", terminated=terminated, signum=safe_repr(signum), expired=expired)
        self._worker.service.settle(self._held, Cancelled(reason))
        self.acknowledge()
        signals.task_revoked.send(
            self.task, request=self._context, terminated=terminated, signum=signum, expired=expired
        )


def _runs_in_processes(pool: Any) -> bool:
    return bool(pool.uses_semaphore)


def _can_be_sent(arguments: tuple[Any, ...]) -> bool:
    """Whether these can be written for another process at all."""
    try:
        pickle.dumps(arguments)
    except MemoryError:
        return True
    except Exception:
        return False
    return True


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


__all__ = ["LeasedRequest"]
