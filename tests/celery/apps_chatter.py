"""Imported by a worker (``-I``): threads of its parent that write the log all the time, as busy ones do."""

import logging
import threading
import time

from celery.signals import worker_ready


def _talk() -> None:
    while True:
        logging.getLogger("chatter").info("%s", "x" * 300)
        time.sleep(0.003)


@worker_ready.connect
def _start(**kwargs: object) -> None:
    for _ in range(3):
        threading.Thread(target=_talk, daemon=True).start()
