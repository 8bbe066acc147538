"""A process forks between log lines, never inside one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: A thread is inside a line that the full pipe does not take; the process forks; the reader then empties the
#: pipe. The child's own line can come only when it did not inherit the stream's lock as taken.
PROGRAM = """
import logging, os, sys, threading
from relata_celery.worker.forking import fork_between_log_lines

reading, writing = os.pipe()
log = logging.getLogger("pipe")
log.addHandler(logging.StreamHandler(open(writing, "w")))
if sys.argv[1] == "guarded":
    fork_between_log_lines()
    fork_between_log_lines()

def empty_later():
    inside.wait()
    threading.Event().wait(0.5)
    while os.read(reading, 65536):
        pass

class Line:
    def __str__(self):
        inside.set()
        return "x" * 300_000

inside = threading.Event()
threading.Thread(target=empty_later, daemon=True).start()
threading.Thread(target=lambda: log.error(Line()), daemon=True).start()
inside.wait()
threading.Event().wait(0.2)
child = os.fork()
if child == 0:
    import signal
    signal.alarm(5)
    log.error("the child's line")
    os._exit(0)
log.error("the parent's line")
_, status = os.waitpid(child, 0)
print("killed" if os.WIFSIGNALED(status) else "ended", flush=True)
os._exit(0)
"""


def forked(how: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return answer.stdout.strip()


def test_a_child_forked_while_another_thread_logs_can_log() -> None:
    assert forked("guarded") == "ended"


def test_without_the_guard_it_would_wait_for_ever() -> None:
    """Should Python mend this one day, the guard can go."""
    assert forked("unguarded") == "killed"
