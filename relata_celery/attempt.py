"""One attempt in the executing process: runs the handler and says what came of it.

:func:`trace_job` is what a pool is given to run. It lets Celery's own tracer do its work (signals,
hooks, logging) around the handler, and brings back an
:class:`~relata_celery.domain.outcome.Outcome` for the parent to settle. Nothing is published and
nothing is written to the queue from here: links, chain steps and errbacks are collected as
follow-ups of the outcome.

What a handler raises reaches Celery's tracer (and so the log, events and hooks) only in a shape
that is safe: short, picklable, and without the text of exceptions that were not raised on purpose.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from time import monotonic, time
from typing import Any, NamedTuple

from billiard.einfo import ExceptionWithTraceback
from celery import current_app
from celery.app.trace import fast_trace_task, trace_task_ret
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from kombu.exceptions import OperationalError

from relata_celery.domain.classify import describe, retry_after_s
from relata_celery.domain.errors import (
    ConfigurationError,
    JobError,
    JobTimeout,
    LeaseLost,
    MissingKey,
    StoreError,
)
from relata_celery.domain.job import ErrorClass
from relata_celery.domain.outcome import (
    Encoded,
    ErrorInfo,
    Failed,
    LeaseForfeited,
    Outcome,
    Replaced,
    RetryRequested,
    Snoozed,
    Succeeded,
)
from relata_celery.domain.redact import MAX_TEXT, cap, clean
from relata_celery.engine.held import StopReason

from . import bootstrap
from .board import BoardReader
from .current import current
from .following import checked_body, decode_body, dispatch_success, failure_followups, is_encrypted
from .interrupt import EXCEPTIONS, REQUEST_KEY, BoardSignal, StopSignal, ThreadSignal
from .sealing import MISSING_KEY_PAUSE_S, Keyring, sealed_result
from .shown import drop_context, shown_exception
from .transport.capture import Capture
from .transport.envelope import with_max_attempts

logger = logging.getLogger("relata_celery")

#: What the publishing of a next step may raise although nothing is wrong with the step.
_MAY_WORK_LATER = (StoreError, OperationalError, OSError)

#: What ``lease_until`` shows where there is no lease (``apply()``), in seconds from the start.
DETACHED_LEASE_S = 86_400.0


class Ticket(NamedTuple):
    """What the parent tells the executing process about the attempt. Plain values: it is pickled."""

    job_id: str
    type: str
    attempt: int
    max_attempts: int
    fence: int
    owner: str
    item_id: str | None
    lease_s: float
    time_left_s: float | None
    board: tuple[str, int, int] | None
    max_result_bytes: int
    limits: tuple[str, ...] = ()
    snooze_left_s: float = math.inf


_readers: dict[str, BoardReader] = {}


def _signal_for(ticket: Ticket) -> StopSignal:
    if ticket.board is None:
        return BoardSignal(None, 0, 0, ticket.lease_s)
    path, slot, token = ticket.board
    reader = _readers.get(path)
    if reader is None:
        _readers.clear()
        board = bootstrap.worker_of(current_app._get_current_object()).board if not path else None
        reader = _readers[path] = BoardReader.open(path) if board is None else board.reader()
    return BoardSignal(reader, slot, token, ticket.lease_s)


def trace_job(
    name: str,
    uuid: str,
    request: dict[str, Any],
    body: Any,
    content_type: str | None,
    content_encoding: str | None,
    ticket: Ticket,
    signal: ThreadSignal | None = None,
) -> tuple[int, tuple[Outcome, str | None], float]:
    """Run one attempt; return (failed, (outcome, the result's repr), seconds)."""
    began = monotonic()
    attempt = Attempt(ticket, signal or _signal_for(ticket))
    if attempt.signal.reason() is not None:
        return 1, (LeaseForfeited("given back before it began"), None), 0.0
    app = current_app._get_current_object()
    try:
        args, kwargs, attempt.embed = checked_body(
            decode_body(app, body, content_type, content_encoding)
        )
    except Exception as exc:
        text = f"message cannot be decoded: {type(exc).__name__}: {exc}"[:500]
        return 1, (Failed(ErrorInfo(ErrorClass.PERMANENT, text, "DecodeError", "kombu.exceptions")), None), 0.0
    request[REQUEST_KEY] = attempt
    trace = fast_trace_task if app.use_fast_trace_task else trace_task_ret
    shown: Any = None
    failed, runtime = 1, 0.0
    try:
        failed, shown, runtime = trace(name, uuid, request, (args, kwargs, {}), None, None)
    except (WorkerShutdown, WorkerTerminate):
        raise
    except BaseException as exc:
        if attempt.outcome is None:
            attempt.outcome = Failed(describe(exc, app.tasks[name].__module__))
    outcome = attempt.outcome or _outside_handler(app, name, failed, shown)
    duration_ms = int((monotonic() - began) * 1000)
    return (
        0 if isinstance(outcome, Succeeded) else 1,
        (replace(outcome, duration_ms=duration_ms), None if failed else shown),
        runtime or 0.0,
    )


def _outside_handler(app: Any, name: str, failed: int, shown: Any) -> Outcome:
    """Something around the handler failed (a prerun receiver, ``before_start``): its outcome."""
    if not failed:
        return Succeeded()
    exc = getattr(shown, "exception", shown)
    if isinstance(exc, ExceptionWithTraceback):
        exc = exc.exc
    if not isinstance(exc, BaseException):
        exc = JobError("the attempt failed outside its handler")
    return Failed(describe(exc, app.tasks[name].__module__))


class Attempt:
    """The attempt that is being executed here."""

    def __init__(self, ticket: Ticket, signal: StopSignal) -> None:
        self.ticket = ticket
        self.signal = signal
        self.capture = Capture(ticket.job_id)
        self.embed: Mapping[str, Any] = {}
        self.outcome: Outcome | None = None
        self.entered = False
        self.began_at = monotonic()
        self.progressed_at = 0.0
        #: What this attempt has of each limit (:mod:`relata_celery.ai`), and what gives it back at the end.
        self.limits: dict[str, Any] = {}
        self.at_end: list[Callable[[], None]] = []
        #: Attempts that the handler asked for in its own words (``retry(max_retries=...)``).
        self.retry_limit: int | None = None
        #: Whether it asked once more than that: then its failure is final, whatever its class.
        self.retries_spent = False
        #: Whether it put a workflow in its place.
        self.replaced = False

    # -- running the handler --------------------------------------------------------------------

    def execute(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Run the handler, keep its outcome, and tell Celery's tracer what it may know of it."""
        self.entered = True
        request = task.request
        self.capture.encrypted = bool(task.encrypted) or is_encrypted(request)
        if self.capture.encrypted and (missing := _missing_key()) is not None:
            self.outcome = Snoozed(MISSING_KEY_PAUSE_S, missing, exception="MissingKey")
            raise drop_context(Retry(missing, when=MISSING_KEY_PAUSE_S))
        request.update({key: self.embed.get(key) for key in ("callbacks", "errbacks", "chain", "chord")})
        token = current.set(self)
        try:
            with self.capture.active():
                try:
                    self.signal.enter()
                    value = task.run(*args, **kwargs)
                finally:
                    try:
                        self.signal.leave()
                    finally:
                        self.end_uses()
        except (WorkerShutdown, WorkerTerminate):
            raise
        except BaseException as exc:
            verdict: BaseException | None = self._on_raise(task, exc)
        else:
            verdict = self._on_return(task, value)
        finally:
            current.reset(token)
            request.update(callbacks=None, errbacks=None, chain=None, chord=None)
            self.signal.leave()  # again: an interrupt may have landed before the first had done its work
        if verdict is not None:
            raise verdict
        return value

    def _on_return(self, task: Any, value: Any) -> BaseException | None:
        forfeited = self._forfeited()
        if forfeited is not None:
            return forfeited
        if self.capture.republished is not None:  # self.retry(throw=False)
            return self._retry(Retry("retry was asked for"), None)
        try:
            result = self._encode(task, value)
        except Exception as exc:
            info = ErrorInfo(
                ErrorClass.PERMANENT,
                f"result cannot be stored: {type(exc).__name__}: {exc}"[:MAX_TEXT],
                "PermanentError",
                "relata_celery.domain.errors",
            )
            return self._fail(task, JobError(info.text), info)
        try:
            with self.capture.collecting():
                dispatch_success(task, self.embed, value)
        except Exception as exc:
            info = describe(exc, task.__module__)
            # To make a step fails each time; only what Celery asks MongoDB for on the way may work later.
            error_class = info.error_class if isinstance(exc, _MAY_WORK_LATER) else ErrorClass.PERMANENT
            text = cap(f"its next step cannot be published: {info.text}")
            info = replace(info, error_class=error_class, text=text, args_json=None)
            return self._fail(task, JobError(info.text, error_class=error_class), info)
        self.outcome = Succeeded(result, tuple(self.capture.followups))
        return None

    def _encode(self, task: Any, value: Any) -> Encoded | None:
        if task.request.ignore_result or (value is None and not task.app.conf.result_extended):
            return None
        backend = task.backend
        content_type, content_encoding, body = backend.encode_outcome(value)
        size = len(body.encode() if isinstance(body, str) else body)
        if size > self.ticket.max_result_bytes:
            raise ValueError(f"it is {size:,} bytes, the limit is {self.ticket.max_result_bytes:,}")
        result = Encoded(content_type, content_encoding, body)
        return sealed_result(result, task.request.id) if self.capture.encrypted else result

    def _on_raise(self, task: Any, exc: BaseException) -> BaseException:
        """Classify what the handler raised; return what Celery's tracer is to see."""
        forfeited = self._forfeited()
        if forfeited is not None:
            return forfeited
        if isinstance(exc, Retry):
            return self._retry(exc, task)
        if isinstance(exc, Ignore):
            if self.capture.republished is not None:
                self.outcome = Replaced(self.capture.republished["message"])
            else:
                followups = tuple(self.capture.followups)
                self.outcome = Succeeded(None, followups, ignored=True, replaced=self.replaced)
            return _ignored()
        if isinstance(exc, Reject):
            return self._reject(task, exc)
        info = describe(exc, task.__module__)
        snooze_s = retry_after_s(exc, time())
        if snooze_s is not None and info.error_class is ErrorClass.TRANSIENT:
            if snooze_s > self.ticket.snooze_left_s:
                self.retries_spent = True
                text = cap(f"put off for as long as relata_snooze_limit allows: {info.text}")
                info = replace(info, text=text, args_json=None)
                return self._fail(task, JobError(text, error_class=info.error_class), info)
            self.outcome = Snoozed(snooze_s, info.text)
            return drop_context(Retry(info.text, exc=JobError(info.text), when=snooze_s))
        return self._fail(task, exc, info)

    def _retry(self, exc: Retry, task: Any) -> BaseException:
        message = self.capture.republished["message"] if self.capture.republished else None
        granted = self.retry_limit or 0
        if message is not None and granted > self.ticket.max_attempts:
            message = with_max_attempts(message, granted)
        error = describe(exc.exc, task.__module__) if exc.exc is not None and task is not None else None
        self.outcome = RetryRequested(
            _seconds_until(exc.when, message), error, message, max_attempts=self.retry_limit
        )
        shown = JobError(error.text) if error is not None else None
        return drop_context(Retry(error.text if error else None, exc=shown, when=exc.when))

    def _reject(self, task: Any, exc: Reject) -> BaseException:
        reason = "no reason given"
        if isinstance(exc.reason, BaseException):
            reason = describe(exc.reason, task.__module__).text
        elif isinstance(exc.reason, str):
            reason = clean(exc.reason)
        if exc.requeue:
            error = ErrorInfo(ErrorClass.TRANSIENT, f"rejected by its handler, to be redelivered: {reason}")
            last = self.ticket.attempt >= self.ticket.max_attempts
            self.outcome = RetryRequested(
                0.0, error, followups=failure_followups(task, task.request, self.embed, error) if last else ()
            )
        else:
            text = f"rejected by its handler: {reason}"[:MAX_TEXT]
            self.outcome = self._failure(task, ErrorInfo(ErrorClass.PERMANENT, text, "Reject", "celery.exceptions"))
        return drop_context(Reject(reason, requeue=exc.requeue))

    def _fail(self, task: Any, exc: BaseException, info: ErrorInfo) -> BaseException:
        if self.will_retry(info, task):
            self.outcome = Failed(info, retry_on_timeout=bool(task.retry_on_timeout))
            return drop_context(Retry(info.text, exc=JobError(info.text)))
        self.outcome = self._failure(task, info)
        return shown_exception(exc, info)

    def _failure(self, task: Any, info: ErrorInfo) -> Failed:
        """A final failure, with what it calls for."""
        followups = failure_followups(task, task.request, self.embed, info)
        return Failed(
            info, followups, retry_on_timeout=bool(task.retry_on_timeout), final=self.retries_spent
        )

    def replacing(self, replace_it: Callable[[], Any]) -> Any:
        """Collect what replacing the task publishes."""
        try:
            with self.capture.collecting():
                return replace_it()
        except Ignore:
            self.replaced = True
            raise
        except BaseException:
            self.capture.followups.clear()
            raise

    def will_retry(self, info: ErrorInfo, task: Any) -> bool:
        """Whether the parent will put the job back for this failure (the same rule as it uses)."""
        if self.retries_spent or self.ticket.attempt >= self.ticket.max_attempts:
            return False
        if info.error_class is ErrorClass.TIMEOUT:
            return bool(task.retry_on_timeout)
        return info.error_class is ErrorClass.TRANSIENT

    def _forfeited(self) -> BaseException | None:
        """If the lease was lost meanwhile, nothing of this attempt counts: no hooks, no outcome."""
        reason = self.signal.reason()
        if reason in (StopReason.TIMEOUT, StopReason.SOFT_TIMEOUT):
            return None
        if reason is None and monotonic() < self.signal.lease_deadline():
            return None
        self.outcome = LeaseForfeited(f"the attempt was stopped: {reason or StopReason.LEASE_LOST.value}")
        return _ignored()

    def end_uses(self) -> None:
        """Give back what the handler did not; nothing in it raises."""
        while self.at_end:
            self.at_end.pop()()

    # -- what the handler may ask ---------------------------------------------------------------

    def check(self) -> None:
        stop = self._must_stop()
        if stop is not None:
            self.signal.told()
            raise stop

    def _must_stop(self) -> Exception | None:
        reason = self.signal.reason()
        if reason is not None:
            return EXCEPTIONS[reason]()
        if monotonic() >= self.signal.lease_deadline():
            return LeaseLost("the lease ran out: no renewal was accepted in time")
        left = self.ticket.time_left_s
        if left is not None and monotonic() - self.began_at >= left:
            return JobTimeout("the job's time ran out")
        return None


def _missing_key() -> str | None:
    """Why an encrypted job cannot be run here; None when it can."""
    try:
        Keyring.from_environment().require()
    except (ConfigurationError, MissingKey) as exc:
        return f"not run here: {exc}"
    return None


def _ignored() -> BaseException:
    """What makes Celery's tracer end without a result, a hook or a success signal."""
    return drop_context(Ignore())


def _seconds_until(when: Any, message: Mapping[str, Any] | None) -> float:
    if isinstance(when, (int, float)):
        return max(float(when), 0.0)
    if isinstance(when, datetime):
        moment = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
        return max((moment - datetime.now(timezone.utc)).total_seconds(), 0.0)
    eta = (message or {}).get("headers", {}).get("eta")
    return _seconds_until(datetime.fromisoformat(eta), None) if isinstance(eta, str) else 0.0


def detached(task: Any) -> Attempt:
    """An attempt for a handler that is run without a worker (``apply()``, eager mode, tests)."""
    request = task.request
    ticket = Ticket(
        job_id=request.id or "",
        type=task.name,
        attempt=(request.retries or 0) + 1,
        max_attempts=task.max_attempts,
        fence=0,
        owner="",
        item_id=None,
        lease_s=DETACHED_LEASE_S,
        time_left_s=None,
        board=None,
        max_result_bytes=0,
    )
    return Attempt(ticket, ThreadSignal(monotonic() + DETACHED_LEASE_S))


def run_detached(task: Any, args: Any, kwargs: Any) -> Any:
    attempt = detached(task)
    token = current.set(attempt)
    try:
        return task.run(*args, **kwargs)
    finally:
        current.reset(token)
        attempt.end_uses()
