"""The ready-made app: ``celery -A relata_celery worker`` with nothing else to configure.

Built on first use, configured when Celery first asks for a setting: importing a module of jobs
starts no server and opens no connection. ``RELATA_MONGODB_URI`` names the database (unset: an
embedded MongoDB is started), ``RELATA_IMPORTS`` the modules with jobs, comma-separated.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from celery import Celery
from kombu import Queue

from .task import AI_QUEUE, LeasedTask

DEFAULT_QUEUE = "default"


def ready_made_app() -> Celery:
    """The one ready-made app of this process."""
    package: Any = sys.modules["relata_celery"]
    app: Celery = package.app
    return app


def build_app() -> Celery:
    app = Celery("relata_celery", task_cls=LeasedTask)
    app.add_defaults(configuration)
    return app


def database_uri() -> str:
    """``RELATA_MONGODB_URI``, else the embedded server's (started if need be)."""
    uri = os.environ.get("RELATA_MONGODB_URI", "").strip()
    if uri:
        return uri.removeprefix("relata+")
    from . import embedded

    return embedded.uri()


def configuration() -> dict[str, Any]:
    """What Celery is told, read from the environment."""
    url = f"relata+{database_uri()}"
    imports = os.environ.get("RELATA_IMPORTS", "").split(",")
    return {
        "broker_url": url,
        "result_backend": url,
        "imports": tuple(name.strip() for name in imports if name.strip()),
        "task_default_queue": DEFAULT_QUEUE,
        "task_queues": tuple(Queue(name, routing_key=name) for name in (DEFAULT_QUEUE, AI_QUEUE)),
        "broker_connection_retry_on_startup": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
    }
