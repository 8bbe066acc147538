"""What follows the end of a job, as Celery's canvas says it: links, chain steps, chord bodies, errbacks.

Nothing is published here: what Celery's own code publishes is collected as follow-ups of the outcome. The
engine publishes them when the outcome has been accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from celery.app.task import Context
from celery.canvas import group, maybe_signature
from celery.utils.functional import arity_greater
from kombu.serialization import loads as loads_message
from kombu.serialization import prepare_accept_content

from . import bootstrap
from .domain.errors import JobError
from .domain.outcome import ErrorInfo, never_run
from .domain.privacy import ENCRYPTED
from .domain.privacy import HEADER as PRIVACY
from .domain.redact import cap
from .sealing import opened_message
from .transport.capture import Capture
from .transport.envelope import HEADER

logger = logging.getLogger("relata_celery")

Followups = tuple[Mapping[str, Any], ...]


# -- a message's body ----------------------------------------------------------------------------


def decode_body(app: Any, body: Any, content_type: str | None, content_encoding: str | None) -> Any:
    if not content_type:
        return body
    accept = prepare_accept_content(app.conf.accept_content)
    return loads_message(body, content_type, content_encoding, accept=accept)


def checked_body(body: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    """Arguments, keywords, and what is to follow; ValueError when a body edited by hand holds none of these."""
    args, kwargs, embed = body
    embed = embed or {}
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping) or not isinstance(embed, Mapping):
        raise ValueError("its body is not a list of arguments, keywords and follow-ups")
    for name in ("callbacks", "errbacks", "chain"):
        steps = embed.get(name) or []
        if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
            raise ValueError(f"its {name} are not a list of signatures")
    if not isinstance(embed.get("chord") or {}, Mapping):
        raise ValueError("its chord is not a signature")
    return args, kwargs, embed


# -- after a success -----------------------------------------------------------------------------


def dispatch_success(task: Any, embed: Mapping[str, Any], value: Any) -> None:
    """Publish links and the next chain step, as Celery's tracer does after a success."""
    request = task.request
    options = {"parent_id": request.id, "root_id": request.root_id or request.id}
    if task.app.conf.task_inherit_parent_priority:
        options["priority"] = (request.delivery_info or {}).get("priority")
    signatures = [maybe_signature(callback, app=task.app) for callback in embed.get("callbacks") or ()]
    single = [signature for signature in signatures if not isinstance(signature, group)]
    for signature in signatures:
        if isinstance(signature, group):
            signature.apply_async((value,), **options)
    if len(single) > 1:
        group(single, app=task.app).apply_async((value,), **options)
    elif single:
        single[0].apply_async((value,), **options)
    chain = embed.get("chain")
    if chain:
        maybe_signature(chain[-1], app=task.app).apply_async((value,), chain=chain[:-1], **options)
    chord = embed.get("chord")
    if chord:
        request.chord = chord
        try:
            task.backend.on_chord_part_return(request, "SUCCESS", value)
        finally:
            request.chord = None


# -- after a failure -----------------------------------------------------------------------------


def failure_followups(task: Any, request: Any, embed: Mapping[str, Any], info: ErrorInfo) -> Followups:
    """What a final failure calls for: its errbacks, and the failure of the steps that waited for it.

    Errbacks that take more than an id are called here and now, as in Celery.
    """
    published = _errbacks(task.backend, request, embed.get("errbacks") or (), info)
    return (*published, *_failed_steps(task.app, request, embed.get("chain") or (), info))


def _errbacks(backend: Any, request: Any, errbacks: Sequence[Any], info: ErrorInfo) -> list[dict[str, Any]]:
    capture = Capture(request.id)
    capture.encrypted = is_encrypted(request)
    with capture.collecting():
        for errback in errbacks:
            _call(backend, request, errback, info)
    return capture.followups


