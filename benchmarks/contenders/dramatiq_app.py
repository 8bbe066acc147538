"""The actors of dramatiq on Redis."""

from __future__ import annotations

from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from benchmarks import tally

from .base import setting


class SayReady(dramatiq.Middleware):
    def after_worker_boot(self, broker: Any, worker: Any) -> None:
        tally.ready()


stored = setting("RESULTS") == "1"
broker = RedisBroker(url=setting("BROKER"))
broker.add_middleware(SayReady())
if stored:
    broker.add_middleware(Results(backend=RedisBackend(url=setting("BROKER"))))
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name=setting("QUEUE"), **({"store_results": True} if stored else {}))
def noop(sent_ns: int = 0) -> int | None:
    tally.ran(sent_ns)
    return 1 if stored else None
