"""A task whose arguments and result are nobody's business."""

from __future__ import annotations

import os
import time

from celery import Celery

import relata_celery  # noqa: F401  (registers the transport)

URL = "relata+" + os.environ["RELATA_TEST_URI"] if "RELATA_TEST_URI" in os.environ else "relata+mongodb://none"
app = Celery("sensitive", broker=URL, backend=URL, task_cls="relata_celery:LeasedTask", set_as_current=False)


@app.task(name="whisper", sensitive=True, shared=False)
def whisper(word: str, seconds: float = 0, *, aside: str = "") -> str:
    time.sleep(seconds)
    return word + aside
