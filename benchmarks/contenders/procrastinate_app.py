"""The task of procrastinate, and a worker process: ``python -m benchmarks.contenders.procrastinate_app``.

The task is a coroutine, which procrastinate runs without a thread: the faster of its two ways.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

from procrastinate import App, PsycopgConnector

from benchmarks import tally

from .base import setting

app = App(connector=PsycopgConnector(conninfo=setting("BROKER")))


@app.task(name="noop", queue="noop")
async def noop(sent_ns: int = 0) -> None:
    tally.ran(sent_ns)


async def work(concurrency: int, together: int) -> None:
    async with app.open_async():
        tally.ready()
        started = Path(setting("TALLY"))
        while len(list(started.glob("*.ready"))) < together:  # as the children of one parent would
            time.sleep(0.005)
        await app.run_worker_async(concurrency=concurrency)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(work(int(sys.argv[1]), int(sys.argv[2])))
