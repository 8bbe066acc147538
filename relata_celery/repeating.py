"""Repeating a call.

Plain calls of one task differ only in their ids and arguments, and most of what a publish costs this process
is spent by Celery and kombu on finding the same queue, options and headers again: 1.5 to 2 ms of 2.5. So a
task's first plain call goes the whole way, and what it published is the pattern of those that follow, for as
long as nothing that Celery reads on that way has changed, and nobody looks on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import celery.app.base
import celery.app.task
import kombu.messaging
from celery import Task, signals
from celery._state import get_current_worker_task
from celery.backends.base import Backend
from celery.utils.saferepr import saferepr
from kombu.serialization import dumps
from kombu.utils.uuid import uuid

from .domain.job import NewJob
from .private import privacy_of_task, private_tasks, protected
from .publishing import PublishFailed, current_bulk, recorded, write
from .store.jobs import Jobs

#: What a task's arguments must be for Python's own repr to be what Celery shows of them.
_PLAIN = (int, float, bool, type(None))

#: What a message's body says of the canvas around a plain call.
_NOTHING_FOLLOWS = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What a plain call of a task published, and all that decided of it what may change while the program runs."""

    jobs: Jobs
    job: NewJob
    process: int
    options: Mapping[str, Any]
    configuration: Mapping[str, Any]

    def holds(self, task: Any) -> bool:
        return (
            self.options == _options_of(task)
            and self.configuration == task.app.conf.changes
            and self.process == os.getpid()
        )


class Repeater:
    """The plain calls of one task. Safe from any thread."""

    def __init__(self) -> None:
        self._pattern: _Pattern | None = None

    def publish(self, task: Any, args: Any, kwargs: Any, publish: Callable[[], Any]) -> Any:
        """A plain call's ``AsyncResult``: published by ``publish``, or as an earlier call of the task was.

        Raises what ``publish`` would: TypeError when the arguments do not fit the function, EncodeError when
        they cannot be encoded.
        """
        # What a worker's task publishes names it as its parent.
        alone = get_current_worker_task() is None
        if not (alone and isinstance(args or (), (list, tuple)) and isinstance(kwargs or {}, Mapping)):
            return publish()
        if _somebody_looks_on(task):
            return publish()
        pattern = self._pattern
        if pattern is not None and pattern.holds(task):
            try:
                return _repeat(pattern, task, args or (), kwargs or {})
            except PublishFailed:
                self._pattern = None  # with several brokers, Celery chooses another at the next call
                raise
        with recorded() as written:
            result = publish()
        if len(written) == 1 and written[0][1].id == result.id and _may_be_repeated(written[0][1], task):
            jobs, job = written[0]
            self._pattern = _Pattern(jobs, job, os.getpid(), _options_of(task), dict(task.app.conf.changes))
        return result


def _repeat(pattern: _Pattern, task: Any, args: Any, kwargs: Any) -> Any:
    if task.typing and hasattr(task, "__header__"):
        task.__header__(*args, **kwargs)
    job, job_id = pattern.job, uuid()
    _type, _encoding, body = dumps((args, kwargs, _NOTHING_FOLLOWS), "json")
    headers = {**job.message["headers"], "id": job_id, "root_id": job_id}
    if privacy_of_task(task) is None:
        amqp, levels = task.app.amqp, task.app.conf.task_repr_maxlevels
        headers["argsrepr"] = _shown(args, amqp.argsrepr_maxsize, levels)
        headers["kwargsrepr"] = _shown(kwargs, amqp.kwargsrepr_maxsize, levels)
    properties = {
        **job.message["properties"],
        "correlation_id": job_id,
        "reply_to": task.app.thread_oid,
        "delivery_tag": uuid(),
    }
    message = {**job.message, "body": body, "headers": headers, "properties": properties}
    message = dict(protected(message, private_tasks(task.app)))
    write(pattern.jobs, replace(job, id=job_id, root_id=job_id, message=message), current_bulk())
    result = task.AsyncResult(job_id)
    result.ignored = task.ignore_result
    return result


def _options_of(task: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(task).items() if name != "_repeater"}


def _somebody_looks_on(task: Any) -> bool:
    """Whether somebody looks at each call on its way: by a signal, or in the place of a function that it takes."""
    return bool(
        signals.before_task_publish.receivers
        or signals.after_task_publish.receivers
        or not _is_from(task.app.send_task, celery.app.base)
        or not _is_from(Task.apply_async, celery.app.task)
        or not _is_from(kombu.messaging.Producer.publish, kombu.messaging)
    )


def _is_from(function: Any, module: ModuleType) -> bool:
    """Whether the function is the module's own, and not one that was put in its place."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == module.__file__


def _may_be_repeated(job: NewJob, task: Any) -> bool:
    """Whether other calls of the task differ from this job in ids and arguments only."""
    times = (job.run_at, job.delay_s, job.expires_at)
    return (
        all(time is None for time in times)
        and job.root_id == job.id
        and job.parent_id is None
        and job.message["content-type"] == "application/json"
        and "compression" not in job.message["headers"]
        and _every_call_is_alike(task)
    )


def _every_call_is_alike(task: Any) -> bool:
    """Whether Celery makes nothing of a call's arguments on its way."""
    app = task.app
    return not (
        app.conf.task_send_sent_event
        or app.amqp.routes
        or task._dump_pydantic_arguments is not None
        or type(task).shadow_name is not Task.shadow_name
        or type(app.backend).on_task_call is not Backend.on_task_call
    )


def _shown(value: Any, maxsize: int, levels: int) -> str:
    """Celery's short text of a call's arguments, cheaply where they are few and plain."""
    few = not value if isinstance(value, Mapping) else len(value) <= 10
    if few and maxsize >= 1000 and all(type(one) in _PLAIN for one in value):
        return repr(value)
    return str(saferepr(value, maxsize, levels))
