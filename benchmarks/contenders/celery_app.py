"""The Celery app of every contender that is a Celery broker; its environment says which."""

from __future__ import annotations

import importlib
from typing import Any

from celery import Celery
from celery.signals import worker_ready

from benchmarks import tally

from .base import setting

if setting("IMPORT"):
    importlib.import_module(setting("IMPORT"))

QUEUE = setting("QUEUE")

app = Celery("benchmarks", broker=setting("BROKER"), backend=setting("BACKEND") or None)
if setting("TASK_CLASS"):
    app.task_cls = setting("TASK_CLASS")
app.conf.update(
    task_default_queue=QUEUE,
    task_ignore_result=setting("RESULTS") != "1",
    broker_connection_retry_on_startup=True,
)
if not setting("TASK_CLASS"):
    app.conf.task_acks_late = True  # a leased task always is


@app.task(name="noop")
def noop(sent_ns: int = 0) -> int:
    tally.ran(sent_ns)
    return 1


@worker_ready.connect(weak=False)
def _ready(**kwargs: Any) -> None:
    tally.ready()
