"""What must hold before a worker starts, and what is only worth a warning."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import Any

import click

from relata_celery import bootstrap
from relata_celery.conf import MAX_TIMEOUT_S, environment_warnings
from relata_celery.domain.errors import ConfigurationError, MissingKey
from relata_celery.domain.privacy import ENCRYPTED
from relata_celery.private import private_tasks
from relata_celery.sealing import Keyring

logger = logging.getLogger("relata_celery")

SAFE_CONTENT = frozenset({"json", "application/json", "text/plain", "msgpack", "application/x-msgpack"})
UNSAFE_CONTENT = frozenset(
    {"pickle", "application/x-python-serialize", "yaml", "application/x-yaml", "application/data"}
)


class StartRefused(ConfigurationError, click.ClickException):
    """The worker does not start; the command line prints the reason as one error."""

    def __init__(self, message: str) -> None:
        click.ClickException.__init__(self, message)


def check_configuration(app: Any, worker: Any) -> None:
    """Refuse what is wrong, warn of what has no effect. Raises :class:`StartRefused`."""
    try:
        settings = bootstrap.settings_of(app)
        bootstrap.mongodb_uri(app)
        _check_pool(worker)
        if settings.metrics_port is not None and find_spec("prometheus_client") is None:
            raise ConfigurationError(
                'metrics_port is set, but prometheus-client is not installed: pip install "relata_celery[metrics]"'
            )
        for name in ("accept_content", "result_accept_content"):
            _check_content(name, app.conf.get(name), settings.allow_unsafe_content)
        keys = Keyring.from_environment()
    except ConfigurationError as exc:
        raise StartRefused(str(exc)) from exc
    for line in (*environment_warnings(os.environ), *_without_effect(app), *_without_key(app, keys)):
        logger.warning("%s", line)


def _check_pool(worker: Any) -> None:
    pool = worker.pool_cls
    if pool.is_green:
        raise ConfigurationError(
            "a gevent or eventlet pool cannot keep the time limits of leased jobs: use -P prefork, threads or solo"
        )
    if worker.autoscale and not pool.uses_semaphore:
        raise ConfigurationError(
            "--autoscale needs a pool of processes (-P prefork); threads and solo cannot grow: leave it out, "
            "and give threads their number with -c"
        )
    limits = {"task_time_limit": worker.time_limit, "task_soft_time_limit": worker.soft_time_limit}
    for name, limit in limits.items():
        if limit is not None and (not isinstance(limit, (int, float)) or not 0 <= limit <= MAX_TIMEOUT_S):
            raise ConfigurationError(f"{name} is {limit!r}, must be seconds from 0 (no limit) to {MAX_TIMEOUT_S:.0f}")


def _check_content(name: str, accepted: Any, allowed: bool) -> None:
    unsafe = sorted(set(accepted or ()) & UNSAFE_CONTENT)
    if unsafe and not allowed:
        raise ConfigurationError(
            f"{name} accepts {', '.join(unsafe)}: whoever can write to the database could run code in the worker; "
            "use json, or set relata_allow_unsafe_content"
        )


def _without_key(app: Any, keys: Keyring) -> list[str]:
    wanted = sorted(name for name, privacy in private_tasks(app).items() if privacy == ENCRYPTED)
    try:
        if wanted or keys.names:
            keys.require()
    except MissingKey as exc:
        return [f"encrypted jobs ({', '.join(wanted[:5])}) are not run here, and wait: {exc}"]
    return []


def _without_effect(app: Any) -> list[str]:
    conf, lines = app.conf, []
    if conf.worker_prefetch_multiplier != 4:
        lines.append("worker_prefetch_multiplier")
    if conf.worker_disable_prefetch:
        lines.append("worker_disable_prefetch")
    if conf.task_reject_on_worker_lost:
        lines.append("task_reject_on_worker_lost")
    if "visibility_timeout" in (conf.broker_transport_options or {}):
        lines.append("visibility_timeout")
    warnings = []
    if lines:
        warnings.append(
            f"{', '.join(lines)}: without effect for leased tasks; their lease and relata_claim_ahead decide"
        )
    limited = sorted(name for name, task in app.tasks.items() if getattr(task, "rate_limit", None))
    if limited:
        warnings.append(f"rate_limit counts per worker, not per fleet, and is set on: {', '.join(limited[:5])}")
    return warnings
