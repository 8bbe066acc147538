"""The app under test: one task for each behaviour. Also imported by tests, which send to it.

``RELATA_TEST_URI`` names the database of a worker; a test makes an app of its own for the worker
that it talks to. Tasks and signals write what happened to them into ``RELATA_TEST_JOURNAL``.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import celery
from celery import Celery, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.result import AsyncResult, allow_join_result
from pydantic import BaseModel

from relata_celery import (
    InvalidOutputError,
    JobCancelled,
    JobTimeout,
    LeasedTask,
    PermanentError,
    RateLimited,
    TransientError,
    current_job,
)

#: What no log, event, document or result may ever show.
SECRET = "hunter2-wears-a-hat"

TASKS: list[tuple[Callable[..., Any], dict[str, Any]]] = []


def task(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        TASKS.append((function, options))
        return function

    return keep


def make_app(uri: str, **conf: Any) -> Celery:
    """The app with every task of this module, on this MongoDB. Not made the current app."""
    url = f"relata+{uri}"
    made = Celery("behaviour", broker=url, backend=url, task_cls="relata_celery:LeasedTask", set_as_current=False)
    made.conf.update(conf)
    for function, options in TASKS:
        made.task(name=function.__name__, shared=False, **options)(function)
    return made


def journal(what: str, **fields: Any) -> None:
    """Append a line to the journal; one write, so lines of several processes do not mix."""
    path = os.environ.get("RELATA_TEST_JOURNAL")
    if path:
        with open(path, "ab", buffering=0) as file:
            file.write(json.dumps({"what": what, **fields}, default=repr).encode() + b"\n")


# -- results ------------------------------------------------------------------------------------


class ImportableError(Exception):
    """A failure with a class that a caller can import."""


@task()
def add(x: Any, y: Any) -> Any:
    return x + y


@task()
def echo(value: Any = None) -> Any:
    return value


@task()
def garbage() -> dict[str, int]:
    """What the garbage collector has had to free in this process, and what it passes over."""
    gc.collect()
    return {"freed": sum(generation["collected"] for generation in gc.get_stats()), "apart": gc.get_freeze_count()}


@task()
def typed(kind: str) -> Any:
    """Values that JSON has no name for; Celery's JSON does."""
    return {
        "datetime": datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=timezone.utc),
        "date": date(2026, 1, 2),
        "decimal": Decimal("12.340"),
        "uuid": UUID("12345678-1234-5678-1234-567812345678"),
        "tuple": (1, 2),
        "bytes": b"\x00\xff",
        "nested": {"a": [1, {"b": None}], "ü": "é"},
    }[kind]


@task(ignore_result=True)
def ignored(value: Any) -> Any:
    return value


@task(max_attempts=1)
def fail_as(kind: str, text: str = "on purpose") -> None:
    if kind == "local":
        raise type("NowhereError", (Exception,), {"__module__": "no.such.module"})(text)
    raise {"value": ValueError, "importable": ImportableError, "runtime": RuntimeError}[kind](text)


@task()
def hold(path: str, seconds: float = 30) -> str:
    """Say that it runs, then wait until the file is gone."""
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    until = time.monotonic() + seconds
    while os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.02)
    return "released"


@task()
def pid() -> int:
    return os.getpid()


@task(bind=True)
def custom_state(self: Any, path: str) -> str:
    if self.request.retries:
        return hold(path)
    self.update_state(state="BREWING", meta={"cups": 3})
    hold(path)
    raise self.retry(countdown=0)


# -- retries ------------------------------------------------------------------------------------


@task(bind=True)
def retry_times(self: Any, times: int, countdown: float = 0) -> dict[str, Any]:
    journal("retry_times", id=self.request.id, retries=self.request.retries)
    if self.request.retries < times:
        raise self.retry(countdown=countdown)
    return {
        "retries": self.request.retries,
        "id": self.request.id,
        "redelivered": self.request.delivery_info["redelivered"],
        "routing_key": self.request.delivery_info["routing_key"],
        "attempt": current_job().attempt,
    }


@task(bind=True, max_attempts=2)
def retry_exc(self: Any) -> None:
    try:
        raise ImportableError("again and again")
    except ImportableError as exc:
        raise self.retry(countdown=0, exc=exc) from exc


