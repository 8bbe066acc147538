"""The end of an attempt's interruptible span, when the interrupt lands in it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from celery import Celery

from relata_celery.attempt import Attempt, Ticket
from relata_celery.domain.job import ErrorClass
from relata_celery.domain.outcome import Failed
from relata_celery.interrupt import BoardSignal, TimeLimitReached

TICKET = Ticket("a", "t", 1, 5, 1, "w", None, 60.0, None, None, 1_000_000)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


class LandsInLeave(BoardSignal):
    """An attempt whose interrupt comes when its handler has just returned."""

    landed = False

    def leave(self) -> None:
        if not self.landed:
            self.landed = True
            raise TimeLimitReached()
        super().leave()


def test_an_interrupt_that_lands_at_the_very_end_leaves_nothing_behind() -> None:
    url = "relata+mongodb://127.0.0.1:1/x"
    app = Celery("ends", broker=url, backend=url, task_cls="relata_celery:LeasedTask", set_as_current=False)

    @app.task(name="t", shared=False)
    def task() -> int:
        return 5

    attempt = Attempt(TICKET, LandsInLeave(None, 0, 0, 60.0))
    given_back: list[str] = []
    attempt.at_end.append(lambda: given_back.append("slot"))
    with pytest.raises(Exception, match="time ran out"):
        attempt.execute(task, (), {})
    assert given_back == ["slot"]
    assert BoardSignal._entered is None
    assert isinstance(attempt.outcome, Failed)
    assert attempt.outcome.error.error_class is ErrorClass.TIMEOUT
