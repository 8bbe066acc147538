"""How an attempt learns that it must stop, in a pool process and in a thread.

The parent decides; this is only the way the message reaches the handler's code. In a pool process
a signal (SIGUSR1, the one Celery's soft time limit uses) makes the handler look at the board; in
a thread the exception is raised asynchronously by the interpreter. Either way the exception is
raised only while the handler's own code runs, never in what follows it, and never in the next job
of the same process or thread: the attempt's own token is checked where the exception is raised.

Code that blocks in C sees the exception when it returns to Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from time import monotonic
from types import FrameType
from typing import Any, Protocol

from billiard import current_process
from celery._state import get_current_task
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import task_prerun, worker_process_init

from relata_celery.domain.errors import JobCancelled, JobTimeout, LeaseLost
from relata_celery.engine.held import StopReason

from .board import BoardReader

#: The key under which the attempt travels through Celery's request context.
REQUEST_KEY = "relata_attempt"


class TimeLimitReached(JobTimeout, SoftTimeLimitExceeded):  # type: ignore[misc]
    """The job's time ran out. Also a ``SoftTimeLimitExceeded``, which Celery's users catch to clean up."""

    def __init__(self, message: str = "the job's time ran out") -> None:
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "the job's time ran out"


EXCEPTIONS: dict[StopReason, type[Exception]] = {
    StopReason.LEASE_LOST: LeaseLost,
    StopReason.CANCELLED: JobCancelled,
    StopReason.TIMEOUT: TimeLimitReached,
    StopReason.SOFT_TIMEOUT: TimeLimitReached,
    StopReason.DRAINED: LeaseLost,
}


class StopSignal(Protocol):
    """What an attempt can ask about itself, and the span in which it may be interrupted.

    It is interrupted once. A handler that was told by its own ``check()`` (:meth:`told`, from the thread that
    ``enter`` was called in) cleans up undisturbed: the interruption that comes a moment later is not raised.
    """

    def reason(self) -> StopReason | None: ...

    def lease_deadline(self) -> float: ...

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def told(self) -> None: ...


class ThreadSignal:
    """For attempts in this process: threads, solo, green pools. Shared by both sides."""

    def __init__(self, lease_deadline: float) -> None:
        self._lock = threading.Lock()
        self._reason: StopReason | None = None
        self._lease_deadline = lease_deadline
        self._thread: int | None = None
        self._raised = self._told = False

    def reason(self) -> StopReason | None:
        return self._reason

    def lease_deadline(self) -> float:
        return self._lease_deadline

    def extend(self, lease_deadline: float) -> None:
        self._lease_deadline = lease_deadline

    def enter(self) -> None:
        with self._lock:
            self._thread = threading.get_ident()

    def leave(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            if self._raised and thread is not None:
                _raise_in(thread, None)  # it may not have been delivered yet

    def told(self) -> None:
        with self._lock:
            if self._thread == threading.get_ident():
                self._told = True
                if self._raised:
                    _raise_in(self._thread, None)

    def interrupt(self, reason: StopReason) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            if self._thread is not None and not self._told:
                self._raised = True
                _raise_in(self._thread, EXCEPTIONS[reason])


class BoardSignal:
    """For attempts in a pool process, which read what the parent wrote on the board."""

    #: The attempt that the signal handler of this process may interrupt now.
    _entered: BoardSignal | None = None
    #: The process whose signal handlers are ours: asking for them costs a twentieth of a short job.
    _armed: int | None = None

    def __init__(self, reader: BoardReader | None, slot: int, token: int, lease_s: float) -> None:
        self._reader = reader
        self._slot = slot
        self._token = token
        self._fallback_deadline = monotonic() + lease_s
        self._told = False

    def reason(self) -> StopReason | None:
        return None if self._reader is None else self._reader.read(self._slot, self._token)[0]

    def lease_deadline(self) -> float:
        if self._reader is None:
            return self._fallback_deadline
        return self._reader.read(self._slot, self._token)[1]

    def enter(self) -> None:
        _arm()
        BoardSignal._entered = self

    def leave(self) -> None:
        BoardSignal._entered = None

    def told(self) -> None:
        if threading.current_thread() is threading.main_thread():  # the one that signals interrupt
            self._told = True

    def to_be_told(self) -> StopReason | None:
        """Why it is to stop, once."""
        reason = None if self._told else self.reason()
        self._told = reason is not None or self._told
        return reason


def _arm() -> None:
    """Have this process' signals mean what they mean to us; done once."""
    if BoardSignal._armed == os.getpid():
        return
    signal.signal(signal.SIGUSR1, _Interruption(signal.getsignal(signal.SIGUSR1)))
    signal.signal(signal.SIGTERM, _PatientTermination(signal.getsignal(signal.SIGTERM)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    BoardSignal._armed = os.getpid()


def _hold(**kwargs: Any) -> None:
    """Keep SIGUSR1 waiting in a new pool process until our handler is there.

    billiard sets one of its own after this, which ends a process that runs nothing yet. Celery's solo pool sends
    this too, from the worker's main process, whose signals are Celery's.
    """
    if current_process().daemon:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        task_prerun.connect(_arm_first)


worker_process_init.connect(_hold)


def _arm_first(**kwargs: Any) -> None:
    """Before a process' first task, also one that is not leased: it may have a soft time limit of Celery's."""
    task_prerun.disconnect(_arm_first)
    _arm()


class _Interruption:
    """SIGUSR1 in a pool process: for the attempt that runs, else for a plain task, else for nobody."""

    def __init__(self, before: object) -> None:
        self._before = before

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        attempt = BoardSignal._entered
        if attempt is None:
            task = get_current_task()
            if task is not None and task.request.get(REQUEST_KEY) is None and callable(self._before):
                self._before(signum, frame)
            return
        reason = attempt.to_be_told()
        if reason is not None:
            raise EXCEPTIONS[reason]()


class _PatientTermination:
    """SIGTERM in a pool process: not during an attempt.

    A supervisor often signals the whole process group; the parent then drains, and a job that is
    running may end. Whoever wants an attempt stopped asks the parent, which has other means.
    """

    def __init__(self, before: object) -> None:
        self._before = before

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if BoardSignal._entered is not None:
            return
        if callable(self._before):
            self._before(signum, frame)
        else:
            raise SystemExit(0)


def _raise_in(thread: int, exception: type[Exception] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if exception is None else ctypes.py_object(exception)
    )