@task(bind=True, max_retries=1)
def retry_without_exc(self: Any) -> None:
    raise self.retry(countdown=0)


@task(bind=True)
def retry_limited_here(self: Any, limit: int) -> None:
    """A limit stated at the call of retry counts, also below the task's own attempts."""
    journal("retry_limited_here", id=self.request.id)
    raise self.retry(countdown=0, max_retries=limit, exc=ImportableError("no more"))


@task(bind=True)
def retry_changed(self: Any, x: int, y: int = 0) -> list[int]:
    if self.request.retries == 0:
        raise self.retry(args=(x + 1,), kwargs={"y": y + 10}, countdown=0)
    return [x, y]


@task(bind=True)
def retry_quietly(self: Any) -> str:
    if self.request.retries == 0:
        self.retry(countdown=0, throw=False)
        return "the first attempt's value"
    return "the second attempt's value"


@task(bind=True, max_retries=None)
def retry_for_ever(self: Any, times: int) -> int:
    if self.request.retries < times:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@task(
    bind=True, autoretry_for=(ImportableError,), retry_backoff=0.01, retry_jitter=False,
    retry_kwargs={"max_retries": 2},
)  # fmt: skip
def autoretried(self: Any, succeed_at: int) -> int:
    journal("autoretried", id=self.request.id)
    if self.request.retries < succeed_at:
        raise ImportableError("not yet")
    return int(self.request.retries)


@task(bind=True)
def retry_keeps(self: Any) -> list[Any]:
    """What a call says beside its arguments, in the first attempt and in the second."""
    seen = [self.request.get("colour"), (self.request.headers or {}).get("colour"), current_job().item_id]
    journal("retry_keeps", id=self.request.id, seen=seen)
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return seen


@task()
def transient(times: int) -> int:
    attempt = current_job().attempt
    if attempt <= times:
        raise TransientError(f"attempt {attempt}")
    return attempt


# -- ends that are neither success nor failure ---------------------------------------------------


@task()
def ignore() -> None:
    raise Ignore()


@task(max_attempts=3)
def reject(requeue: bool) -> None:
    journal("reject", id=current_job().id)
    raise Reject("not for me", requeue=requeue)


class Shape(BaseModel):
    sides: int
    name: str = "square"


@task(pydantic=True)
def pydantic_task(shape: Shape) -> Shape:
    return Shape(sides=shape.sides * 2, name=shape.name.upper())


@task()
def ordered(mark: Any) -> None:
    journal("ordered", mark=mark)


@task(ai=True)
def ai_task() -> str:
    return "thought"


@task(queue="letters")
def own_queue() -> str:
    return "sent"


@task(queue="letters", priority=7)
def own_priority() -> None:
    pass


# -- hooks --------------------------------------------------------------------------------------


