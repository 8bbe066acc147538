"""Repeating a call inside ``bulk()``.

Plain calls of one task in one block differ only in their ids and arguments, and most of what a publish costs
is spent by Celery and kombu on finding the same queue, options and headers again. So the first call of a task
goes the whole way, and what it published is the pattern of those that follow, where nobody looks on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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

#: What a message's body says of the canvas around a plain call.
_NOTHING_FOLLOWS = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def publish_in(collected: Bulk, task: Any, args: Any, kwargs: Any, publish: Callable[[], Any]) -> Any:
    """A plain call's ``AsyncResult``: published by ``publish``, or as an earlier call of the task in the block was.

    Raises what ``publish`` would: TypeError when the arguments do not fit the function, EncodeError when they
    cannot be encoded.
    """
    # What a worker's task publishes names it as its parent.
    alone = get_current_worker_task() is None
    if not (alone and isinstance(args or (), (list, tuple)) and isinstance(kwargs or {}, Mapping)):
        return publish()
    pattern = collected.patterns.get(task)
    if pattern is None:
        result = publish()
        published = collected.newest
        if published is not None and published[1].id == result.id and _may_be_repeated(published[1], task):
            collected.patterns[task] = published
        return result
    return _repeat(*pattern, collected, task, args or (), kwargs or {})


def _repeat(jobs: Jobs, job: NewJob, collected: Bulk, task: Any, args: Any, kwargs: Any) -> Any:
    if task.typing and hasattr(task, "__header__"):
        task.__header__(*args, **kwargs)
    job_id = uuid()
    _type, _encoding, body = dumps((args, kwargs, _NOTHING_FOLLOWS), "json")
    headers = {**job.message["headers"], "id": job_id, "root_id": job_id}
    if not task.sensitive:
        amqp, levels = task.app.amqp, task.app.conf.task_repr_maxlevels
        headers["argsrepr"] = _shown(args, amqp.argsrepr_maxsize, levels)
        headers["kwargsrepr"] = _shown(kwargs, amqp.kwargsrepr_maxsize, levels)
    properties = {**job.message["properties"], "correlation_id": job_id, "delivery_tag": uuid()}
    message = {**job.message, "body": body, "headers": headers, "properties": properties}
    write(jobs, replace(job, id=job_id, root_id=job_id, message=message), collected)
    result = task.AsyncResult(job_id)
    result.ignored = task.ignore_result
    return result


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


def _shown(value: Any, maxsize: int, levels: int) -> str:
    """Celery's short text of a call's arguments, cheaply where they are few and plain."""
    few = not value if isinstance(value, Mapping) else len(value) <= 10
    if few and maxsize >= 1000 and all(type(one) in _PLAIN for one in value):
        return repr(value)
    return str(saferepr(value, maxsize, levels))
