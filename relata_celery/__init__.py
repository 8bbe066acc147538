"""Background jobs for Celery, kept in MongoDB as a persistent, leased queue.

Importing the package registers the broker ``relata+mongodb://`` with kombu. The ready-made app is
built on first use: ``from relata_celery import app, job``, or ``celery -A relata_celery worker``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery.signals import worker_init
from kombu.transport import TRANSPORT_ALIASES

from .domain.errors import (
    DuplicateJob,
    InvalidJob,
    InvalidOutputError,
    JobCancelled,
    JobError,
    JobNotFound,
    JobTimeout,
    LeaseLost,
    LimitTimeout,
    PermanentError,
    RateLimited,
    RelataError,
    TransientError,
)
from .domain.job import ErrorClass, Job, JobState

if TYPE_CHECKING:
    from celery import Celery

    from .ai import acquire_ai
    from .current import current_job
    from .jobstore import JobStore
    from .publishing import bulk
    from .task import LeasedTask, job

    app: Celery

TRANSPORT_ALIASES.setdefault("relata", "relata_celery.transport.transport:Transport")


def _on_worker_init(sender: Any = None, **kwargs: Any) -> None:
    from .worker.install import install_for_worker

    install_for_worker(sender)


worker_init.connect(_on_worker_init, weak=False, dispatch_uid="relata_celery")

#: Names that are loaded when first used, so that importing the package stays cheap.
_LAZY = {
    "JobStore": ".jobstore",
    "LeasedTask": ".task",
    "acquire_ai": ".ai",
    "bulk": ".publishing",
    "current_job": ".current",
    "job": ".task",
}


def __getattr__(name: str) -> Any:
    if name == "app":
        value: Any = import_module(".readymade", __name__).build_app()
    elif name in _LAZY:
        value = getattr(import_module(_LAZY[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


__all__ = [
    "DuplicateJob",
    "ErrorClass",
    "InvalidJob",
    "InvalidOutputError",
    "Job",
    "JobCancelled",
    "JobError",
    "JobNotFound",
    "JobState",
    "JobStore",
    "JobTimeout",
    "LeaseLost",
    "LeasedTask",
    "LimitTimeout",
    "PermanentError",
    "RateLimited",
    "RelataError",
    "TransientError",
    "acquire_ai",
    "app",
    "bulk",
    "current_job",
    "job",
]
