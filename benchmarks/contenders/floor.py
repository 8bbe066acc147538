"""The floor: the plain driver writing documents of a job's size with majority and journal, no more."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from benchmarks.servers import Servers

from .base import Contender, Pool, Producer, setting, settings

#: About the size of a no-op job's document.
DOCUMENT_BYTES = 1100


class FloorProducer(Producer):
    BATCH = 1000

    def __init__(self) -> None:
        import pymongo

        self.client = pymongo.MongoClient(setting("BROKER"))
        durable = pymongo.WriteConcern(w="majority", j=True)
        self.documents = self.client.get_default_database().get_collection("floor", write_concern=durable)
        self.documents.insert_one({})

    def one_by_one(self, jobs: int) -> None:
        for _ in range(jobs):
            self.documents.insert_one({"payload": os.urandom(DOCUMENT_BYTES)})

    def in_bulk(self, jobs: int) -> None:
        for start in range(0, jobs, self.BATCH):
            batch = range(min(self.BATCH, jobs - start))
            self.documents.insert_many(
                [{"payload": os.urandom(DOCUMENT_BYTES)} for _ in batch], ordered=False
            )

    def probe(self, sent_ns: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.client.close()


class Floor(Contender):
    name = "floor"
    title = "floor: insert_one, insert_many"
    servers = ("mongodb",)
    packages = ("pymongo",)
    pools = ()

    def env(self, servers: Servers, space: str, results: bool) -> Mapping[str, str]:
        return settings(broker=servers.get("mongodb").uri(space))

    def forget(self, servers: Servers, space: str) -> None:
        servers.get("mongodb").client.drop_database(space)

    def worker(self, pool: Pool, number: int, parked: bool) -> Sequence[str]:
        raise NotImplementedError

    def producer(self) -> Producer:
        return FloorProducer()
