"""The app whose workers the recovery tests kill, and the stage they do it on.

Every handler writes a line when it begins and when it ends, to a file that no database knows of: how
often a job really ran is counted there. ``hold`` runs until the test opens its gate, so no test has
to guess how long a job takes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import task_success
from celery.worker.control import control_command

from relata_celery import JobStore, LeasedTask, current_job
from relata_celery.domain.errors import StoreUnavailable
from relata_celery.domain.job import Job, JobState
from relata_celery.store.client import connect
from tests.waiting import wait_until
from tests.workers import Worker, start_worker

APP = "tests.celery.apps_recovery"
#: The file that handlers write to; gates are files beside it.
JOURNAL = "RELATA_TEST_JOURNAL"


# -- the handlers --------------------------------------------------------------------------------


def note(what: str, request: Any = None) -> None:
    """One line of the journal, in one write: what, job, attempt, process. Hooks give Celery's request."""
    job_id, attempt = (
        (request.id, request.retries + 1) if request else (current_job().id, current_job().attempt)
    )
    line = f"{what} {job_id} {attempt} {os.getpid()}\n"
    descriptor = os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def work(seconds: float = 0.0) -> int:
    note("begin")
    time.sleep(seconds)
    note("end")
    return os.getpid()


def plain_sleep(seconds: float) -> str:
    """A task that is not leased, with Celery's own soft time limit."""
    try:
        time.sleep(seconds)
    except SoftTimeLimitExceeded:
        return "soft limit"
    return "slept"


def hold(gate: str, number: int = 0) -> int:
    """Run until the test opens the gate, or that of this execution (``gate-1``, ``gate-2``, ...)."""
    note("begin")
    folder = Path(os.environ[JOURNAL]).parent
    ways_out = [folder / f"{gate}.open", folder / f"{gate}-{current_job().attempt}.open"]
    try:
        while not any(way_out.exists() for way_out in ways_out):
            time.sleep(0.02)
        note("end")
    except BaseException as exc:  # in a thread it may come while the end is noted
        note(f"stopped:{type(exc).__name__}")
        raise
    return number


def hold_interpreter(seconds: float) -> None:
    """Sleep in C without letting go of the interpreter: no other thread of the process runs meanwhile."""
    note("begin")
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    note("end")


def turn_a_deaf_ear() -> None:
    """Never end, and swallow what is raised to stop it."""
    note("begin")
    while True:
        try:
            time.sleep(600)
        except Exception:
            note("swallowed")


def kill_child() -> None:
    note("begin")
    os.kill(os.getpid(), signal.SIGKILL)


def kill_parent() -> None:
    note("begin")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


class NotedTask(LeasedTask):
    """Also writes down that its hook for success was called."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        note("on_success", self.request)


def lose_connection(state: Any) -> None:
    """A remote-control command: the worker's event loop meets the error of a connection that broke."""

    def meet() -> None:
        raise StoreUnavailable("the test broke the connection")

    state.consumer.hub.call_soon(meet)


def make_app(uri: str) -> Celery:
    app = Celery(
        "recovery",
        broker=f"relata+{uri}",
        backend=f"relata+{uri}",
        task_cls="relata_celery:LeasedTask",
        set_as_current=False,
    )
    for handler in (work, hold_interpreter, turn_a_deaf_ear, kill_child, kill_parent):
        app.task(name=f"recovery.{handler.__name__}", shared=False)(handler)
    app.task(name="recovery.plain_sleep", base=Task, shared=False)(plain_sleep)
    app.task(name="recovery.hold", base=NotedTask, shared=False)(hold)
    return app


def __getattr__(name: str) -> Any:
    """``app`` for ``celery -A``: made only where a worker asks for it."""
    if name != "app":
        raise AttributeError(name)
    control_command()(lose_connection)
    task_success.connect(lambda sender, **_: note("task_success", sender.request), weak=False)
    app = make_app(os.environ["RELATA_TEST_URI"])
    app.set_current()
    globals()["app"] = app
    return app


# -- the stage -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    what: str
    job: str
    attempt: int
    pid: int


