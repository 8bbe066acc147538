"""The one place that constructs: settings, stores and engines, and where an app finds its own.

Everything else is handed what it needs. What belongs to an app (its validated settings, its
worker) hangs on that app object; what belongs to a process (its MongoDB client) is kept by
:mod:`relata_celery.store.client`, one per process and URI, never made before a fork.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import random
from typing import TYPE_CHECKING, Any

from celery import _state

from .conf import Settings, load_settings
from .domain.errors import ConfigurationError, StoreError
from .domain.events import Event
from .domain.job import Claim, NewJob
from .domain.limits import AI, LimitSpec, as_rate
from .engine.claiming import Claimer
from .engine.held import HeldJob
from .engine.limiting import Limited
from .engine.ports import AfterFailure
from .engine.service import EngineSettings, LeaseService
from .engine.settling import Retention
from .private import private_tasks
from .store.client import Database, connect, masked
from .store.jobs import Jobs
from .store.limits import Limits
from .store.mailboxes import Mailboxes
from .store.pauses import HINT_QUEUE, Pauses
from .store.watch import Change, OnChange, Watch

if TYPE_CHECKING:
    from .attempt import Attempt
    from .worker.runtime import WorkerRuntime

logger = logging.getLogger("relata_celery")

URL_PREFIX = "relata+"

_SETTINGS_KEY = "_relata_settings"
_WORKER_KEY = "_relata_worker"


# -- stores -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stores:
    """The collections of one database, by use."""

    database: Database
    jobs: Jobs
    mailboxes: Mailboxes
    limits: Limits
    pauses: Pauses

    def watch_jobs(self, claimer: Claimer) -> Watch:
        """A change stream that tells this claimer of jobs."""

        def on_change(change: Change) -> None:
            if change.id is None:
                claimer.hint()
            elif change.taken:
                claimer.taken(change.id)
            elif change.run_at is None:
                claimer.added(change.id, 0.0)
            else:
                claimer.added(change.id, (change.run_at - self.database.clock.now()).total_seconds())

        return Watch.jobs(self.database, lambda: claimer.queues, on_change)

    def watch_mailboxes(self, queues: Callable[[], set[str]], on_change: OnChange) -> Watch:
        """A change stream that tells of messages in these mailboxes, and of what is paused or resumed."""
        return Watch.mailboxes(self.database, lambda: queues() | {HINT_QUEUE}, on_change)


def open_stores(uri: str, settings: Settings | None = None) -> Stores:
    """The stores of a MongoDB URI. Connects at first use. Without settings: :func:`settings_behind` it.

    Raises ConfigurationError when those are not valid.
    """
    database, settings = connect(uri), settings or settings_behind(uri)
    jobs = Jobs(
        database, default_max_attempts=settings.max_attempts, retention_failed_s=settings.retention_failed
    )
    return Stores(database, jobs, Mailboxes(database), Limits(database), Pauses(database))


def mongodb_uri(app: Any) -> str:
    """The MongoDB URI behind an app's broker URL; of several, that of the first, which is the one in use.

    Raises ConfigurationError when the app's broker is not ``relata+mongodb://...``.
    """
    url = _broker_url(app)
    if not url.startswith(URL_PREFIX):
        raise ConfigurationError(f"the app's broker is {masked(url)}; a leased task needs relata+mongodb://host/database")
    return url.removeprefix(URL_PREFIX)


def has_our_broker(app: Any) -> bool:
    return _broker_url(app).startswith(URL_PREFIX)


def _broker_url(app: Any) -> str:
    return _first(app.conf.broker_read_url or app.conf.broker_url)


def _first(urls: Any) -> str:
    """The broker URL in use; one may be given as text, several in a list or between semicolons."""
    if isinstance(urls, (list, tuple)):
        urls = urls[0] if urls else None
    return str(urls).split(";", 1)[0]


def stores_of(app: Any) -> Stores:
    return open_stores(mongodb_uri(app), settings_of(app))


# -- settings -----------------------------------------------------------------------------------


def settings_of(app: Any) -> Settings:
    """The app's settings, validated once. Raises ConfigurationError."""
    settings: Settings | None = app.__dict__.get(_SETTINGS_KEY)
    if settings is None:
        settings = load_settings(_relata_keys(app.conf), os.environ)
        app.__dict__[_SETTINGS_KEY] = settings
    return settings


def settings_behind(uri: str) -> Settings:
    """The settings of this process's app whose broker is ``uri``, the current app before others.

    A kombu transport knows its URI and no app. Where no app has that broker (kombu used by itself) it is
    the environment and the defaults that count.
    """
    for app in _apps_behind(uri):
        return settings_of(app)
    return load_settings({}, os.environ)


