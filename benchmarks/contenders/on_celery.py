"""Celery on its brokers: ours, Redis, RabbitMQ, and kombu's own MongoDB transport."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from benchmarks.servers import Servers

from .base import Contender, Pool, Producer, settings

PARKED = "nothing-comes-here"


class CeleryProducer(Producer):
    def __init__(self) -> None:
        from .celery_app import QUEUE, app, noop

        self.app, self.noop, self.queue = app, noop, QUEUE
        with app.producer_or_acquire() as producer:  # the connection is no part of what is measured
            producer.channel  # noqa: B018 - opens it
            app.amqp.queues[QUEUE].bind(producer.channel).declare()

    def one_by_one(self, jobs: int) -> None:
        send = self.noop.delay
        for _ in range(jobs):
            send()

    def in_bulk(self, jobs: int) -> None:
        send = self.noop.apply_async
        with self.app.producer_or_acquire() as producer:
            for _ in range(jobs):
                send(producer=producer)

    def probe(self, sent_ns: int) -> None:
        self.noop.delay(sent_ns)

    def consume(self, workers: int) -> None:
        deadline = time.monotonic() + 30
        while len(self.app.control.ping(timeout=2, limit=workers) or ()) < workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {workers} workers answer a ping")
        self.app.control.add_consumer(self.queue)

    def close(self) -> None:
        self.app.close()


class CeleryContender(Contender):
    packages = ("celery", "kombu")
    task_class: ClassVar[str] = ""
    imports: ClassVar[str] = ""

    def urls(self, servers: Servers, space: str) -> tuple[str, str]:
        """Broker and result backend."""
        raise NotImplementedError

    def env(self, servers: Servers, space: str, results: bool) -> Mapping[str, str]:
        broker, backend = self.urls(servers, space)
        return settings(
            broker=broker,
            backend=backend if results else "",
            results=int(results),
            queue=space,
            task_class=self.task_class,
            **{"import": self.imports},
        )

    def worker(self, pool: Pool, number: int, parked: bool) -> Sequence[str]:
        queues = ("-Q", PARKED) if parked else ()
        return [
            *(sys.executable, "-m", "celery", "-A", "benchmarks.contenders.celery_app", "worker"),
            *("-P", pool.kind, "-c", str(pool.size), "-l", "WARNING", "-n", f"bench{number}@%h"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat", *queues),
        ]

    def producer(self) -> Producer:
        return CeleryProducer()


class CeleryRedis(CeleryContender):
    name = "celery-redis"
    title = "Celery + Redis"
    servers = ("redis",)
    packages = ("celery", "kombu", "redis")
    results = "Redis"
    fleet = True

    def urls(self, servers: Servers, space: str) -> tuple[str, str]:
        uri = servers.get("redis").uri
        return uri, uri

    def prepare(self, servers: Servers, space: str) -> None:
        servers.get("redis").empty()

    forget = prepare


class CeleryRabbitMQ(CeleryContender):
    name = "celery-rabbitmq"
    title = "Celery + RabbitMQ"
    servers = ("rabbitmq", "redis")
    packages = ("celery", "kombu", "amqp", "redis")
    results = "Redis"
    fleet = True

    def urls(self, servers: Servers, space: str) -> tuple[str, str]:
        return servers.get("rabbitmq").uri, servers.get("redis").uri

    def forget(self, servers: Servers, space: str) -> None:
        import kombu

        servers.get("redis").empty()
        with kombu.Connection(servers.get("rabbitmq").uri) as connection:
            connection.default_channel.queue_delete(space)


class OnMongoDB(CeleryContender):
    servers = ("mongodb",)

    def forget(self, servers: Servers, space: str) -> None:
        servers.get("mongodb").client.drop_database(space)


class CeleryKombuMongoDB(OnMongoDB):
    name = "celery-kombu-mongodb"
    title = "Celery + kombu's MongoDB"
    packages = ("celery", "kombu", "pymongo")
    results = "MongoDB"

    def urls(self, servers: Servers, space: str) -> tuple[str, str]:
        uri = servers.get("mongodb").uri(space)
        return uri, uri


class OurProducer(CeleryProducer):
    """Bulk by ``relata_celery.bulk()`` where it exists, else by the store that it would use."""

    BATCH = 1000

    def in_bulk(self, jobs: int) -> None:
        import relata_celery

        bulk: Any = getattr(relata_celery, "bulk", None)
        if bulk is None:
            self._insert(jobs)
            return
        for batch in self._batches(jobs):
            with bulk():
                for _ in range(batch):
                    self.noop.apply_async()

    def later(self, jobs: int) -> None:
        self._insert(jobs, delay_s=86_400.0)

    def _batches(self, jobs: int) -> list[int]:
        return [min(self.BATCH, jobs - start) for start in range(0, jobs, self.BATCH)]

    def _insert(self, jobs: int, delay_s: float | None = None) -> None:
        """Copies of one published job, each under an id of its own, in batches."""
        from uuid import uuid4

        from relata_celery.bootstrap import stores_of
        from relata_celery.domain.job import NewJob

        store = stores_of(self.app).jobs
        published = self.noop.apply_async(countdown=delay_s).id
        template = store.get(published)
        assert template is not None
        message = template.message

        def copy() -> NewJob:
            job_id = str(uuid4())
            return NewJob(
                id=job_id,
                type=template.type,
                queue=template.queue,
                message={
                    **message,
                    "headers": {**message["headers"], "id": job_id, "root_id": job_id},
                    "properties": {**message["properties"], "correlation_id": job_id},
                },
                delay_s=delay_s,
                max_attempts=template.max_attempts,
                root_id=job_id,
            )

        for batch in self._batches(jobs - 1):  # the template is one of them
            store.enqueue([copy() for _ in range(batch)])


class Ours(OnMongoDB):
    name = "ours"
    title = "relata_celery (MongoDB)"
    packages = ("relata_celery", "celery", "kombu", "pymongo")
    task_class = "relata_celery:LeasedTask"
    imports = "relata_celery"
    results = "MongoDB (the job)"
    fleet = True

    def urls(self, servers: Servers, space: str) -> tuple[str, str]:
        url = "relata+" + servers.get("mongodb").uri(space)
        return url, url

    def producer(self) -> Producer:
        return OurProducer()
