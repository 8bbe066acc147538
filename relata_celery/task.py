"""LeasedTask, the base class of every job, and the ``@job`` decorator.

A leased task is an ordinary Celery task: ``delay``, ``apply_async``, signatures, ``retry``, hooks
and signals work as Celery documents them. What differs is what stands behind it: its message is
kept in MongoDB until the job has ended, and its ending is decided by class of error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

from celery import Task
from kombu.exceptions import EncodeError, SerializerNotInstalled

from . import bootstrap
from .attempt import Attempt, run_detached
from .domain.errors import ConfigurationError, InvalidJob
from .domain.privacy import HIDDEN
from .interrupt import REQUEST_KEY
from .options import check_call_options, check_task_options, refuse_misspelt
from .private import privacy_of_task, register
from .repeating import Repeater
from .transport import capture
from .transport.envelope import HEADER
from .worker.checks import StartRefused
from .worker.install import install

#: Options of a job that travel with one call (``apply_async(..., item_id="doc-7")``).
CALL_OPTIONS = ("item_id", "tags", "unique_key", "max_attempts", "timeout")

#: Celery's own options of one call that say when and how long; checked before anything is made of them.
CALL_TIMES = ("countdown", "eta", "expires", "soft_time_limit", "time_limit")

#: All that is checked of one call.
CHECKED = (*CALL_OPTIONS, *CALL_TIMES, "compression")

#: Where ``@job(ai=True)`` jobs go unless they name a queue.
AI_QUEUE = "ai"


class InvalidArguments(InvalidJob, EncodeError):
    """The arguments of a call cannot be encoded; nothing was written."""


class LeasedTask(Task):
    """Base of tasks whose jobs are leased, renewed, fenced and retried by class of error.

    Options, as class attributes or in the decorator: ``max_attempts`` (executions in all, default
    ``relata_max_attempts``), ``timeout`` (seconds one attempt may take, default ``relata_job_timeout``),
    ``retry_on_timeout`` (default no), ``priority`` (0 to 9, 9 first), ``queue``, ``ai``, ``sensitive`` (arguments and
    results are kept out of events, the log, ``celery inspect`` and listings), ``encrypted`` (the same, and they
    are encrypted in the database, as is all that the job publishes).
    Celery's ``max_retries`` is understood: it means ``max_attempts`` - 1. Periods are seconds or a timedelta.
    A wrong or contradictory option raises StartRefused (a ConfigurationError) when the task is bound to its app.
    """

    abstract = True
    Request = "relata_celery.request:LeasedRequest"
    acks_late = True
    #: Ours decides; Celery's own default of 3 must not stop a job with more attempts.
    max_retries: ClassVar[int | None] = None

    max_attempts: int
    timeout: float | None = None
    retry_on_timeout: bool = False
    ai: bool = False
    sensitive: bool = False
    encrypted: bool = False
    job_queue: str | None = None
    job_priority: int | None = None

    @classmethod
    def bind(cls, app: Any) -> Any:
        # Celery warns that a task's own ``queue`` and ``priority`` will lose their meaning in 6.0;
        # they are options of ours, kept under names of ours.
        for option, ours in (("queue", "job_queue"), ("priority", "job_priority")):
            if option in cls.__dict__:
                stated = cls.__dict__[option]
                delattr(cls, option)
                # A class is bound more than once, and Celery puts its default where nothing stands.
                if stated is not None and ours not in cls.__dict__:
                    setattr(cls, ours, stated)
        if privacy_of_task(cls) is not None:
            cls.resultrepr_maxsize = 0  # Celery then shows "..." and nothing of the value
        if not cls.__dict__.get("_options_checked"):
            _refuse_unknown(cls)
        return super().bind(app)

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Install the worker's part in the app, and check the task's options once."""
        install(app)
        if getattr(cls, "name", None):
            register(app, cls)
        if cls.__dict__.get("_options_checked") or not getattr(cls, "name", None):
            return
        try:
            stated = {option: getattr(cls, attribute, None) for option, attribute in _OPTIONS.items()}
            checked = check_task_options(cls.name, stated)
            cls._settle_attempts(bootstrap.settings_of(app).max_attempts)
        except ConfigurationError as exc:
            raise StartRefused(str(exc)) from exc
        for option in _PERIODS:
            if (seconds := getattr(checked, option)) is not None:
                setattr(cls, option, seconds)
        cls._options_checked = True

    @classmethod
    def _settle_attempts(cls, default: int) -> None:
        """One counter behind two names, Celery's retries and our attempts; the nearest class that states one wins."""
        attempts = default
        for base in cls.__mro__[: cls.__mro__.index(LeasedTask)]:
            stated, retries = base.__dict__.get("max_attempts"), base.__dict__.get("max_retries")
            if stated is not None and retries is not None and retries != stated - 1:
                raise ConfigurationError(
                    f"task {cls.name}: max_retries is {retries}, must be max_attempts ({stated}) less one, or left out"
                )
            if stated is None and "max_retries" in base.__dict__:
                stated = UNLIMITED if retries is None else retries + 1
            if stated is not None:
                attempts = stated
                break
        cls.max_attempts, cls.max_retries = attempts, attempts - 1

    # -- publishing -----------------------------------------------------------------------------

    @cached_property
    def _repeater(self) -> Repeater:
        return Repeater()

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        **options: Any,
    ) -> Any:
        """Publish a job; return its ``AsyncResult``.

        Besides Celery's options: ``item_id`` (what the job is about, searchable), ``tags``,
        ``unique_key`` (at most one unfinished job has it), ``max_attempts``, ``timeout``. Periods
        (``timeout``, ``countdown``, ``expires``, the time limits) are seconds or a timedelta.
        The same ``task_id`` twice is one job.

        Raises, with nothing written: :class:`InvalidJob`, which names the job type, for what the queue cannot
        take (arguments that are no JSON, more than 15 MiB, an option, priority or time that is wrong or out of
        range); :class:`DuplicateJob` when an unfinished job holds the ``unique_key``; TypeError when the
        arguments do not fit the function. Raises ``kombu.exceptions.OperationalError``, within ten seconds,
        when MongoDB cannot be reached or refuses. Inside ``bulk()`` what the database says comes later.
        """
        try:
            if task_id is not None or options:
                return self._publish(args, kwargs, task_id, options)
            return self._repeater.publish(self, args, kwargs, lambda: self._publish(args, kwargs, None, {}))
        except (EncodeError, SerializerNotInstalled) as exc:
            raise InvalidArguments(f'job type "{self.name}": its arguments cannot be encoded: {exc}') from exc

    def _publish(self, args: Any, kwargs: Any, task_id: str | None, options: dict[str, Any]) -> Any:
        given = {key: options.pop(key) for key in CHECKED if options.get(key) is not None}
        checked = check_call_options(self.name, given)
        refuse_misspelt(self.name, options, CHECKED)
        ours = {key: checked.pop(key) for key in CALL_OPTIONS if key in checked}
        options.update(checked)
        headers = dict(options.pop("headers", None) or {})
        # What a first publish said goes on to hold for those that repeat it (retry, replace).
        said = headers.get(HEADER)
        stored: dict[str, Any] = {
            "max_attempts": self.max_attempts, **(said if isinstance(said, Mapping) else {}), **ours
        }  # fmt: skip
        if options.get("countdown") is not None:
            stored["delay_s"] = options["countdown"]
        else:
            stored.pop("delay_s", None)
        headers[HEADER] = stored
        if not options.get("queue") and not options.get("exchange") and not options.get("routing_key"):
            queue = self.job_queue or (AI_QUEUE if self.ai else None)
            if queue is not None:
                options["queue"] = queue
        if options.get("priority") is None and self.job_priority is not None:
            options["priority"] = self.job_priority
        captured = capture.current.get()
        if privacy_of_task(self) is not None or (captured is not None and captured.encrypted):
            options.update(argsrepr=HIDDEN, kwargsrepr=HIDDEN)
        return super().apply_async(args, kwargs, task_id=task_id, headers=headers, **options)

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, queue: str | None = None, **options: Any
    ) -> Any:
        request = self.request if request is None else request
        # Celery takes every key of the request that it does not know for a header of the caller's.
        headers = {key: value for key, value in (request.headers or {}).items() if key != REQUEST_KEY}
        options["headers"] = {**headers, **(options.get("headers") or {})}
        return super().signature_from_request(request, args, kwargs, queue=queue, **options)

    # -- executing ------------------------------------------------------------------------------

    def retry(self, *args: Any, max_retries: int | None = None, **options: Any) -> Any:
        """Run the job again, as Celery's ``Task.retry``; it is put back when this attempt is settled.

        Without ``max_retries`` the job's own ``max_attempts`` is the limit. Raises InvalidJob for a wrong
        ``countdown`` or ``eta``.
        """
        given = {key: options.pop(key) for key in CALL_TIMES if options.get(key) is not None}
        options.update(check_call_options(self.name, given))
        attempt: Attempt | None = self.request.get(REQUEST_KEY)
        if attempt is None:
            return super().retry(*args, max_retries=max_retries, **options)
        if max_retries is not None:
            attempt.retry_limit = max_retries + 1
        else:
            max_retries = attempt.ticket.max_attempts - 1
        attempt.retries_spent = (self.request.retries or 0) + 1 > max_retries
        try:
            return super().retry(*args, max_retries=max_retries, **options)
        finally:
            # Celery remembers the limit on the task, where it would reach the next job.
            self.__dict__.pop("override_max_retries", None)

    def replace(self, sig: Any) -> Any:
        """Put a signature in this job's place, as Celery's ``Task.replace``.

        What it publishes is part of this attempt's outcome: it happens once, and only if that is accepted.
        """
        attempt: Attempt | None = self.request.get(REQUEST_KEY)
        if attempt is None:
            return super().replace(sig)
        return attempt.replacing(lambda: super(LeasedTask, self).replace(sig))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        attempt: Attempt | None = request.get(REQUEST_KEY)
        if attempt is not None and not attempt.entered:
            return attempt.execute(self, args, kwargs)
        if not request.called_directly and attempt is None:
            return run_detached(self, args, kwargs)
        return super().__call__(*args, **kwargs)


