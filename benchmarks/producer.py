"""A producing process: ``python -m benchmarks.producer CONTENDER VERB JOBS [RATE]``; prints the seconds it took.

Connecting and declaring queues come before the clock starts; ``close`` after it has stopped.
"""

from __future__ import annotations

import sys
import time

from .contenders import CONTENDERS
from .contenders.base import Producer

#: Probes sent before those that count, so that both sides have opened what they need.
WARM_UP = 10


def paced(producer: Producer, jobs: int, rate: float) -> None:
    """Send probes at fixed times, whatever each sending takes."""
    begin_ns = time.monotonic_ns()
    for number in range(WARM_UP + jobs):
        due_ns = begin_ns + int(number * 1e9 / rate)
        while (left_ns := due_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)
        producer.probe(time.monotonic_ns() if number >= WARM_UP else 0)


def main(name: str, verb: str, jobs: int, rate: float) -> None:
    producer = CONTENDERS[name].producer()
    begin = time.perf_counter()
    if verb == "paced":
        paced(producer, jobs, rate)
    elif verb in ("one_by_one", "in_bulk", "later", "consume"):
        getattr(producer, verb)(jobs)
    else:
        raise SystemExit(f"no such verb: {verb}")
    print(time.perf_counter() - begin)
    producer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else 0.0)
