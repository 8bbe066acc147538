"""The app of the storm: jobs that end in every way, and write down on their own what they saw.

Each process has a file of its own in ``CHAOS_FOLDER``, with one line of JSON for each begin and end, stamped by
the machine's wall clock, which is also MongoDB's here. ``CHAOS_CLOCK_S`` shifts the clock that Python shows to
everybody else in the process; ``CHAOS_PORTS`` (JSON) sends connections to a port to another one, so that workers
meet the proxy of a member where they believe to meet the member.
"""

from __future__ import annotations

import json
import os
import socket
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Queue

from relata_celery import LeasedTask, PermanentError, TransientError, acquire_ai, current_job

#: Of the limited jobs so many may run at a time, in the whole fleet.
SLOTS = 2


def wall_ns() -> int:
    """The machine's own clock, whatever this process is made to believe."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def _shift_clock(seconds: float) -> None:
    clock, clock_ns = time.time, time.time_ns
    time.time = lambda: clock() + seconds
    time.time_ns = lambda: clock_ns() + int(seconds * 1e9)


def _redirect(ports: dict[str, int]) -> None:
    connect = socket.socket.connect

    def redirected(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and str(address[1]) in ports:
            address = (address[0], ports[str(address[1])], *address[2:])
        connect(self, address)

    socket.socket.connect = redirected  # type: ignore[assignment,method-assign]


if shift := os.environ.get("CHAOS_CLOCK_S"):
    _shift_clock(float(shift))
if redirections := os.environ.get("CHAOS_PORTS"):
    _redirect(json.loads(redirections))


@lru_cache(maxsize=1)
def _journal(pid: int) -> int:
    path = Path(os.environ["CHAOS_FOLDER"]) / f"{pid}-{wall_ns()}.journal"
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(what: str) -> None:
    """One line in one write: a process that is killed leaves whole lines."""
    job = current_job()
    line = {"what": what, "id": job.id, "attempt": job.attempt, "fence": job.fence, "at": wall_ns()}
    os.write(_journal(os.getpid()), (json.dumps(line) + "\n").encode())


def work(seconds: float = 0.0) -> str:
    note("begin")
    time.sleep(seconds)
    note("end")
    return current_job().id


def flaky(failures: int) -> None:
    note("begin")
    if current_job().attempt <= failures:
        raise TransientError("not yet")
    note("end")


def broken() -> None:
    note("begin")
    raise PermanentError("never")


def too_slow() -> None:
    note("begin")
    time.sleep(60)


def step(before: str) -> str:
    note("begin")
    note("end")
    return before


def inside(seconds: float) -> None:
    """The part of which no more than so many may be under way."""
    note("enter")
    try:
        time.sleep(seconds)
    finally:
        note("leave")


def limited(seconds: float) -> None:
    note("begin")
    with acquire_ai():
        inside(seconds)
    note("end")


def admitted(seconds: float) -> None:
    """Of the ``ai`` queue: it has its slot from the claim on."""
    note("begin")
    inside(seconds)
    note("end")


def make_app(uri: str) -> Celery:
    made = Celery("chaos", broker=f"relata+{uri}", backend=f"relata+{uri}", task_cls=LeasedTask)
    made.conf.update(
        task_default_queue="default",
        task_queues=[Queue(name, routing_key=name) for name in ("default", "ai")],
        worker_hijack_root_logger=False,
        relata_max_attempts=50,
        relata_ai_concurrency=SLOTS,
        relata_retention_succeeded=86_400,
        relata_retention_failed=86_400,
    )
    for function in (work, flaky, broken, step, limited):
        made.task(name=function.__name__)(function)
    made.task(name="too_slow", timeout=1)(too_slow)
    made.task(name="admitted", queue="ai")(admitted)
    return made


if "RELATA_TEST_URI" in os.environ:
    app = make_app(os.environ["RELATA_TEST_URI"])
