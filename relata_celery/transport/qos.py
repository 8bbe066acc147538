"""What happens to a delivered message that Celery acknowledges or rejects.

For a leased task this is local book-keeping: its end is written by the engine, through the fence,
so neither a lost acknowledgement nor a broken connection can lose or repeat a running job.
For everything else (plain Celery tasks, messages nobody could handle) the acknowledgement *is*
the end: the document is removed, put back, or failed with the reason.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from relata_celery.domain.job import ErrorClass
from relata_celery.domain.outcome import ErrorInfo, Failed, RetryRequested
from relata_celery.engine.held import HeldJob

if TYPE_CHECKING:
    from .channel import Channel, Message

#: Pause before a message is redelivered that its consumer rejected with ``requeue=True``, in seconds.
REQUEUE_DELAY_S = 1.0


class QoS:
    """Keeps the messages that were delivered on a channel and not yet acknowledged.

    ``prefetch_count`` is accepted and not used for jobs: the lease and the free slots decide.
    """

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        self.channel = channel
        self.prefetch_count = prefetch_count
        self._lock = threading.Lock()
        self._delivered: dict[str, Message] = {}

    def can_consume(self) -> bool:
        return True

    def can_consume_max_estimate(self) -> int | None:
        return None

    def append(self, message: Message, delivery_tag: str) -> None:
        with self._lock:
            self._delivered[delivery_tag] = message

    def get(self, delivery_tag: str) -> Message:
        return self._delivered[delivery_tag]

    def ack(self, delivery_tag: str) -> None:
        message = self._pop(delivery_tag)
        held = message.held if message is not None else None
        if message is None or held is None or _is_managed(held):
            return
        service = self.channel.connection.lease_service
        undecodable = _why_undecodable(message)
        if undecodable is not None:
            service.settle(held, _refusal(undecodable))
        else:
            service.acknowledge(held)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        message = self._pop(delivery_tag)
        held = message.held if message is not None else None
        if message is None or held is None or _is_managed(held):
            return
        service = self.channel.connection.lease_service
        if requeue:
            service.settle(held, RetryRequested(REQUEUE_DELAY_S))
        else:
            service.settle(held, _refusal(self._why_rejected(message, held)))

    def restore_unacked(self) -> list[Any]:
        """The channel closes: give back what never began, for Celery forgets it. A running job is never touched."""
        with self._lock:
            messages, self._delivered = list(self._delivered.values()), {}
        for message in messages:
            held = message.held
            if held is not None:
                self.channel.connection.lease_service.give_back(held, "the channel was closed")
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        self.restore_unacked()

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: leases that ran out are the reaper's."""

    def _pop(self, delivery_tag: str) -> Message | None:
        with self._lock:
            return self._delivered.pop(delivery_tag, None)

    def _why_rejected(self, message: Message, held: HeldJob) -> str:
        undecodable = _why_undecodable(message)
        if undecodable is not None:
            return undecodable
        if not self.channel.connection.knows_type(held.job.type):
            return f'no handler registered for job type "{held.job.type}"'
        return "rejected by its consumer"


def _is_managed(held: HeldJob) -> bool:
    """Whether a leased request has taken this job: then the engine alone writes its end."""
    return held.adopted


def _why_undecodable(message: Message) -> str | None:
    try:
        if message.errors:  # it could not even be unpacked when it came
            raise message.errors[0][1]
        message.payload  # noqa: B018  (decoding is the effect; kombu caches it)
    except Exception as exc:
        return f"message cannot be decoded: {type(exc).__name__}: {exc}"[:500]
    return None


def _refusal(reason: str) -> Failed:
    return Failed(ErrorInfo(ErrorClass.PERMANENT, reason, "PermanentError", "relata_celery.domain.errors"))
