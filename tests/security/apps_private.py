"""Tasks whose arguments and results are nobody's business, and plain ones around them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task

from relata_celery import LeasedTask, PermanentError, TransientError


def make_app(uri: str) -> Celery:
    """An app with these tasks on this database."""
    url = f"relata+{uri}"
    made = Celery("private", broker=url, backend=url, task_cls="relata_celery:LeasedTask", set_as_current=False)
    made.conf.task_send_sent_event = True
    for function, options in TASKS:
        made.task(name=function.__name__, shared=False, **options)(function)
    return made


def _note(what: str) -> None:
    """Tell the test that a handler ran."""
    if path := os.environ.get("RELATA_TEST_RAN"):
        with open(path, "a") as ran:
            ran.write(f"{what}\n")


def whisper(word: str, seconds: float = 0, *, aside: str = "") -> str:
    time.sleep(seconds)
    _note("whisper")
    return word + aside


def conceal(word: str, seconds: float = 0, *, aside: str = "") -> str:
    time.sleep(seconds)
    _note("conceal")
    return word + aside


def conceal_bound(self: Any, word: str) -> str:
    if self.request.retries == 0:
        raise self.retry(args=(word + "!",), countdown=0, exc=TransientError("again"))
    return word


def conceal_state(self: Any, word: str, until: str) -> str:
    self.update_state(state="THINKING", meta={"word": word})
    while not Path(until).exists():
        time.sleep(0.05)
    return word


def conceal_failing(word: str) -> None:
    raise PermanentError("on purpose")


def conceal_replacing(self: Any, word: str) -> Any:
    raise self.replace(self.app.tasks["conceal"].s(word + "?"))


def repeat(word: Any, *more: Any) -> Any:
    return word


def recall(word: Any) -> str:
    """An errback with an argument of its own."""
    return "recalled"


def total(words: list[str]) -> str:
    return "+".join(words)


def conceal_dying(word: str) -> None:
    os.kill(os.getpid(), 9)


def shout(word: str) -> str:
    """A plain Celery task."""
    return word.upper()


TASKS: list[tuple[Any, dict[str, Any]]] = [
    (whisper, {"sensitive": True}),
    (conceal, {"encrypted": True}),
    (conceal_bound, {"encrypted": True, "bind": True}),
    (conceal_state, {"encrypted": True, "bind": True}),
    (conceal_failing, {"encrypted": True, "max_attempts": 1}),
    (conceal_replacing, {"encrypted": True, "bind": True}),
    (conceal_dying, {"encrypted": True, "max_attempts": 1}),
    (repeat, {}),
    (recall, {}),
    (total, {}),
    (shout, {"base": Task}),
]

app = make_app(os.environ.get("RELATA_TEST_URI", "mongodb://none"))

__all__ = ["LeasedTask", "app", "make_app"]
