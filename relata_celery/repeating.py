"""Repeating a call inside ``bulk()``.

Plain calls of one task in one block differ only in their ids and arguments, and most of what a publish costs
is spent by Celery and kombu on finding the same queue, options and headers again. So the first call of a task
goes the whole way, and what it published is the pattern of those that follow, where nobody looks on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery import Celery, Task, signals
from celery._state import get_current_worker_task
from celery.backends.base import Backend
from celery.utils.saferepr import saferepr
from kombu.serialization import dumps
from kombu.utils.uuid import uuid

from .domain.job import NewJob
from .publishing import Bulk, write
from .store.jobs import Jobs

#: What a task's arguments must be for Python's own repr to be what Celery shows of them.
_PLAIN = (int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Pattern:
    """What the first call of a task in a block published. ``shown``: its arguments may be."""

    jobs: Jobs
    job: NewJob
    embed: Any
    shown: bool

    def repeat(self, task: Any, collected: Bulk, args: Any, kwargs: Any) -> Any:
        """Publish this call as the first one was; its ``AsyncResult``.

        Raises TypeError when the arguments do not fit the function, EncodeError when they cannot be encoded.
        """
        args, kwargs = args or (), kwargs or {}
        if task.typing and hasattr(task, "__header__"):
            task.__header__(*args, **kwargs)
        job_id = uuid()
        _type, _encoding, body = dumps((args, kwargs, self.embed), "json")
        message = self.job.message
        headers = {**message["headers"], "id": job_id, "root_id": job_id}
        if self.shown:
            amqp = task.app.amqp
            levels = task.app.conf.task_repr_maxlevels
            headers["argsrepr"] = _shown(args, amqp.argsrepr_maxsize, levels)
            headers["kwargsrepr"] = _shown(kwargs, amqp.kwargsrepr_maxsize, levels)
        properties = {**message["properties"], "correlation_id": job_id, "delivery_tag": uuid()}
        repeated = {**message, "body": body, "headers": headers, "properties": properties}
        write(self.jobs, replace(self.job, id=job_id, root_id=job_id, message=repeated), collected)
        result = task.AsyncResult(job_id)
        result.ignored = task.ignore_result
        return result


def pattern_of(task: Any, published: tuple[Jobs, NewJob] | None, job_id: str) -> Pattern | None:
    """The pattern that the job just published under ``job_id`` is; None when calls may differ in more."""
    if published is None or published[1].id != job_id:
        return None
    jobs, job = published
    times = (job.run_at, job.delay_s, job.expires_at)
    if any(time is not None for time in times) or job.root_id != job_id or job.parent_id is not None:
        return None
    if job.message["content-type"] != "application/json" or "compression" in job.message["headers"]:
        return None
    if not _every_call_is_alike(task):
        return None
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    return Pattern(jobs, job, embed, shown=not task.sensitive)


def _every_call_is_alike(task: Any) -> bool:
    """Whether nothing of the app's own looks at a call, or makes something of its arguments, on its way."""
    app = task.app
    listeners = (signals.before_task_publish, signals.after_task_publish)
    return not (
        any(signal.receivers for signal in listeners)
        or app.conf.task_send_sent_event
        or app.amqp.routes
        or task._dump_pydantic_arguments is not None
        or type(task).shadow_name is not Task.shadow_name
        or type(app).send_task is not Celery.send_task
        or type(app.backend).on_task_call is not Backend.on_task_call
    )


def alone() -> bool:
    """Whether no task of a worker is running here: what one publishes names it as its parent."""
    return get_current_worker_task() is None


def _shown(value: Any, maxsize: int, levels: int) -> str:
    """Celery's short text of a call's arguments, cheaply where they are few and plain."""
    few = not value if isinstance(value, Mapping) else len(value) <= 10
    if few and maxsize >= 1000 and all(type(one) in _PLAIN for one in value):
        return repr(value)
    return str(saferepr(value, maxsize, levels))
