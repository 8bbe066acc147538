"""The demo's jobs: extract -> chunk -> embed -> analyse, as an app would write them.

``extract`` and ``chunk`` are one Celery chain per document: the second is published because the
first succeeded, as part of that outcome. From there jobs publish jobs: ``chunk`` one ``embed`` per
piece, ``embed`` the ``analyse`` of its piece. Those carry ids made of document and piece, and
publishing an id twice is one job, so a handler that is run again after a crash adds nothing.

Each handler is idempotent: it writes under fixed keys. Run a worker with
``celery -A relata_celery worker -I relata_celery.demo.jobs``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import chain

from relata_celery import PermanentError, current_job, job
from relata_celery.demo import analysis, chunking, embedding, extraction, journal, storage
from relata_celery.demo.plan import job_id


@job(queue="default", timeout=30, name="demo.extract")
def extract(path: str, name: str) -> str:
    """Read the file at ``path`` and store its text as document ``name``."""
    this = current_job()
    with journal.attempt(this.id, this.attempt):
        document = extraction.extract(Path(path), this.progress)
        storage.from_environment().put_document(name, document)
    return name


@job(queue="default", timeout=30, name="demo.chunk")
def chunk(name: str) -> int:
    """Cut the document's text into pieces and publish an ``embed`` for each."""
    this = current_job()
    with journal.attempt(this.id, this.attempt):
        store = storage.from_environment()
        pieces = chunking.split(store.text(name))
        store.put_chunks(name, pieces)
        for number in range(len(pieces)):
            _publish(embed, "embed", name, number)
            this.progress((number + 1) / len(pieces), f"chunk {number + 1} of {len(pieces)} published")
    return len(pieces)


@job(queue="default", timeout=30, name="demo.embed")
def embed(name: str, number: int) -> int:
    """Store a vector for the piece and publish its ``analyse``."""
    this = current_job()
    with journal.attempt(this.id, this.attempt):
        store = storage.from_environment()
        vector = embedding.embed(store.chunk(name, number))
        store.put_embedding(name, number, vector)
        _publish(analyse, "analyse", name, number)
    return len(vector)


@job(queue="ai", ai=True, max_attempts=6, timeout=20, name="demo.analyse")
def analyse(name: str, number: int) -> str:
    """Ask the model about the piece and store what it says."""
    this = current_job()
    with journal.attempt(this.id, this.attempt):
        endpoint = analysis.Endpoint.from_environment(os.environ)
        if endpoint is None:
            raise PermanentError("no endpoint: set RELATA_DEMO_OPENAI_BASE_URL or OPENAI_BASE_URL")
        store = storage.from_environment()
        answer = analysis.ask(endpoint, store.chunk(name, number))
        store.put_analysis(name, number, answer)
    return answer.language


def enqueue(name: str, path: Path) -> None:
    """Publish a document's first two steps, as a chain."""
    first = extract.s(str(path), name).set(task_id=job_id("extract", name), item_id=name, tags=["demo"])
    second = chunk.s().set(task_id=job_id("chunk", name), item_id=name, tags=["demo"])
    chain(first, second).apply_async()


def _publish(task: Any, step: str, name: str, number: int) -> None:
    """Publish one piece's job under its fixed id; noted first, so that a lost one would be seen."""
    fixed_id = job_id(step, name, number)
    journal.write("enqueue", fixed_id)
    task.apply_async((name, number), task_id=fixed_id, item_id=name, tags=["demo"])
