"""One run of the demo, in a process of its own whose app is the run's database.

``run.py`` starts it as ``python -m relata_celery.demo.session OPTIONS`` with RELATA_MONGODB_URI set: the
ready-made app reads the environment once, when it is first used, so the process that already has
an app cannot be turned to another database.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from relata_celery.demo import report as reporting
from relata_celery.demo import results, storage
from relata_celery.demo.analysis import Endpoint
from relata_celery.demo.display import Display, console_for, display_for
from relata_celery.demo.extraction import Found, find_documents
from relata_celery.demo.journal import Journal
from relata_celery.demo.plan import STEPS, Plan, make_plan, step_of
from relata_celery.demo.render import render
from relata_celery.demo.standin import MODEL, StandIn
from relata_celery.demo.watching import Watcher
from relata_celery.demo.worker import Worker, worker_environment
from relata_celery.domain.errors import RelataError

LOOK_EVERY_S = 0.5
STANDIN_CLIENT_TIMEOUT_S = 2.0
#: How long to wait, half-way, for a model call that the kill can interrupt.
MOMENT_S = 10.0


class SessionError(Exception):
    """The run could not go on; the text says why, for a person."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was asked to do. ``leave_out`` names files of the folder that are no documents."""

    folder: str
    database: str
    leave_out: tuple[str, ...] = ()
    keep: bool = False
    as_json: bool = False
    crash: bool = True
    timeout_s: float = 180.0

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Options:
        fields = json.loads(text)
        return cls(**{**fields, "leave_out": tuple(fields["leave_out"])})