def private_tasks_behind(uri: str) -> Mapping[str, str]:
    """The private tasks (:mod:`relata_celery.private`) of this process's apps whose broker is ``uri``."""
    return {name: privacy for app in _apps_behind(uri) for name, privacy in private_tasks(app).items()}


def _apps_behind(uri: str) -> Iterator[Any]:
    for app in (_state.get_current_app(), *_state._get_active_apps()):
        if app.configured and _has_broker(app, uri):
            yield app


def _has_broker(app: Any, uri: str) -> bool:
    urls = (app.conf.broker_write_url, app.conf.broker_read_url)
    return any(_first(url).removeprefix(URL_PREFIX) == uri for url in urls)


def _relata_keys(conf: Any) -> Mapping[str, Any]:
    """The ``relata_*`` settings of a Celery configuration (a chain of mappings)."""
    found: dict[str, Any] = {}
    for mapping in reversed(conf.maps):
        for key in mapping:
            if isinstance(key, str) and key.lower().startswith("relata_"):
                found[key] = mapping[key]
    return found


# -- engines ------------------------------------------------------------------------------------


def owner_id() -> str:
    """Names this process as a lease's owner: the host for people, the random part for uniqueness.

    A host name, node name or pid comes back after a restart; a lease must never be taken for that of
    an earlier process.
    """
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}"


def engine_settings(settings: Settings) -> EngineSettings:
    lease_s = settings.lease_duration
    return EngineSettings(
        lease_s=lease_s,
        heartbeat_s=settings.heartbeat_period,
        poll_s=settings.poll_interval,
        claim_ahead_s=settings.claim_ahead,
        reap_period_s=settings.reap_period,
        drain_s=settings.drain_timeout,
        grace_s=settings.timeout_grace,
        retention=Retention(settings.retention_succeeded, settings.retention_failed),
    )


def limit_spec(settings: Settings) -> LimitSpec:
    """What the settings allow of AI calls, under any name of a limit that was not set by hand."""
    return LimitSpec(settings.ai_concurrency, as_rate(settings.ai_rate))


#: Queues whose jobs are admitted under a limit, and its name.
LIMITED_QUEUES = {"ai": AI}


def make_service(
    stores: Stores,
    settings: Settings,
    *,
    slots: Callable[[], int],
    deliver: Callable[[Sequence[HeldJob]], None],
    followup_to_job: Callable[[Mapping[str, Any]], NewJob],
    after_failure: AfterFailure | None = None,
    emit: Callable[[Event], None],
    on_overrun: Callable[[], None] = lambda: None,
) -> LeaseService:
    return LeaseService(
        stores.jobs,
        engine_settings(settings),
        owner=owner_id(),
        slots=slots,
        deliver=deliver,
        followup_to_job=followup_to_job,
        after_failure=after_failure,
        emit=emit,
        random=random,
        on_overrun=on_overrun,
        limited=Limited(stores.limits, LIMITED_QUEUES, {AI: limit_spec(settings)}),
        pauses=stores.pauses,
    )


def standalone_service(
    stores: Stores,
    *,
    slots: Callable[[], int],
    deliver: Callable[[Sequence[HeldJob]], None],
    followup_to_job: Callable[[Mapping[str, Any]], NewJob],
) -> LeaseService:
    """An engine for a plain kombu consumer, outside any Celery worker."""
    return make_service(
        stores,
        settings_behind(stores.database.uri),
        slots=slots,
        deliver=deliver,
        followup_to_job=followup_to_job,
        emit=log_event,
    )


def log_event(event: Event) -> None:
    """The log listener: one line per transition."""
    level = logging.getLevelName(event.level.upper())
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event.line())


# -- an app's worker ----------------------------------------------------------------------------


def bind_worker(app: Any, worker: WorkerRuntime) -> None:
    app.__dict__[_WORKER_KEY] = worker


def worker_of(app: Any) -> WorkerRuntime:
    worker: WorkerRuntime | None = app.__dict__.get(_WORKER_KEY)
    if worker is None:
        raise ConfigurationError("this process runs no worker of the app")
    return worker


# -- what an attempt may ask of the database ----------------------------------------------------


def record_progress(app: Any, attempt: Attempt, fraction: float | None, note: str | None) -> None:
    """Write progress from the executing process. A database that is away loses a note, not the job."""
    if not attempt.ticket.owner:
        return
    ticket = attempt.ticket
    note = None if note is None else str(note)[:200]
    try:
        stores_of(app).jobs.record_progress(Claim(ticket.job_id, ticket.fence, ticket.owner), fraction, note)
    except StoreError as exc:
        logger.warning("progress of job %s was not written: %s", ticket.job_id, exc)
