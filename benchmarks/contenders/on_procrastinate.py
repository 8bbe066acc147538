"""procrastinate on PostgreSQL."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks.servers import Servers

from .base import Contender, Pool, Producer, settings


class ProcrastinateProducer(Producer):
    BATCH = 1000

    def __init__(self) -> None:
        from .procrastinate_app import app, noop

        self.app, self.noop = app.open(), noop

    def one_by_one(self, jobs: int) -> None:
        for _ in range(jobs):
            self.noop.defer()

    def in_bulk(self, jobs: int) -> None:
        for start in range(0, jobs, self.BATCH):
            self.noop.batch_defer(*({} for _ in range(min(self.BATCH, jobs - start))))

    def probe(self, sent_ns: int) -> None:
        self.noop.defer(sent_ns=sent_ns)

    def close(self) -> None:
        self.app.close()


class Procrastinate(Contender):
    """A worker is one process of coroutines: several processes are several workers."""

    name = "procrastinate"
    title = "procrastinate (PostgreSQL)"
    servers = ("postgresql",)
    packages = ("procrastinate", "psycopg")

    def env(self, servers: Servers, space: str, results: bool) -> Mapping[str, str]:
        return settings(broker=self._uri(servers, space))

    def _uri(self, servers: Servers, space: str) -> str:
        return f"{servers.get('postgresql').uri.rpartition('/')[0]}/{space}"

    def _administer(self, servers: Servers, statement: str) -> None:
        import psycopg

        with psycopg.connect(servers.get("postgresql").uri, autocommit=True) as connection:
            connection.execute(statement)

    def prepare(self, servers: Servers, space: str) -> None:
        from procrastinate import App, SyncPsycopgConnector

        self._administer(servers, f"CREATE DATABASE {space}")
        with App(connector=SyncPsycopgConnector(conninfo=self._uri(servers, space))).open() as app:
            app.schema_manager.apply_schema()

    def forget(self, servers: Servers, space: str) -> None:
        self._administer(servers, f"DROP DATABASE {space} WITH (FORCE)")

    def worker(self, pool: Pool, number: int, parked: bool) -> Sequence[str]:
        concurrency = pool.size if pool.kind == "threads" else 1
        return [
            *(sys.executable, "-m", "benchmarks.contenders.procrastinate_app"),
            *(str(concurrency), str(self.processes(pool))),
        ]

    def processes(self, pool: Pool) -> int:
        return 1 if pool.kind == "threads" else pool.size

    def producer(self) -> Producer:
        return ProcrastinateProducer()
