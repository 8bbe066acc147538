"""The channel: publishes become jobs or mailbox messages, consumers are fed from both.

Two kinds of queue. A *mailbox* (declared auto-delete or exclusive: remote control, replies, event
listeners) holds short-lived messages in collections of its own, with expiry, and never touches the
jobs. Every other queue holds jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import Empty
from typing import Any

from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual.base import queue_declare_ok_t
from kombu.utils.functional import maybe_list

from relata_celery import bootstrap
from relata_celery.domain.job import NewJob
from relata_celery.engine.held import HeldJob
from relata_celery.private import protected

from . import capture, envelope
from .outbox import Letter
from .qos import QoS

#: How long an unclaimed mailbox message, and a binding whose listener fell silent, are kept, in seconds.
DEFAULT_MESSAGE_TTL_S = 60.0
MIN_BINDING_TTL_S = 60.0
#: How the names of remote control's exchanges end, and AMQP's mark of a message that may be lost.
PIDBOX, TRANSIENT = ".pidbox", 1
#: The routing key of what a worker says again and again: whoever begins to listen need not hear it at once.
HEARTBEAT = "worker.heartbeat"


class Message(virtual.Message):
    """A delivered message; ``held`` is the lease it came with (None for mailbox messages)."""

    def __init__(self, payload: Mapping[str, Any], channel: Any = None, **kwargs: Any) -> None:
        super().__init__(payload, channel=channel, **kwargs)
        self.held: HeldJob | None = payload.get("held")


class Channel(virtual.Channel):
    Message = Message
    QoS = QoS
    supports_fanout = True
    do_restore = False
    #: Bodies are kept as they are: JSON stays readable in the database, binary stays binary.
    body_encoding = None

    # -- declaring ------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: dict[str, Any] | None, **kwargs: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        """Declare a queue. Counts its messages only when asked to look (``passive``)."""
        name = queue or f"amq.gen-{self._next_delivery_tag()}"
        self._new_queue(name, **kwargs)
        return queue_declare_ok_t(name, self._size(name) if passive else 0, 0)

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        if kwargs.get("auto_delete") or kwargs.get("exclusive"):
            arguments = kwargs.get("arguments") or {}
            expires_ms, ttl_ms = arguments.get("x-expires"), arguments.get("x-message-ttl")
            self.connection.mailboxes[queue] = (
                max(float(expires_ms or 0) / 1000, MIN_BINDING_TTL_S),
                float(ttl_ms) / 1000 if ttl_ms else DEFAULT_MESSAGE_TTL_S,
            )

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        mailbox = self.connection.mailboxes.get(queue)
        if mailbox is None and self.typeof(exchange).type == "direct" and routing_key in (queue, exchange):
            return  # the usual one-to-one binding of a task queue: published to by name
        self.connection.stores.mailboxes.bind(
            exchange, routing_key or "", pattern or "", queue, mailbox is not None, mailbox and mailbox[0]
        )

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """The bindings of an exchange: those declared here, and those that others declared."""
        local = self.state.exchanges.get(exchange, {}).get("table", [])
        merged = dict.fromkeys((key or "", pattern or "", queue) for key, pattern, queue in local)
        for key, pattern, queue, mailbox in self.connection.stores.mailboxes.bindings(exchange):
            merged[(key, pattern, queue)] = None
            if mailbox and queue not in self.connection.mailboxes:
                self.connection.remote_mailboxes.add(queue)
        return list(merged)

    # -- publishing -----------------------------------------------------------------------------

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Publish: jobs and what is bound for their queues now, the rest of a worker through its outbox.

        Raises :class:`~relata_celery.domain.errors.EnqueueError` when MongoDB cannot be reached.
        """
        self._inplace_augment_message(message, exchange, routing_key)
        with self.connection.publishing():
            if exchange.endswith(PIDBOX) and self.typeof(exchange).type == "fanout":
                self._cancel_revoked(message)
            outbox = self.connection.outbox
            if outbox is not None and self._may_wait(message, exchange):
                outbox.post(self._letter(message, exchange, routing_key))
            else:
                super().basic_publish(message, exchange, routing_key, **kwargs)

    def _may_wait(self, message: Mapping[str, Any], exchange: str) -> bool:
        """Whether this is no job: a broadcast, or what its publisher calls transient (events and replies)."""
        if not exchange or envelope.is_task(message):
            return False
        if self.typeof(exchange).type == "fanout":
            return True
        transient = message["properties"].get("delivery_mode") == TRANSIENT
        local = self.state.exchanges.get(exchange, {}).get("table", [])
        return transient and all(queue in self.connection.mailboxes for _key, _pattern, queue in local)

    def _letter(self, message: Mapping[str, Any], exchange: str, routing_key: str) -> Letter:
        kind = self.typeof(exchange)
        return Letter(
            exchange=exchange,
            route=lambda table: kind.lookup(table, exchange, routing_key, None),
            message=message,
            ttl_s=DEFAULT_MESSAGE_TTL_S,
            remembered=kind.type == "topic" and routing_key == HEARTBEAT,
        )

    def _cancel_revoked(self, message: dict[str, Any]) -> None:
        """A revoke that is broadcast is a write first: jobs that wait are cancelled, with or without a worker."""
        body = self.Message(message, channel=self, accept=[message.get("content-type")]).payload
        if isinstance(body, Mapping) and body.get("method") in ("revoke", "terminate"):
            wanted = (body.get("arguments") or {}).get("task_id")
            ids = [str(one) for one in maybe_list(wanted) or ()]
            if ids:
                self.connection.cancel_waiting(ids)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        if envelope.is_task(message):
            captured = capture.current.get()
            sealed = captured is not None and captured.encrypted
            message = dict(protected(message, bootstrap.private_tasks_behind(self.connection.uri), sealed=sealed))
            job = envelope.to_new_job(queue, message)
            if captured is None or not captured.takes(job, message):
                self.connection.enqueue(job)
        elif self._is_mailbox(queue):
            self._put_mail([queue], message)
        else:
            self.connection.enqueue(envelope.to_new_job(queue, message))

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        queues = list(dict.fromkeys(queue for _key, _pattern, queue in self.get_table(exchange)))
        if queues:
            self._put_mail(queues, message)

    def _put_mail(self, queues: list[str], message: dict[str, Any]) -> None:
        ttls = [self.connection.mailboxes[name][1] for name in queues if name in self.connection.mailboxes]
        self.connection.stores.mailboxes.put(
            queues, envelope.stored_copy(message), min(ttls, default=DEFAULT_MESSAGE_TTL_S)
        )

    def _is_mailbox(self, queue: str) -> bool:
        connection = self.connection
        if queue in connection.mailboxes or queue in connection.remote_mailboxes:
            return True
        return bool(connection.stores.mailboxes.is_mailbox(queue))

    # -- consuming ------------------------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        if queue in self.connection.mailboxes:
            self.connection.listen(queue)
            return
        if no_ack:
            self.connection._callbacks[queue] = self._acknowledging(callback)
        self.connection.consume(queue)

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None and queue not in self._active_queues:
            self.connection.stop_consuming(queue)

    def _acknowledging(self, callback: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
        def deliver(raw_message: dict[str, Any]) -> Any:
            message = self.Message(raw_message, channel=self)
            if message.held is not None:
                self.connection.lease_service.acknowledge(message.held)
            return callback(message)

        return deliver

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        """One message, now (``basic_get``)."""
        if self._is_mailbox(queue):
            for _queue, message in self.connection.stores.mailboxes.take([queue], 1):
                return mail_delivery(message)
            raise Empty
        raw: dict[str, Any] | None = self.connection.claim_one(queue)
        if raw is None:
            raise Empty
        return raw

    # -- looking and removing -------------------------------------------------------------------

    def _size(self, queue: str) -> int:
        stores = self.connection.stores
        return int(stores.mailboxes.size(queue) if self._is_mailbox(queue) else stores.jobs.queue_size(queue))

    def _purge(self, queue: str) -> int:
        stores = self.connection.stores
        return int(stores.mailboxes.purge(queue) if self._is_mailbox(queue) else stores.jobs.purge(queue))

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return True

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        """Delete a mailbox. Jobs outlive their queue's declaration: deleting one removes no job."""
        if self._is_mailbox(queue):
            self.connection.stores.mailboxes.delete_queue(queue)
            self.connection.mailboxes.pop(queue, None)
            self.connection.stop_consuming(queue)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        if if_empty and self._size(queue):
            return
        self._delete(queue)
        self.state.queue_bindings_delete(queue)


def mail_delivery(message: Mapping[str, Any]) -> dict[str, Any]:
    """A mailbox message as kombu expects it raw."""
    raw = dict(message)
    raw["properties"] = {**raw.get("properties", {}), "body_encoding": None}
    return raw


__all__ = ["Channel", "Message", "NewJob", "mail_delivery"]
