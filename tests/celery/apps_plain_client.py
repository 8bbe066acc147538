"""An app with one leased task that is not yet finalized: what a client's module looks like when it is imported."""

from __future__ import annotations

import os

from celery import Celery

import relata_celery  # noqa: F401  (registers the transport)

URL = f"relata+{os.environ['RELATA_TEST_URI']}"
#: As text, or as a list of one or more URLs.
BROKERS = {"text": URL, "list": [URL], "two": [URL, URL], "semicolon": f"{URL};{URL}"}

app = Celery(
    "client",
    broker=BROKERS[os.environ.get("RELATA_TEST_BROKERS", "text")],
    backend=URL,
    task_cls="relata_celery:LeasedTask",
)


@app.task(name="client.add", shared=False)
def add(x: int, y: int) -> int:
    return x + y
