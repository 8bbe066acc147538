"""One worker's engine together with the Celery objects it reports to."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from billiard import get_start_method
from celery.signals import worker_shutting_down
from celery.worker import state

from relata_celery import bootstrap
from relata_celery.board import Board
from relata_celery.conf import Settings
from relata_celery.domain.events import Event
from relata_celery.domain.outcome import Released
from relata_celery.engine.held import HeldJob
from relata_celery.following import StoredFailures
from relata_celery.request import LeasedRequest
from relata_celery.transport.envelope import followup_to_job

logger = logging.getLogger("relata_celery")

#: How often dead pool processes are looked for, besides when the pool itself sees one end, in seconds.
PROCESS_LOOK_S = 0.5


class WorkerRuntime:
    """Lives in the worker's parent from the first connection to the end, over reconnects.

    Made before the pool forks, so it opens nothing until :meth:`start`.
    """

    def __init__(self, app: Any, controller: Any, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        forks = get_start_method() == "fork" and controller.pool_start_method == "fork"
        self.board = Board(inherited=forks)
        self._controller = controller
        self._transport: Any = None
        self._busy = False
        self._listeners: list[Callable[[Event], None]] = [bootstrap.log_event]
        self._process_look: Any = None
        self._started = False
        self._shutdown_asked = False
        self.stores = bootstrap.stores_of(app)
        self.service = bootstrap.make_service(
            self.stores,
            settings,
            slots=self._free_for_jobs,
            deliver=self._deliver,
            followup_to_job=followup_to_job,
            after_failure=StoredFailures(app),
            emit=self._emit,
            on_overrun=self._overrun,
        )
        self._watch = self.stores.watch_jobs(self.service.claimer)
        bootstrap.bind_worker(app, self)
        worker_shutting_down.connect(self._on_shutting_down)

    def start(self, transport: Any) -> None:
        """Serve this connection's consumers; called again after each reconnect."""
        self._transport = transport
        if not self._started:
            self._started = True
            self.service.claimer.on_busy = self._on_busy
            self.service.claimer.on_queues = self._on_queues
            self.service.start()
            self._serve_metrics()
        if self.settings.workers_enabled:
            transport.attach(self.service, self._knows_type)
        else:
            logger.warning("relata_workers_enabled is false: this worker answers, and consumes nothing")
        transport.rest_mail(self._busy)

    def watch_processes(self, hub: Any) -> None:
        """Have the death of a pool process noticed soon; called again after each reconnect.

        The pool looks when its pipe to the process closes. The kernel closes it a moment before the process
        can be waited for, so now and then that look finds it alive; the pool's next is five seconds later.
        """
        if self._process_look is not None:
            self._process_look.cancel()
        pool = self._controller.pool
        if pool.uses_semaphore:
            self._process_look = hub.call_repeatedly(PROCESS_LOOK_S, pool.maintain_pool)

    def _on_busy(self, busy: bool) -> None:
        """An open change stream has the server look at each of our many writes: with enough to do, poll."""
        self._busy = busy
        self._watch.rest(busy)
        self._transport.rest_mail(busy)

    def _on_queues(self) -> None:
        if not self._watch.start():
            self._watch.refresh()

    def _on_shutting_down(self, **kwargs: Any) -> None:
        """Sent from the signal's handler, also while a solo worker's loop is inside a job."""
        self.service.ask_to_drain()

    def drain(self) -> None:
        self.service.drain.begin()

    def terminate(self) -> None:
        """Cold shutdown: give everything back now, and end what runs by force."""
        self.service.drain.now()

    def stop(self) -> None:
        """After the pool has stopped: write what is left, end the threads."""
        self._watch.stop()
        if self._started:
            self.service.stop()
        self.board.close()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run this in the worker's own loop; at once when there is none any more."""
        transport = self._transport
        if transport is None or transport.closed:
            call()
        else:
            transport.call_soon(call)

    @property
    def time_limits(self) -> tuple[float | None, float | None]:
        """The worker's own soft and hard limits (``--soft-time-limit``, ``--time-limit``), in seconds."""
        return self._controller.soft_time_limit, self._controller.time_limit

    def _serve_metrics(self) -> None:
        port = self.settings.metrics_port
        if port is None:
            return
        from relata_celery.metrics import WorkerMetrics  # an extra: imported when it is asked for

        metrics = WorkerMetrics(self.stores, self._knows_type)
        try:
            metrics.serve(self.settings.metrics_host, port)
        except OSError as exc:
            logger.error("metrics cannot be served on port %d: %s; the worker goes on without", port, exc)
        else:
            self.listen(metrics)

    def listen(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def _deliver(self, jobs: Sequence[HeldJob]) -> None:
        transport = self._transport
        if transport is None or transport.closed:
            for held in jobs:
                self.service.settle(held, Released("the worker is reconnecting"))
        else:
            transport.deliver(jobs)

    def _free_for_jobs(self) -> int:
        """The pool's slots, less those that plain Celery tasks (acknowledged early) run in."""
        controller = self._controller
        pool = controller.pool
        if pool is None:
            return 0
        slots = int(controller.max_concurrency or pool.num_processes or 0)
        return max(slots - _running_plain_tasks(), 0)

    def _knows_type(self, name: str) -> bool:
        return name in self.app.tasks

    def _emit(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on %s", type(event).__name__)

    def _overrun(self) -> None:
        """A thread that cannot be stopped holds the process: its jobs were given back, so leave it."""
        pool = self._controller.pool
        if pool is not None and not pool.uses_semaphore:
            logger.error("jobs that cannot be interrupted are still running in threads; leaving them behind")
            self.board.close()
            logging.shutdown()
            os._exit(0)


def _running_plain_tasks() -> int:
    while True:
        try:
            return sum(1 for request in state.active_requests if not isinstance(request, LeasedRequest))
        except RuntimeError:  # another thread has changed the set: count anew
            continue
