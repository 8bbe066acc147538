"""A worker whose consumer runs Celery's blocking loop, asked for jobs and an answer; run as a script."""

from __future__ import annotations

import os
import sys
import threading

from celery import Celery
from celery.result import allow_join_result

import relata_celery  # noqa: F401  (registers the transport)

URL = "relata+" + os.environ["RELATA_TEST_URI"]
app = Celery("sync_worker", broker=URL, backend=URL, task_cls="relata_celery:LeasedTask")


@app.task
def add(x: int, y: int) -> int:
    return x + y


def main(pool: str) -> None:
    ready = threading.Event()
    worker = app.Worker(
        pool=pool, concurrency=2, use_eventloop=False, loglevel="INFO", hostname="sync@test",
        ready_callback=lambda consumer: ready.set(),
    )  # fmt: skip
    threading.Thread(target=worker.start, daemon=True).start()
    ready.wait(30)
    out = sys.__stdout__
    print("loop:", worker.consumer.loop.__name__, file=out, flush=True)
    with allow_join_result():
        results = [add.delay(n, 1) for n in range(8)]
        print("results:", [result.get(timeout=20) for result in results], file=out, flush=True)
        print("later:", add.apply_async((10, 20), countdown=1).get(timeout=20), file=out, flush=True)
    print(app.control.inspect(timeout=5, limit=1).ping(), file=out, flush=True)
    os._exit(0)  # the blocking loop of a thread has no other end


if __name__ == "__main__":
    main(sys.argv[1])
