"""Waiting for something to become true, with a deadline instead of a sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], timeout: float = 10.0, message: str = "", interval: float = 0.02
) -> T:
    """Call ``condition`` every ``interval`` seconds and return its first true answer.

    After ``timeout`` seconds raise AssertionError with ``message`` and the last answer. What the
    condition raises goes through.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            what = message or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not within {timeout:g} s: {what} (last answer: {answer!r})")
        time.sleep(interval)
