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
import logging, os, select, sys, threading, time
from relata_celery.worker.forking import fork_between_log_lines

reading, writing = os.pipe()
log = logging.getLogger("pipe")
log.addHandler(logging.StreamHandler(open(writing, "w")))
if sys.argv[1] == "guarded":
    fork_between_log_lines()
    fork_between_log_lines()

def empty_soon():
    time.sleep(0.5)  # the fork comes first; with the guard it waits for this
    while os.read(reading, 65536):
        pass

threading.Thread(target=lambda: log.error("x" * 300_000), daemon=True).start()
while select.select([], [writing], [], 0)[1]:
    time.sleep(0.01)  # until the pipe is full, and the thread inside its line
threading.Thread(target=empty_soon, daemon=True).start()
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
