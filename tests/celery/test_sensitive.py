"""A sensitive task's arguments and result are seen by its caller only."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from celery import Celery

from tests.celery.apps_sensitive import whisper
from tests.waiting import wait_until
from tests.workers import running_worker

SECRET = "hunter2-of-the-argument"


def test_arguments_and_results_stay_out_of_log_events_and_inspect(database_uri: str, tmp_path: Path) -> None:
    url = f"relata+{database_uri}"
    app = Celery("caller", broker=url, backend=url, task_cls="relata_celery:LeasedTask", set_as_current=False)
    calling = app.task(name="whisper", sensitive=True, shared=False)(whisper.run)
    heard: list[dict[str, Any]] = []
    with running_worker("tests.celery.apps_sensitive", database_uri, tmp_path, "-c", "1", "-E") as worker:
        listening = threading.Event()
        listener = threading.Thread(target=listen, args=(app, heard, listening), daemon=True)
        listener.start()
        assert listening.wait(20)
        result = calling.delay(SECRET, 5, aside=SECRET)
        inspect = app.control.inspect(timeout=3, limit=1)
        active = wait_until(lambda: shown_active(inspect), timeout=30, message="the job is seen running")
        assert SECRET not in repr(active)
        assert "(hidden)" in repr(active)
        assert result.get(timeout=60) == SECRET * 2
        listener.join(30)
        assert heard[-1]["type"] == "task-succeeded"
        assert SECRET not in worker.log
    assert SECRET not in repr(heard)


def listen(app: Celery, heard: list[dict[str, Any]], listening: threading.Event) -> None:
    with app.connection() as connection:
        receiver = app.events.Receiver(connection)

        def hear(event: dict[str, Any]) -> None:
            heard.append(event)
            receiver.should_stop = event["type"] == "task-succeeded"

        receiver.handlers = {"*": hear}
        for _ in receiver.itercapture(limit=None, timeout=60, wakeup=False):
            listening.set()


def shown_active(inspect: Any) -> Any:
    return [job for jobs in (inspect.active() or {}).values() for job in jobs]