class Stage(ExitStack):
    """A database, its workers, and the journal of what they ran. On leaving, all workers are killed."""

    def __init__(self, uri: str, folder: Path) -> None:
        super().__init__()
        self.uri = uri
        self.folder = folder
        self.journal_path = folder / "journal"
        self.app = make_app(uri)
        self.callback(connect(uri).close)
        self.callback(self.app.close)
        self.store = JobStore.from_app(self.app)

    # workers

    def start(self, *arguments: str, name: str = "w1", env: Mapping[str, str] | None = None) -> Worker:
        """Start a worker without waiting for it."""
        temporary = self.folder / f"tmp-{name}"
        temporary.mkdir(exist_ok=True)
        environment = {JOURNAL: str(self.journal_path), "TMPDIR": str(temporary), **(env or {})}
        worker = start_worker(APP, self.uri, self.folder, *arguments, name=name, env=environment)
        self.push(_Killed(worker))
        return worker

    def worker(self, *arguments: str, name: str = "w1", env: Mapping[str, str] | None = None) -> Worker:
        return self.start(*arguments, name=name, env=env).wait_ready(60)

    # jobs

    def send(self, task: str, *args: Any, **options: Any) -> str:
        return str(self.app.tasks[f"recovery.{task}"].apply_async(args, **options).id)

    def send_many(self, count: int, task: str, *args: Any, **options: Any) -> list[str]:
        return [self.send(task, *args, **options) for _ in range(count)]

    def job(self, job_id: str) -> Job:
        job = self.store.get(job_id)
        assert job is not None, f"job {job_id} is gone"
        return job

    def count(self, *states: JobState) -> int:
        return self.store.jobs.count(states=states)

    def jobs(self, ids: Collection[str]) -> list[Job]:
        return [self.job(job_id) for job_id in ids]

    def outcomes(self, job_id: str) -> list[str]:
        return [str(entry.outcome) for entry in self.job(job_id).history]

    def wait_state(self, job_id: str, state: JobState, timeout: float = 30) -> Job:
        """Wait until the job has the state; return it as it is then."""

        def has_state() -> Job | None:
            job = self.job(job_id)
            return job if job.state is state else None

        job = wait_until(has_state, timeout, f"job {job_id} is {state}")
        assert job is not None
        return job

    def wait_all(self, ids: Collection[str], timeout: float = 60) -> None:
        """Wait until all jobs of the database, which are these, have succeeded."""
        try:
            wait_until(lambda: self.count(JobState.SUCCEEDED) >= len(ids), timeout, f"{len(ids)} jobs have succeeded")
        except AssertionError as late:
            states = Counter(str(job.state) for job in self.jobs(ids))
            logs = "\n".join(log.read_text(errors="replace")[-3000:] for log in self.folder.glob("*.log"))
            raise AssertionError(f"{late}\n{dict(states)}\n{logs}") from None

    # what ran

    def journal(self, what: str = "", job_id: str | None = None, attempt: int | None = None) -> list[Line]:
        """The lines of the journal that begin so."""
        if not self.journal_path.exists():
            return []
        lines = []
        for text in self.journal_path.read_text().splitlines():
            did, job, number, pid = text.split()
            lines.append(Line(did, job, int(number), int(pid)))
        return [
            line
            for line in lines
            if line.what.startswith(what) and job_id in (None, line.job) and attempt in (None, line.attempt)
        ]

    def wait_line(
        self,
        what: str,
        job_id: str | None = None,
        count: int = 1,
        timeout: float = 30,
        attempt: int | None = None,
    ) -> list[Line]:
        """Wait until the journal has ``count`` such lines; return them."""
        return self.until(
            lambda: lines if len(lines := self.journal(what, job_id, attempt)) >= count else [],
            timeout,
            f"{count} lines {what!r} for job {job_id}",
        )

    def until(self, condition: Callable[[], Any], timeout: float, message: str) -> Any:
        return wait_until(condition, timeout, message)

    def open_gate(self, name: str) -> None:
        (self.folder / f"{name}.open").touch()


class _Killed(AbstractContextManager["_Killed"]):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __exit__(self, *_exc: object) -> None:
        try:
            self._worker.kill_group()
        except ProcessLookupError:
            self._worker.process.wait(10)