#: The options of a job, and the class attributes that hold them.
_OPTIONS = {
    "queue": "job_queue",
    "priority": "job_priority",
    "max_attempts": "max_attempts",
    "timeout": "timeout",
    "retry_on_timeout": "retry_on_timeout",
    "ai": "ai",
    "sensitive": "sensitive",
    "encrypted": "encrypted",
    "max_retries": "max_retries",
    "soft_time_limit": "soft_time_limit",
    "time_limit": "time_limit",
    "default_retry_delay": "default_retry_delay",
    "expires": "expires",
}

#: Those that may be given as a timedelta: from there on they are what the check made of them.
_PERIODS = ("timeout", "soft_time_limit", "time_limit", "default_retry_delay", "expires")

#: What Celery's decorator takes or makes besides the attributes of its Task class.
_DECORATOR = frozenset(
    "app run _decorated max_attempts autoretry_for dont_autoretry_for retry_kwargs retry_backoff "
    "retry_backoff_max retry_jitter pydantic pydantic_strict pydantic_context pydantic_dump_kwargs "
    "throws lazy shared name base bind".split()
)


def _refuse_unknown(cls: type) -> None:
    """Refuse an option of the decorator that neither Celery nor we know: it is a typing error.

    Attributes of your own belong on a subclass of LeasedTask.
    """
    if "_decorated" not in cls.__dict__:
        return
    parents = cls.__mro__[1:]
    for option in cls.__dict__:
        if option.startswith("_") or option in _DECORATOR or any(option in base.__dict__ for base in parents):
            continue
        known = [*_OPTIONS, *_DECORATOR, *(key for key in Task.__dict__ if not key.startswith("_"))]
        near = difflib.get_close_matches(option, known, 1)
        hint = f"; did you mean {near[0]}?" if near else "; attributes of your own belong on a subclass of LeasedTask"
        raise StartRefused(f"task {cls.__dict__.get('name')}: no such option {option!r}{hint}")


#: Attempts of a task that states ``max_retries=None``, which in Celery means "for ever".
UNLIMITED = 1_000_000


def job(*args: Any, **options: Any) -> Any:
    """Register a function as a job of the ready-made app: ``@job`` or ``@job(queue="mail", timeout=60)``.

    In an app of your own use ``@app.task(base=LeasedTask, ...)``, or give the app
    ``task_cls="relata_celery:LeasedTask"``; the options are the same.
    """
    from .readymade import ready_made_app

    app: Any = options.pop("app", None) or ready_made_app()
    options.setdefault("base", LeasedTask)

    def register(function: Callable[..., Any]) -> Any:
        return app.task(**options)(function)

    if len(args) == 1 and callable(args[0]) and not isinstance(args[0], type):
        return register(args[0])
    if args:
        raise TypeError("@job takes options by keyword only, as in @job(queue='mail')")
    return register
