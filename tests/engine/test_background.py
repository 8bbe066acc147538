"""Background parts: what counts as an answer of MongoDB, and who notices one that ended or hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relata_celery.domain.errors import StoreUnavailable
from relata_celery.engine.background import Background
from relata_celery.engine.pulse import Pulse
from tests.waiting import wait_until


class Part(Background):
    """Does what the test says in its next steps, and then waits until it is woken."""

    name = "part"

    def __init__(self, *steps: Callable[[Part], Any]) -> None:
        super().__init__(random=lambda: 0.0)
        self.steps = list(steps)
        self.done = 0

    def step(self) -> float | None:
        if not self.steps:
            return None
        step = self.steps.pop(0)
        try:
            step(self)
        finally:
            self.done += 1
        return 0.0


def away(part: Part) -> None:
    raise StoreUnavailable("nobody there")


def idle(part: Part) -> None:
    """Comes round without a word to MongoDB."""


def answered(part: Part) -> None:
    part.answered()


def ended(part: Part) -> None:
    raise SystemExit


@pytest.fixture
def started() -> Iterator[Callable[..., Any]]:
    parts: list[Background] = []

    def start(part: Background) -> Background:
        parts.append(part)
        part.start()
        return part

    yield start
    for part in parts:
        part.stop()


def test_a_step_that_asks_nothing_is_no_sign_of_mongodb(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "relata_celery"):
        part = started(Part(away, idle, idle))
        wait_until(lambda: part.done == 3)
        assert part.vitals().answered_s_ago is None
        assert "is back" not in caplog.text
        part.steps += [away, answered]
        part.wake()
        wait_until(lambda: part.vitals().answered_s_ago is not None)
    assert "MongoDB is back after 2 failed tries" in caplog.text
    assert caplog.text.count("cannot be reached") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_part_that_ended_is_told_once(started: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    part = started(Part(ended))
    wait_until(lambda: not part.alive)
    pulse = Pulse([part], lambda: 0.0)
    pulse.step()
    pulse.step()
    assert caplog.text.count("the worker's part has ended") == 1


def test_a_part_that_hangs_is_told_until_it_is_back(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    part = started(Part(lambda _: release.wait(60)))
    pulse = Pulse([part], lambda: 0.0, late_s=0.0)
    wait_until(lambda: part.vitals().late_s > 0)
    pulse.step()
    assert "the worker's part has not come round" in caplog.text
    release.set()
    wait_until(lambda: part.vitals().late_s == 0)
    pulse.step()
    assert "the worker's part works again" in caplog.text


def test_a_part_that_rests_or_was_stopped_is_in_no_trouble(
    started: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    resting, stopped = started(Part(idle)), started(Part())
    wait_until(lambda: resting.done == 1 and resting.vitals().late_s == 0)
    stopped.stop()
    Pulse([resting, stopped], lambda: 0.0, late_s=0.0).step()
    assert caplog.text == ""
