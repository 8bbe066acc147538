"""Imported by a worker (``-I``): its pool processes take longer to start than a short lease lasts."""

import time

from celery.signals import worker_process_init


@worker_process_init.connect
def _take_time(**kwargs: object) -> None:
    time.sleep(3.5)
