"""The kombu transport ``relata+mongodb://``.

One instance per kombu connection. It opens nothing by itself: a producer's first insert does, and
a worker's engine is attached by its bootstep (:mod:`relata_celery.worker.steps`). Background
threads only fill queues and give a wake-up; every callback of kombu or Celery runs in the thread
that drains: the event loop's reader, or :meth:`Transport.drain_events`.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from random import random
from threading import Lock
from time import monotonic
from typing import Any

from kombu.transport import virtual

from relata_celery import bootstrap
from relata_celery.domain.errors import MissingKey, StoreError, StoreUnavailable
from relata_celery.domain.job import ErrorClass, NewJob
from relata_celery.domain.outcome import ErrorInfo, Failed, Released, Snoozed
from relata_celery.engine.held import HeldJob
from relata_celery.engine.service import LeaseService
from relata_celery.publishing import PublishFailed, current_bulk, write
from relata_celery.sealing import MISSING_KEY_PAUSE_S
from relata_celery.store.client import masked

from . import envelope
from .channel import Channel, mail_delivery
from .mail import MailReader
from .outbox import Outbox, outboxes
from .wakeup import Wakeup

logger = logging.getLogger("relata_celery")

#: Between two looks at a mailbox without an event loop (a client waiting for a reply), in seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.25
#: How long a closing connection waits for its last events and replies to be written, in seconds.
FLUSH_S = 1.0


class Transport(virtual.Transport):
    Channel = Channel
    driver_type = "mongodb"
    driver_name = "relata"
    can_parse_url = True
    default_port = 27017
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )
    connection_errors = (*virtual.Transport.connection_errors, StoreUnavailable)
    channel_errors = (*virtual.Transport.channel_errors, StoreError)
    recoverable_connection_errors = (StoreUnavailable,)
    recoverable_channel_errors = ()

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        #: Mailbox queues declared on this connection: seconds that their binding and a message live.
        self.mailboxes: dict[str, tuple[float, float]] = {}
        self.remote_mailboxes: set[str] = set()
        self.knows_type: Callable[[str], bool] = lambda _type: True
        self.uri = broker_uri(client)
        self._stores: bootstrap.Stores | None = None
        self._service: LeaseService | None = None
        self._attached = False
        self._job_queues: list[str] = []
        self._listening: list[str] = []
        self._touched_at = monotonic()
        self._inbox: deque[tuple[str, dict[str, Any]]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._wakeup: Wakeup | None = None
        self._making_wakeup = Lock()
        self._mail: MailReader | None = None
        self._loop: Any = None
        #: Held while jobs are put into the inbox, and while it is closed.
        self._closing = Lock()
        self.closed = False

    @property
    def stores(self) -> bootstrap.Stores:
        if self._stores is None:
            self._stores = bootstrap.open_stores(self.uri)
        return self._stores

    def driver_version(self) -> str:
        return version("pymongo")

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        plain = uri.removeprefix(bootstrap.URL_PREFIX)
        return bootstrap.URL_PREFIX + (plain if include_password else masked(plain))

    # -- publishing -----------------------------------------------------------------------------

    def enqueue(self, job: NewJob) -> None:
        write(self.stores.jobs, job, current_bulk())

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Have a publish of what is no job end, like that of a job, when MongoDB cannot be reached.

        kombu would try the same call again for ever.
        """
        try:
            yield
        except StoreUnavailable as exc:
            raise PublishFailed(f"a message was not published: {exc}") from exc

    @property
    def outbox(self) -> Outbox | None:
        """Where this process' event loop puts what is no job; None where no loop must be kept from waiting."""
        return outboxes.of(self.uri)

    def cancel_waiting(self, ids: Sequence[str]) -> None:
        """Cancel those of these jobs that wait; those that run do not wait again."""
        self.stores.jobs.revoke(ids)

    # -- consuming ------------------------------------------------------------------------------

    @property
    def lease_service(self) -> LeaseService:
        """The engine that holds this connection's leases; one of its own if no worker attached one."""
        if self._service is None:
            self._service = bootstrap.standalone_service(
                self.stores, slots=lambda: 1, deliver=self.deliver, followup_to_job=envelope.followup_to_job
            )
            self._service.start()
        return self._service

    def attach(self, service: LeaseService, knows_type: Callable[[str], bool]) -> None:
        """Have this connection's jobs claimed by a worker's engine."""
        self._service, self._attached, self.knows_type = service, True, knows_type
        if service.pausing is not None:
            service.pausing.heard = lambda: self._mail is not None and self._mail.watched
        for queue in self._job_queues:
            service.claimer.consume(queue)

    def pauses_changed(self) -> None:
        """What is paused may have changed: have the engine look."""
        if self._service is not None and self._service.pausing is not None:
            self._service.pausing.wake()

    def consume(self, queue: str) -> None:
        if queue not in self._job_queues:
            self._job_queues.append(queue)
        if self._attached or self._loop is None:
            self.lease_service.claimer.consume(queue)

    def listen(self, queue: str) -> None:
        if queue not in self._listening:
            self._listening.append(queue)
        if self._mail is not None:
            self._mail.listening_changed()

    def stop_consuming(self, queue: str) -> None:
        if queue in self._job_queues:
            self._job_queues.remove(queue)
            if self._service is not None:
                self._service.claimer.cancel(queue)
        if queue in self._listening:
            self._listening.remove(queue)

    def claim_one(self, queue: str) -> dict[str, Any] | None:
        """Claim one job of this queue, as its consumers would; None when there is none that may run now."""
        service = self.lease_service
        paused = service.paused()
        if queue in paused.queues:
            return None
        lease_s = service.settings.lease_s
        gate = service.gate if service.gate is not None and service.gate.guards([queue]) else None
        while gate is None or gate.open([queue]):
            sent_at = monotonic()
            admit = None if gate is None else gate.admit
            claimed = self.stores.jobs.claim([queue], 1, service.owner, lease_s, admit, paused.types)
            if not claimed:
                break
            held = service.hold(claimed[0], sent_at + lease_s)
            raw = None if held is None else self._to_raw(held)
            if raw is not None:
                return raw
        return None

    def deliver(self, jobs: Sequence[HeldJob]) -> None:
        """Take claimed jobs (from the claimer's thread) for the thread that drains.

        Once the connection closes they are given back.
        """
        ready = [(held.job.queue, raw) for held in jobs if (raw := self._to_raw(held)) is not None]
        with self._closing:
            if not self.closed:
                self._inbox.extend(ready)
                self.wakeup.set()
                return
        for _queue, raw in ready:
            self.lease_service.give_back(raw["held"], "the connection was closed")

    def deliver_mail(self, messages: Sequence[tuple[str, dict[str, Any]]]) -> None:
        with self._closing:
            if not self.closed:
                self._inbox.extend((queue, mail_delivery(message)) for queue, message in messages)
                self.wakeup.set()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run this in the thread that drains; at once when there is none any more. Safe from any thread."""
        with self._closing:
            if not self.closed:
                self._calls.append(call)
                self.wakeup.set()
                return
        call()

    def _to_raw(self, held: HeldJob) -> dict[str, Any] | None:
        try:
            raw = envelope.to_delivery(held.job)
        except MissingKey as exc:
            reason = f"not run here: {exc}"
            self.lease_service.settle(held, Snoozed(MISSING_KEY_PAUSE_S, reason, exception="MissingKey"))
            return None
        except (TypeError, KeyError, ValueError) as exc:
            self.lease_service.settle(held, _unreadable(exc))
            return None
        raw["held"] = held
        return raw

    # -- draining -------------------------------------------------------------------------------

    @property
    def wakeup(self) -> Wakeup:
        """The one that both sides of the inbox use, whichever comes first."""
        with self._making_wakeup:
            if self._wakeup is None:
                self._wakeup = Wakeup()
            return self._wakeup

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self._loop = loop
        outboxes.open(self.uri, self.stores)
        self._mail = MailReader(self, random)
        if self._listening:
            self._mail.start()
        loop.add_reader(self.wakeup.fileno(), self._on_wakeup)

    def _on_wakeup(self) -> None:
        self.wakeup.clear()
        self._run_pending()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Handle what has come, or wait for it up to ``timeout`` seconds (then ``socket.timeout``)."""
        deadline = None if timeout is None else monotonic() + timeout
        pause = FIRST_PAUSE_S
        while True:
            self.wakeup.clear()
            if self._mail is None and self._listening:
                self._take_mail()
            if self._run_pending():
                return
            left = LONGEST_PAUSE_S if deadline is None else deadline - monotonic()
            if left <= 0:
                raise socket.timeout("no message came in time")
            self.wakeup.wait(min(left, pause if self._listening else left))
            pause = min(pause * 1.5, LONGEST_PAUSE_S)

    def _take_mail(self) -> None:
        self._inbox.extend(
            (queue, mail_delivery(message)) for queue, message in self.take_mail()
        )

    def take_mail(self) -> list[tuple[str, dict[str, Any]]]:
        """Fetch what waits in this connection's mailboxes, keeping their bindings alive."""
        queues = list(self._listening)
        if not queues:
            return []
        if monotonic() - self._touched_at > 20:
            self._touched_at = monotonic()
            known = [self.mailboxes[queue][0] for queue in queues if queue in self.mailboxes]
            self.stores.mailboxes.touch(queues, max(known, default=60.0))
        return list(self.stores.mailboxes.take(queues, 1000))

    def rest_mail(self, resting: bool) -> None:
        """Poll for mail, without the change stream, or with it again."""
        if self._mail is not None:
            self._mail.rest(resting)

    @property
    def listening(self) -> list[str]:
        return list(self._listening)

    def _run_pending(self) -> bool:
        """Deliver all that has come; True if there was anything. One bad message stops no other."""
        handled = False
        while self._calls:
            handled = True
            self._calls.popleft()()
        while self._inbox:
            handled = True
            queue, raw = self._inbox.popleft()
            try:
                self._deliver(raw, queue)
            except self.connection_errors:
                raise
            except Exception as exc:
                self._undeliverable(queue, raw, exc)
        return handled

    def _undeliverable(self, queue: str, raw: dict[str, Any], exc: Exception) -> None:
        held = raw.get("held")
        if held is None:
            logger.exception("a message of %r could not be handled", queue)
            return
        logger.error("job %s could not be handled: %s: %s", held.claim.id, type(exc).__name__, exc)
        if not held.adopted:
            self.lease_service.settle(held, _unreadable(exc))
        else:  # its request was made, so the message is sound: it is the pool that did not take it
            text = f"the worker's pool did not take the job: {type(exc).__name__}"
            self.lease_service.settle(held, Failed(ErrorInfo(ErrorClass.TRANSIENT, text, type(exc).__name__)))

    def _reject_inbound_message(self, raw_message: dict[str, Any]) -> None:
        """A job for a queue that is not consumed any more: give it back."""
        held = raw_message.get("held")
        if held is not None:
            self.lease_service.settle(held, Released("its queue is no longer consumed here"))

    def close_connection(self, connection: Any) -> None:
        """Close; give back the jobs that have not begun, wherever they lie. Running ones go on."""
        with self._closing:
            self.closed = True
        if self._mail is not None:
            self._mail.stop(0.0)
        if self._loop is not None and self._wakeup is not None:
            self._loop.remove_reader(self._wakeup.fileno())
        super().close_connection(connection)
        while self._inbox:
            held = self._inbox.popleft()[1].get("held")
            if held is not None:
                self.lease_service.give_back(held, "the connection was closed")
        while self._calls:
            self._calls.popleft()()
        if self._service is not None and not self._attached:
            self._service.stop()
        if self._loop is not None:
            outboxes.close(self.uri, FLUSH_S)
        if self._wakeup is not None:
            self._wakeup.close()
            self._wakeup = None


def broker_uri(client: Any) -> str:
    """The MongoDB URI in a kombu connection: what stood behind ``relata+``."""
    hostname = str(client.hostname)
    return hostname if "://" in hostname else f"mongodb://{hostname}"


def _unreadable(exc: Exception) -> Failed:
    text = f"job document cannot be read: {type(exc).__name__}: {exc}"[:500]
    return Failed(ErrorInfo(ErrorClass.PERMANENT, text, "PermanentError", "relata_celery.domain.errors"))
