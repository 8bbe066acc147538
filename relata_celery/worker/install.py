"""Gives an app's workers our bootsteps."""

from __future__ import annotations

from typing import Any

from relata_celery import bootstrap

#: By name, so that a producer does not import Celery's worker.
ENGINE = "relata_celery.worker.steps:Engine"
LEASES = "relata_celery.worker.steps:Leases"


def install(app: Any) -> None:
    """Have every worker of this app run the engine. May be called again."""
    app.steps["worker"].add(ENGINE)
    app.steps["consumer"].add(LEASES)


def install_for_worker(sender: Any = None, **kwargs: Any) -> None:
    """Celery's ``worker_init``: also an app of plain tasks needs the engine when its broker is ours."""
    if bootstrap.has_our_broker(sender.app):
        install(sender.app)
