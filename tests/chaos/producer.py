"""Publishes a mixture of jobs at a steady rate: ``python -m tests.chaos.producer SECONDS SEED``.

Each call's answer is one line of JSON in ``acknowledged``: the ids that it returned (each with the first step of
its chain, or null), or what it raised.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from celery import chain

import relata_celery
from tests.chaos.apps_chaos import app

RATE = 20.0


def publish(dice: random.Random) -> dict[str, str | None]:
    """One call of the mixture; the ids that it returned."""
    tasks = app.tasks
    kind = dice.choices(["work", "flaky", "broken", "too_slow", "chain", "limited", "admitted", "bulk"],
                        [40, 15, 5, 2, 15, 6, 6, 3])[0]  # fmt: skip
    if kind == "chain":
        last = chain(tasks["work"].s(0.01), tasks["step"].s(), tasks["step"].s()).apply_async()
        return {last.id: last.parent.id, last.parent.id: last.parent.parent.id, last.parent.parent.id: None}
    if kind == "bulk":
        with relata_celery.bulk():
            results = [tasks["work"].delay(0.0) for _ in range(20)]
        return dict.fromkeys((result.id for result in results), None)
    arguments = {
        "work": (dice.choice([0.0, 0.0, 0.02, 0.2, 1.0]),),
        "flaky": (dice.choice([1, 2]),),
        "limited": (0.1,),
        "admitted": (0.1,),
    }.get(kind, ())
    return {tasks[kind].delay(*arguments).id: None}


def main(seconds: float, seed: int) -> None:
    dice, until = random.Random(seed), time.monotonic() + seconds
    with (Path(os.environ["CHAOS_FOLDER"]) / "acknowledged").open("a", buffering=1) as told:
        due = time.monotonic()
        while time.monotonic() < until:
            try:
                answer: dict[str, Any] = {"ids": publish(dice)}
            except Exception as exc:
                answer = {"raised": f"{type(exc).__name__}: {exc}"}
            told.write(json.dumps(answer) + "\n")
            due = max(due + 1 / RATE, time.monotonic() - 1)
            time.sleep(max(due - time.monotonic(), 0))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
