"""Bootsteps: they start and stop, and decide nothing.

``Engine`` (worker) makes the runtime before the pool forks and waits for MongoDB after it;
``Leases`` (consumer) attaches the engine to each new connection and ends it when all has stopped.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict
from time import sleep
from typing import Any

from celery import bootsteps
from celery.worker.state import maybe_shutdown

from relata_celery import bootstrap
from relata_celery.domain.errors import ServerTooOld, StoreError, StoreUnavailable
from relata_celery.store.client import masked
from relata_celery.store.indexes import ensure_indexes

from .checks import StartRefused, check_configuration
from .forking import fork_between_log_lines
from .runtime import WorkerRuntime

logger = logging.getLogger("relata_celery")


class Engine(bootsteps.StartStopStep):
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        check_configuration(worker.app, worker)
        fork_between_log_lines()
        worker.relata = WorkerRuntime(worker.app, worker, bootstrap.settings_of(worker.app))
        _set_program_apart()

    def start(self, worker: Any) -> None:
        try:
            wait_for_mongodb(worker.relata.stores)
        except StartRefused as refused:
            logger.critical("%s", refused)
            raise SystemExit(refused.exit_code) from None

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:
        worker.relata.watch_processes(hub)

    def info(self, worker: Any) -> dict[str, Any]:
        """What ``celery inspect stats`` shows under ``relata``: how each background part fares, in seconds."""
        return {"relata": {part.name: asdict(part.vitals()) for part in worker.relata.service.parts}}

    def close(self, worker: Any) -> None:
        worker.relata.drain()

    def stop(self, worker: Any) -> None:
        worker.relata.drain()

    def terminate(self, worker: Any) -> None:
        worker.relata.terminate()


class Leases(bootsteps.StartStopStep):
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: Any) -> None:
        consumer.controller.relata.start(consumer.connection.transport)

    def info(self, consumer: Any) -> dict[str, Any]:
        """The connection in ``celery inspect stats``: Celery's own has the whole URI in it, with its password."""
        if consumer.connection is None:
            return {}
        broker = consumer.connection.info()
        shown = {"hostname": masked(broker["hostname"]), "alternates": [masked(url) for url in broker["alternates"]]}
        return {"broker": {**broker, **shown, "password": None}}

    def stop(self, consumer: Any) -> None:
        """Also called on every reconnect: the leases go on."""

    def shutdown(self, consumer: Any) -> None:
        consumer.controller.relata.stop()


def _set_program_apart() -> None:
    """Have the garbage collector pass over what is loaded now: modules, tasks, configuration.

    Jobs come and go by the thousand, and each full collection would go through the whole program for them: a
    tenth of a second, at 1,000 jobs/s every one and a half. Pool processes begin with the same, still shared.
    """
    gc.collect()
    gc.freeze()


def wait_for_mongodb(stores: bootstrap.Stores) -> None:
    """Return when MongoDB can be used, with its indexes in place; say so while it cannot be reached.

    Raises :class:`StartRefused` when waiting would not help: its version is too old, or this user may not.
    """
    pause_s = 1.0
    while True:
        maybe_shutdown()
        try:
            stores.database.require_supported()
            ensure_indexes(stores.database)
            stores.mailboxes.ensure_indexes()
            return
        except StoreUnavailable as exc:
            logger.error("MongoDB cannot be reached: %s; trying again in %.0f s", exc, pause_s)
        except ServerTooOld as exc:
            raise StartRefused(str(exc)) from exc
        except StoreError as exc:
            raise StartRefused(f"MongoDB at {masked(stores.database.uri)} cannot be used: {exc}") from exc
        sleep(pause_s)
        pause_s = min(pause_s * 2, 15.0)