class Hooked(LeasedTask):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        journal("before_start", id=task_id, args=list(args), kwargs=kwargs)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        journal("on_success", id=task_id, args=list(args), kwargs=kwargs, retval=retval)

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        journal("on_failure", id=task_id, args=list(args), exc=repr(exc), einfo=type(einfo).__name__)

    def on_retry(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        journal("on_retry", id=task_id, args=list(args), exc=repr(exc), einfo=type(einfo).__name__)

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        journal("after_return", id=task_id, status=status, retval=repr(retval))


@task(base=Hooked, bind=True, max_attempts=2)
def hooked(self: Any, how: str, word: str = "") -> str:
    if how == "retry" and self.request.retries == 0:
        raise self.retry(countdown=0, exc=ImportableError("once more"))
    if how == "transient" and self.request.retries == 0:
        raise TransientError("once more")
    if how == "fail":
        raise PermanentError("for good")
    if how == "panic":
        raise KeyError(SECRET)
    return word


@task(base=Hooked, max_attempts=1)
def hooked_hold(path: str) -> str:
    return hold(path)


# -- time ---------------------------------------------------------------------------------------


def _loop(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)


@task(timeout=timedelta(minutes=5), soft_time_limit=timedelta(minutes=4), time_limit=timedelta(minutes=5))
def in_time(retried: bool = False) -> str:
    if retried and current_job().attempt == 1:
        raise celery.current_task.retry(countdown=timedelta(seconds=0.1))
    return "in time"


@task(timeout=1)
def too_long() -> None:
    _loop(60)


@task(timeout=1, retry_on_timeout=True, max_attempts=2)
def too_long_once() -> str:
    if current_job().attempt == 1:
        _loop(60)
    return "in time"


@task(soft_time_limit=1)
def cleans_up() -> str:
    try:
        _loop(60)
    except SoftTimeLimitExceeded:
        return "cleaned up"
    return "never told"


@task(soft_time_limit=1, max_attempts=3)
def soft_limited() -> None:
    _loop(60)


@task(time_limit=1, max_attempts=3)
def hard_limited(blocks: bool) -> None:
    time.sleep(30) if blocks else _loop(30)


@task(timeout=1)
def blocks_in_c(path: str = "") -> None:
    """One call that no signal ends: Python retries it after each, and nothing else runs meanwhile."""
    if path:
        with open(path, "w") as file:
            file.write(str(os.getpid()))
    lock = threading.Lock()
    lock.acquire()
    until = time.monotonic() + 15
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
            time.sleep(5)


# -- errors -------------------------------------------------------------------------------------


class HttpError(Exception):
    def __init__(self, status_code: int, retry_after: str | None = None) -> None:
        super().__init__(f"HTTP {status_code}")
        self.status_code = status_code
        self.headers = {} if retry_after is None else {"Retry-After": retry_after}

    def __reduce__(self) -> Any:
        return HttpError, (self.status_code,)


@task(max_attempts=1)
def raise_error(kind: str, text: str = "") -> None:
    """Raise what the name says; of one attempt, so that it is final whatever its class."""
    if kind.isdigit():
        raise HttpError(int(kind))
    raise {
        "transient": TransientError,
        "permanent": PermanentError,
        "invalid": InvalidOutputError,
        "timeout": JobTimeout,
        "cancelled": JobCancelled,
        "connection": ConnectionError,
        "unknown": RuntimeError,
    }[kind](text)


@task(max_attempts=3)
def permanent_with_attempts(kind: str) -> None:
    raise {"permanent": PermanentError, "invalid": InvalidOutputError, "timeout": JobTimeout}[kind]("final")


@task(max_attempts=2)
def rate_limited(times: int) -> int:
    journal("rate_limited", id=current_job().id, attempt=current_job().attempt)
    with open(os.environ["RELATA_TEST_JOURNAL"], "rb") as file:
        seen = sum(current_job().id.encode() in line for line in file)
    if seen <= times:
        raise RateLimited("slow down", retry_after=0.05)
    return current_job().attempt


@task(max_attempts=2)
def http_429() -> str:
    journal("http_429", id=current_job().id, attempt=current_job().attempt)
    with open(os.environ["RELATA_TEST_JOURNAL"], "rb") as file:
        first = sum(current_job().id.encode() in line for line in file) == 1
    if first:
        raise HttpError(429, "0.05")
    return "in"


@task(max_attempts=1)
def leak(kind: str) -> None:
    """Have the interpreter complain about a secret, in the ways it does."""
    if kind == "key":
        {}[SECRET]
    elif kind == "assert":
        raise AssertionError(f"got {SECRET}")
    elif kind == "type":
        raise TypeError(f"cannot use {SECRET}")
    elif kind == "attribute":
        getattr(object(), SECRET)
    elif kind == "index":
        raise IndexError(SECRET)
    elif kind == "name":
        raise NameError(SECRET)
    elif kind == "unicode":
        f"{SECRET}\u20ac".encode("ascii")
    elif kind == "int":
        int(SECRET)
    elif kind == "exit":
        raise SystemExit(SECRET)
    elif kind == "base":
        raise type("Odd", (BaseException,), {})(SECRET)
    elif kind == "cause":
        try:
            {}[SECRET]
        except KeyError as exc:
            raise PermanentError("the record is incomplete") from exc
    elif kind == "context":
        try:
            {}[SECRET]
        except KeyError:
            raise ValueError("the record is incomplete")  # noqa: B904
    elif kind == "group":
        raise getattr(builtins, "ExceptionGroup", _Several)("several", [KeyError(SECRET), ValueError("fine")])
    elif kind == "attribute_of_error":
        exc = PermanentError("with an attribute")
        exc.payload = SECRET
        raise exc
    elif kind == "url":
        raise PermanentError(f"cannot reach mongodb://user:{SECRET}@host/db")
    elif kind == "url_in_cause":
        try:
            raise ConnectionError(f"cannot reach mongodb://user:{SECRET}@host/db")
        except ConnectionError as exc:
            raise PermanentError("no database") from exc


class _Several(Exception):
    """Stands in for an exception group, before Python 3.11."""

    def __init__(self, text: str, inside: list[Exception]) -> None:
        super().__init__(text)
        self.exceptions = tuple(inside)


@task(bind=True, max_attempts=2)
def leak_retry(self: Any) -> None:
    """A panic handed to retry: it is shown by hooks, events and the log of the first attempt too."""
    try:
        {}[SECRET]
    except KeyError as exc:
        raise self.retry(exc=exc, countdown=0) from exc


@task(max_attempts=2)
def leak_transient() -> None:
    {}[SECRET]


@task(max_attempts=1, throws=(KeyError,))
def leak_expected() -> None:
    {}[SECRET]


# -- exceptions that no one can carry ------------------------------------------------------------


class StrRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


class ReduceRaises(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


class NeedsTwo(Exception):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(f"{first} and {second}")


class HasLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class RebuildKills(Exception):
    """Rebuilding it ends the process that does."""

    def __reduce__(self) -> Any:
        return os._exit, (77,)


class OddBase(BaseException):
    pass


@task(max_attempts=1)
def raise_awkward(kind: str) -> None:
    made: dict[str, Callable[[], BaseException]] = {
        "str_raises": StrRaises,
        "reduce_raises": lambda: ReduceRaises("text"),
        "needs_two": lambda: NeedsTwo(1, 2),
        "has_lock": lambda: HasLock("locked"),
        "huge": lambda: RuntimeError("x" * 30_000_000),
        "lambda_argument": lambda: RuntimeError(lambda: None),
        "local_class": lambda: type("Local", (Exception,), {})("local"),
        "base": lambda: OddBase("odd"),
        "exit": lambda: SystemExit(3),
        "interrupt": KeyboardInterrupt,
        "generator": GeneratorExit,
        "memory": MemoryError,
        "recursion": RecursionError,
        "stop": StopIteration,
        "surrogate": lambda: RuntimeError("half \ud800 a character"),
        "null": lambda: RuntimeError("a \x00 byte"),
    }
    if kind.startswith("nested_"):
        try:
            raise made[kind.removeprefix("nested_")]()
        except BaseException as exc:
            raise PermanentError("outer") from exc
    raise made[kind]()


@task(max_attempts=2)
def dies() -> None:
    os._exit(3)


# -- tasks in tasks -----------------------------------------------------------------------------


@task(bind=True)
def sends_another(self: Any) -> list[str]:
    inner = self.app.tasks["add"].delay(1, 2)
    return [self.request.id, inner.id]


@task(bind=True)
def waits_for_another(self: Any) -> Any:
    inner = self.app.tasks["add"].delay(1, 2)
    with allow_join_result():
        return inner.get(timeout=60)


@task(bind=True)
def waits_without_leave(self: Any) -> Any:
    return AsyncResult("whatever", app=self.app).get(timeout=1)


# -- the current job ----------------------------------------------------------------------------


@task(max_attempts=4)
def describes_itself() -> dict[str, Any]:
    job = current_job()
    return {
        "id": job.id,
        "type": job.type,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "fence": job.fence,
        "item_id": job.item_id,
        "lease_left_s": (job.lease_until - datetime.now(timezone.utc)) / timedelta(seconds=1),
    }


@task()
def progresses(path: str) -> str:
    current_job().progress(0.25, "reading")
    hold(path)
    current_job().progress(1, "done")
    return "done"


@task()
def progresses_wrongly() -> None:
    current_job().progress(25)


@task()
def checks(path: str) -> None:
    """Ask now and then whether it may go on, and write down what it is told."""
    with open(path, "w"):
        pass
    until = time.monotonic() + 30
    try:
        while time.monotonic() < until:
            current_job().check()
            time.sleep(0.02)
    except Exception as exc:
        journal("checks", id=current_job().id, told=type(exc).__name__)
        raise


@task()
def checks_then_cleans_up() -> None:
    """Stop when a check says so, and take a while over it."""
    try:
        while True:
            current_job().check()
            time.sleep(0.001)
    except JobTimeout:
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            time.sleep(0.001)
        journal("cleaned up", id=current_job().id)
        raise


# -- canvas -------------------------------------------------------------------------------------


@task()
def step(value: Any, more: int = 0) -> Any:
    journal("step", id=current_job().id, value=value, more=more)
    return value + more


@task()
def total(values: list[int]) -> int:
    journal("total", id=current_job().id, values=values)
    return sum(values)


@task(max_attempts=2)
def failing_step(value: Any = None) -> None:
    journal("failing_step", id=current_job().id)
    raise TransientError("no")


@task()
def once_failing(value: Any) -> Any:
    """Fails at its first fence, and not when it is retried by hand."""
    if current_job().fence == 1:
        raise PermanentError("not the first time")
    return value


@task()
def errback(*args: Any) -> None:
    journal("errback", args=[str(arg) for arg in args])


@task()
def errback_full(request: Any, exc: Any, traceback: Any) -> None:
    journal("errback_full", id=request.id, exc=repr(exc))


@task(bind=True)
def replaced(self: Any, kind: str, x: int) -> Any:
    journal("replaced", id=self.request.id)
    step_task = self.app.tasks["step"]
    if kind == "one":
        raise self.replace(step_task.s(x, 5))
    if kind == "chain":
        raise self.replace(step_task.s(x, 5) | step_task.s(7))
    raise self.replace(celery.group([step_task.s(x, 1), step_task.s(x, 2)], app=self.app))


# -- plain tasks --------------------------------------------------------------------------------


@task(base=celery.Task)
def plain_add(x: int, y: int) -> int:
    return x + y


@task(base=celery.Task, acks_late=True)
def plain_late(x: int, y: int) -> int:
    return x + y


@task(base=celery.Task, bind=True, default_retry_delay=0)
def plain_retry(self: Any, times: int) -> int:
    if self.request.retries < times:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@task(base=celery.Task)
def plain_fail() -> None:
    raise ValueError("plainly")


@task(base=celery.Task)
def plain_hold(path: str) -> str:
    return hold(path)


# -- bad results --------------------------------------------------------------------------------


@task()
def returns_bad(kind: str) -> Any:
    return {
        "object": object(),
        "big": "x" * 1_100_000 if kind == "big" else None,
        "nan": {"a": {1, 2}, "b": threading},
        "surrogate": "\ud800",
    }[kind]


# -- signals ------------------------------------------------------------------------------------


def _is_hooked(sender: Any) -> bool:
    return str(getattr(sender, "name", sender)).startswith("hooked")


def _on_prerun(sender: Any, task_id: str, task: Any, args: Any, kwargs: Any, **_: Any) -> None:
    if _is_hooked(sender):
        journal("task_prerun", id=task_id, args=list(args), kwargs=kwargs)


def _on_postrun(sender: Any, task_id: str, retval: Any, state: Any, **_: Any) -> None:
    if _is_hooked(sender):
        journal("task_postrun", id=task_id, retval=repr(retval), state=state)


def _on_success(sender: Any, result: Any, **_: Any) -> None:
    if _is_hooked(sender):
        journal("task_success", id=sender.request.id, result=result)


def _on_failure(sender: Any, task_id: str, exception: Any, args: Any, **_: Any) -> None:
    if _is_hooked(sender):
        journal("task_failure", id=task_id, exception=repr(exception), args=list(args))


def _on_retry(sender: Any, request: Any, reason: Any, einfo: Any, **_: Any) -> None:
    if _is_hooked(sender):
        journal("task_retry", id=request.id, reason=str(reason))


def _on_received(sender: Any, request: Any, **_: Any) -> None:
    if _is_hooked(request.task.name):
        journal("task_received", id=request.id)


def _on_revoked(sender: Any, request: Any, terminated: bool, expired: bool, **_: Any) -> None:
    if _is_hooked(sender):
        journal("task_revoked", id=request.id, terminated=terminated, expired=expired)


signals.task_prerun.connect(_on_prerun)
signals.task_postrun.connect(_on_postrun)
signals.task_success.connect(_on_success)
signals.task_failure.connect(_on_failure)
signals.task_retry.connect(_on_retry)
signals.task_received.connect(_on_received)
signals.task_revoked.connect(_on_revoked)

app = make_app(os.environ.get("RELATA_TEST_URI", "mongodb://localhost/unset"))