def _call(backend: Any, request: Any, errback: Any, info: ErrorInfo) -> None:
    """Call or publish one errback as Celery does. One that cannot be costs only itself."""
    request.errbacks = [errback]
    try:
        backend._call_task_errbacks(request, JobError(info.text), info.traceback)
    except Exception as exc:
        logger.error("job %s: an errback cannot be published: %s", request.id, type(exc).__name__)
    finally:
        request.errbacks = None


def _failed_steps(app: Any, request: Any, chain: Any, info: ErrorInfo) -> list[Mapping[str, Any]]:
    """The rest of a chain, as jobs that have failed: whoever waits for its result waits no longer."""
    told = ErrorInfo(
        info.error_class,
        cap(f"not run, as a step before it failed: {info.text}"),
        info.exception,
        info.module,
        info.args_json,
    )
    failure = never_run(told, bootstrap.settings_of(app).retention_failed, replaceable=True)
    queue = _mapping(request.delivery_info).get("routing_key") or app.conf.task_default_queue
    steps: list[Mapping[str, Any]] = []
    for step in chain:
        options = _mapping(step.get("options"))
        if step.get("task") == "celery.chord":
            options = _mapping(_mapping(_mapping(step.get("kwargs")).get("body")).get("options")) or options
        if not options.get("task_id"):
            continue
        message = {
            "body": "[[], {}, {}]",
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": {
                "id": options["task_id"],
                "task": step.get("task"),
                "root_id": request.root_id,
                "parent_id": request.id,
                HEADER: {},
            },
            "properties": {},
        }
        own_queue = options.get("queue")
        steps.append(
            {"queue": own_queue if isinstance(own_queue, str) else queue, "message": message, "failure": failure}
        )
    return steps


def is_encrypted(request: Any) -> bool:
    """Whether the message of this request (Celery's context) was encrypted, or says that it should have been."""
    return bool(getattr(request, PRIVACY, None) == ENCRYPTED)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class StoredFailures:
    """What the failure of a job calls for, read from its stored message.

    For jobs that fail without an attempt to say so: their lease ran out, or they could not be published. The
    job's type need not be known here (fulfils :class:`relata_celery.engine.ports.AfterFailure`).
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    def followups(self, message: Mapping[str, Any], queue: str, error: ErrorInfo) -> Followups:
        request, embed = self._read(message, queue)
        published = [errback for errback in embed.get("errbacks") or () if not self._is_called(errback)]
        captured = _errbacks(self._app.backend, request, published, error)
        return (*captured, *_failed_steps(self._app, request, embed.get("chain") or (), error))

    def tell(self, message: Mapping[str, Any], error: ErrorInfo) -> None:
        request, embed = self._read(message, "")
        for errback in embed.get("errbacks") or ():
            if self._is_called(errback):
                _call(self._app.backend, request, errback, error)

    def _read(self, message: Mapping[str, Any], queue: str) -> tuple[Context, Mapping[str, Any]]:
        """The job's request as Celery's code wants it, and what is to follow; raises when it is no message."""
        message = opened_message(message)
        body = decode_body(
            self._app, message["body"], message.get("content-type"), message.get("content-encoding")
        )
        args, kwargs, embed = checked_body(body)
        headers, properties = message["headers"], _mapping(message.get("properties"))
        delivery_info = {"routing_key": queue, **_mapping(properties.get("delivery_info"))}
        known = {"args": args, "kwargs": kwargs, "delivery_info": delivery_info, "errbacks": None}
        return Context({**headers, **known}), embed

    def _is_called(self, errback: Any) -> bool:
        """Whether Celery calls this errback with request, error and traceback, where the failure is noticed.

        The rule of ``Backend._call_task_errbacks``, which has no name there.
        """
        signature = maybe_signature(errback, app=self._app)
        task = self._app.tasks.get(signature.task)
        header = getattr(task, "__header__", None)
        if header is None or isinstance(header, partial):
            return False
        greater = getattr(self._app.backend, "_errback_arity_greater", None)
        return bool(arity_greater(header, 1) if greater is None else greater(signature, 1))
