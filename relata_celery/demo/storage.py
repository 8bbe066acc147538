"""The results in the same database as the jobs: ``demo_documents`` and ``demo_chunks``.

Every write is an upsert under a fixed key, so a job that runs twice leaves what one run leaves.
A process has one client, made when it first needs one: clients do not survive a fork.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database

from relata_celery.demo.analysis import Analysis
from relata_celery.demo.extraction import Extracted
from relata_celery.domain.errors import PermanentError

Document = dict[str, Any]


class Storage:
    """Documents by their name, chunks by document and number (from 0). Safe from any thread."""

    def __init__(self, database: Database[Document]) -> None:
        self._documents = database["demo_documents"]
        self._chunks = database["demo_chunks"]

    def put_document(self, name: str, extracted: Extracted) -> None:
        fields = {
            "format": extracted.format,
            "title": extracted.title,
            "words": extracted.words,
            "text": extracted.text,
        }
        self._documents.update_one({"_id": name}, {"$set": fields}, upsert=True)

    def text(self, name: str) -> str:
        """The document's text; PermanentError when it was never extracted."""
        found = self._documents.find_one({"_id": name}, {"text": 1})
        if found is None:
            raise PermanentError(f"{name}: not in demo_documents, so it was never extracted")
        return str(found["text"])

    def put_chunks(self, name: str, pieces: list[str]) -> None:
        """Store the pieces under their numbers; chunks of an earlier, longer version go."""
        for number, piece in enumerate(pieces):
            fields = {"document": name, "number": number, "text": piece}
            self._chunks.update_one({"_id": _chunk_id(name, number)}, {"$set": fields}, upsert=True)
        self._chunks.delete_many({"document": name, "number": {"$gte": len(pieces)}})
        self._documents.update_one({"_id": name}, {"$set": {"chunks": len(pieces)}})

    def chunk(self, name: str, number: int) -> str:
        """One chunk's text; PermanentError when there is none."""
        found = self._chunks.find_one({"_id": _chunk_id(name, number)}, {"text": 1})
        if found is None:
            raise PermanentError(f"{name}: there is no chunk {number}")
        return str(found["text"])

    def put_embedding(self, name: str, number: int, vector: list[float]) -> None:
        self._chunks.update_one({"_id": _chunk_id(name, number)}, {"$set": {"embedding": vector}})

    def put_analysis(self, name: str, number: int, analysis: Analysis) -> None:
        fields = {
            "summary": analysis.summary,
            "keywords": list(analysis.keywords),
            "language": analysis.language,
        }
        self._chunks.update_one({"_id": _chunk_id(name, number)}, {"$set": {"analysis": fields}})

    def documents(self) -> list[Document]:
        """All documents by name, without their text."""
        return list(self._documents.find({}, {"text": 0}).sort("_id"))

    def chunks(self) -> list[Document]:
        """All chunks by document and number, without their text."""
        return list(self._chunks.find({}, {"text": 0}).sort([("document", 1), ("number", 1)]))


def _chunk_id(name: str, number: int) -> str:
    return f"{name}#{number}"


def from_environment(environment: Mapping[str, str] = os.environ) -> Storage:
    """This process' storage, in the database that RELATA_MONGODB_URI names."""
    uri = environment.get("RELATA_MONGODB_URI")
    if not uri:
        raise PermanentError("the demo's jobs need RELATA_MONGODB_URI; `relata demo` sets it for its worker")
    return Storage(_client(uri.removeprefix("relata+"), os.getpid()).get_default_database("relata"))


@functools.lru_cache(maxsize=4)
def _client(uri: str, pid: int) -> MongoClient[Document]:
    return MongoClient(uri, tz_aware=True, appname="relata-demo")


def drop_database(uri: str) -> None:
    """Remove the database that ``uri`` names, with all in it."""
    with MongoClient[Document](uri) as client:
        client.drop_database(client.get_default_database().name)


def with_database(uri: str, name: str) -> str:
    """``uri`` with ``name`` in place of its database.

    Credentials are checked against the database in the path unless authSource says otherwise; so
    that they still fit, the replaced name becomes the authSource.
    """
    scheme, separator, rest = uri.removeprefix("relata+").partition("://")
    if not separator or not scheme.startswith("mongodb"):
        raise ValueError("RELATA_MONGODB_URI must start with mongodb:// or mongodb+srv://")
    address, _, query = rest.partition("?")
    authority, _, old = address.partition("/")
    if "@" in authority and old and "authsource=" not in query.lower():
        query = f"{query}&authSource={old}" if query else f"authSource={old}"
    return f"{scheme}://{authority}/{name}" + (f"?{query}" if query else "")
