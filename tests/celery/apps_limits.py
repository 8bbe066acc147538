"""The app of the tests of limits: jobs that write down when their part of the work began and ended.

Each line of a process's own file is ``begin|end <group> <job> <time>`` by the system-wide monotonic clock.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery
from kombu import Queue

from relata_celery import LeasedTask, acquire_ai, current_job


def make_app(uri: str) -> Celery:
    made = Celery("limits", broker=f"relata+{uri}", backend=f"relata+{uri}", task_cls=LeasedTask)
    made.conf.update(
        task_default_queue="default",
        task_queues=[Queue(name, routing_key=name) for name in ("default", "ai")],
        worker_hijack_root_logger=False,
    )
    for function, options in TASKS:
        made.task(name=function.__name__, **options)(function)
    return made


def note(what: str, group: str) -> None:
    path = Path(os.environ["RELATA_TEST_FOLDER"]) / f"{os.getpid()}.notes"
    with path.open("a") as file:
        file.write(f"{what} {group} {current_job().id} {time.monotonic()}\n")


def work(group: str, seconds: float) -> None:
    note("begin", group)
    time.sleep(seconds)
    note("end", group)


def ask_model(seconds: float = 0.2) -> None:
    work("ai", seconds)


def ask_model_long_once(seconds: float) -> None:
    """Takes this long in its first attempt, and no time in the next."""
    work("ai", seconds if current_job().attempt == 1 else 0.0)


def plain(seconds: float = 0.0) -> None:
    work("plain", seconds)


def with_slot(seconds: float = 0.2) -> float:
    with acquire_ai() as slot:
        work("slot", seconds)
    return slot.waited_s


def nested(seconds: float = 0.05) -> None:
    with acquire_ai(timeout=5), acquire_ai(timeout=5):
        work("nested", seconds)


def impatient(timeout: float = 0.2) -> None:
    with acquire_ai(timeout=timeout):
        work("impatient", 0.0)


def forgetful() -> None:
    """Leaves the slot to the end of the job."""
    current_job().kept = acquire_ai()  # type: ignore[attr-defined]


TASKS = [
    (ask_model, {"ai": True}),
    (ask_model_long_once, {"ai": True}),
    (plain, {}),
    (with_slot, {}),
    (nested, {"ai": True}),
    (impatient, {}),
    (forgetful, {}),
]

app = make_app(os.environ.get("RELATA_TEST_URI", "mongodb://127.0.0.1/unused"))