class Session:
    """Starts worker and endpoint, publishes, kills, waits, counts. For one thread, once."""

    def __init__(self, options: Options, folder: Path, console: Console) -> None:
        self.options = options
        self.folder = folder
        self.console = console
        self.found: Found = find_documents(Path(options.folder), options.leave_out)
        (folder / "journal").mkdir()
        self.journal = Journal(folder / "journal")
        self._interrupted: list[str] = []
        self._workers: list[Worker] = []

    def run(self) -> reporting.Report:
        """The whole run. SessionError when a worker dies by itself."""
        for name in self.found.skipped:
            line = f"skipped {name}: the demo reads text, Markdown, HTML and PDF files"
            self.console.print(line, markup=False)
        self.console.print(f"Reading {len(self.found.documents)} documents to know what there will be to do.")
        plan = make_plan(self.found.documents)
        totals = Counter(step_of(planned.id) for planned in plan.jobs())
        with self._endpoint() as (endpoint, standin):
            environment = worker_environment(
                os.environ, os.environ["RELATA_MONGODB_URI"], self.journal.folder, endpoint
            )
            os.environ.update(environment)
            display = display_for(self.console, {step: totals[step] for step in STEPS})
            try:
                return self._work(plan, environment, display, standin)
            finally:
                display.close()
                for worker in self._workers:
                    worker.stop()

    @contextlib.contextmanager
    def _endpoint(self) -> Iterator[tuple[Mapping[str, str], StandIn | None]]:
        """The variables that lead jobs to the model, and the stand-in if it is one."""
        given = Endpoint.from_environment(os.environ)
        if given is not None:
            self.console.print(f"Asking the model {given.model} at {given.url}.", markup=False)
            yield {}, None
            return
        standin = StandIn()
        standin.start()
        try:
            self.console.print("No OPENAI_BASE_URL: asking a local stand-in, which misbehaves on purpose.")
            variables = {
                "RELATA_DEMO_OPENAI_BASE_URL": standin.base_url,
                "RELATA_DEMO_MODEL": MODEL,
                "RELATA_DEMO_REQUEST_TIMEOUT": str(STANDIN_CLIENT_TIMEOUT_S),
            }
            yield variables, standin
        finally:
            standin.stop()

    def _work(
        self, plan: Plan, environment: Mapping[str, str], display: Display, standin: StandIn | None
    ) -> reporting.Report:
        # Imported here: the app is made at import, from the environment set just above.
        from relata_celery import JobStore, app
        from relata_celery.demo import jobs

        watcher = Watcher(JobStore.from_app(app), plan, self.journal)
        self._start_worker(environment, display)
        started = time.monotonic()
        for document in plan.documents:
            jobs.enqueue(document.name, document.path)
        display.say(f"{len(plan.documents)} chains enqueued; about {plan.expected()} jobs will follow.")
        timed_out = not self._watch(watcher, plan, environment, display, started + self.options.timeout_s)
        seconds = time.monotonic() - started
        display.close()
        watcher.look(everything=True)
        endpoint = Endpoint.from_environment(os.environ)
        store = storage.from_environment()
        return reporting.Report(
            database=self.options.database,
            seconds=round(seconds, 1),
            crashed=len(self._workers) > 1,
            timed_out=timed_out,
            counts=reporting.count(
                plan.jobs(),
                watcher.jobs,
                noted=self.journal.ids(),
                interrupted=self._interrupted,
                begun=Counter(line.id for line in self.journal.lines if line.event == "begin"),
            ),
            documents=results.summarise(store.documents(), store.chunks()),
            skipped=self.found.skipped,
            endpoint="local stand-in" if standin else endpoint.url if endpoint else "",
            endpoint_met=standin.met() if standin else {},
        )

    def _watch(
        self,
        watcher: Watcher,
        plan: Plan,
        environment: Mapping[str, str],
        display: Display,
        deadline: float,
    ) -> bool:
        """Look on until all is done, killing the worker half-way. False when the deadline came first."""
        crash_at = plan.expected() / 2 if self.options.crash else float("inf")
        while time.monotonic() < deadline:
            watcher.look()
            display.update(watcher.done_by_step(), watcher.note())
            if not watcher.unfinished():
                return True
            if watcher.finished() >= crash_at:
                crash_at = float("inf")
                self._crash(watcher, display)
                self._start_worker(environment, display)
            ended = self._workers[-1].ended
            if ended is not None:
                words = self._workers[-1].last_words()
                raise SessionError(f"the worker ended by itself with status {ended}; its log ends:\n{words}")
            time.sleep(LOOK_EVERY_S)
        return False

    def _start_worker(self, environment: Mapping[str, str], display: Display) -> None:
        number = len(self._workers) + 1
        worker = Worker(environment, self.folder / f"worker-{number}.log", f"worker{number}")
        self._workers.append(worker)
        worker.start()
        how_long = "" if self.options.keep else ", until the run ends well"
        display.say(f"worker {number} started (log{how_long}: {worker.log})")

    def _crash(self, watcher: Watcher, display: Display) -> None:
        """SIGKILL the worker's process group in the middle of a model call, and note what was running."""
        deadline = time.monotonic() + MOMENT_S
        self.journal.read()
        while time.monotonic() < deadline:
            begun = {line.id for line in self.journal.read() if line.event == "begin"}
            if any(step_of(id) == "analyse" for id in begun & self.journal.running()):
                break
            time.sleep(0.01)
        self._workers[-1].kill()
        watcher.look()
        self._interrupted = watcher.running()
        running = ", ".join(self._interrupted) or "nothing"
        display.say(f"worker {len(self._workers)} killed with SIGKILL while it ran {running}")


def main(arguments: list[str]) -> int:
    """Run with the given options and print the report. 0, or 1 when the run failed or found a loss."""
    options = Options.load(arguments[0])
    signal.signal(signal.SIGTERM, _end)
    # What is wrong with a PDF is told by its job.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    console = console_for(sys.stderr if options.as_json else sys.stdout)
    folder = Path(tempfile.mkdtemp(prefix="relata-demo-"))
    good = False
    try:
        outcome = Session(options, folder, console).run()
        if options.as_json:
            print(json.dumps(outcome.to_json(), indent=2, ensure_ascii=False))
        else:
            render(outcome, console)
        good = outcome.ok
    except (SessionError, RelataError) as failure:
        console.print(f"error: {failure}", style="red", markup=False)
    except KeyboardInterrupt:
        console.print("interrupted; the worker was stopped")
        return 130
    finally:
        if good and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            console.print(f"Logs and journal: {folder}", markup=False)
    return 0 if good else 1


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run by way of its finally clauses, so that no worker stays behind."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
