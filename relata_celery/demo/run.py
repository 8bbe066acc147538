"""``relata demo``: checks what was asked, gives the run a database of its own, and clears it away."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

from relata_celery.domain.errors import RelataError

EXTRA = ("pypdf", "bs4", "httpx")
EXTRA_NAMES = {"bs4": "beautifulsoup4"}
GOODBYE_S = 30.0

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def run_demo(
    documents: str | Path | None = None,
    *,
    keep: bool = False,
    as_json: bool = False,
    crash: bool = True,
    timeout_s: float = 180.0,
) -> int:
    """Run the pipeline over ``documents`` (None: those shipped) and return the exit status.

    0: every job came to exactly one accepted end; 1: a job was lost or doubled, the time limit
    passed, or the run failed; 2: nothing was begun, because of what was asked or what is missing.
    The database is RELATA_MONGODB_URI's server, else the embedded one, under a name of its own
    that is dropped at the end unless ``keep``.
    """
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(EXTRA_NAMES.get(name, name) for name in missing)
        return _refuse(f"the demo needs {names}: pip install 'relata_celery[demo]'")
    if os.name != "posix":
        return _refuse("the demo kills a process group, which only POSIX systems have; it does not run here")

    from relata_celery.demo import extraction
    from relata_celery.demo.session import Options

    folder = extraction.shipped_documents() if documents is None else Path(documents)
    leave_out = ("SOURCES.md",) if documents is None else ()
    if not folder.is_dir():
        return _refuse(f"--documents {folder}: there is no such folder")
    if not extraction.find_documents(folder, leave_out).documents:
        endings = ", ".join(extraction.FORMATS)
        return _refuse(f"--documents {folder}: no file in it ends in {endings}")
    if timeout_s <= 0:
        return _refuse(f"--jobs-timeout {timeout_s:g}: must be more than 0 seconds")

    name = f"relata_demo_{secrets.token_hex(4)}"
    try:
        uri = uri_of(name)
    except (ValueError, RelataError) as wrong:
        return _refuse(str(wrong))
    options = Options(str(folder.resolve()), name, leave_out, keep, as_json, crash, timeout_s)
    try:
        return _run(options.dump(), uri)
    finally:
        if keep:
            _say_how_to_look(name, as_json)
        else:
            _clear_away(uri, name)
        if not os.environ.get("RELATA_MONGODB_URI"):
            _say_how_to_stop(as_json)


def uri_of(name: str) -> str:
    """The URI, with its credentials, of the database ``name`` on the server that a run uses."""
    from relata_celery.demo.storage import with_database

    given = os.environ.get("RELATA_MONGODB_URI")
    if given:
        return with_database(given, name)
    from relata_celery import embedded

    return with_database(embedded.uri(), name)


def _clear_away(uri: str, name: str) -> None:
    from pymongo.errors import PyMongoError

    from relata_celery.demo.storage import drop_database

    try:
        drop_database(uri)
    except PyMongoError as failure:
        # Its text can hold the address; the name is enough to remove it by hand.
        print(f"the database {name} could not be dropped: {type(failure).__name__}", file=sys.stderr)


def _run(options: str, uri: str) -> int:
    """The session in a process of its own; on Ctrl-C it gets the time to stop its worker."""
    command = [sys.executable, "-m", "relata_celery.demo.session", options]
    session = subprocess.Popen(command, env={**os.environ, "RELATA_MONGODB_URI": uri})
    before = signal.signal(signal.SIGTERM, _end) if _in_main_thread() else None
    try:
        return _status(session.wait())
    except KeyboardInterrupt:
        # The terminal has sent it to the session as well, which is now stopping its worker.
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            session.wait(GOODBYE_S)
        return INTERRUPTED
    finally:
        if session.poll() is None:
            session.terminate()
            session.wait(GOODBYE_S)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _in_main_thread() -> bool:
    """Signal handlers can be set there only."""
    return threading.current_thread() is threading.main_thread()


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the command by way of its finally clauses, so that nothing stays behind."""
    raise SystemExit(128 + number)


def _status(returned: int) -> int:
    """A process that a signal ended has failed."""
    return returned if returned >= 0 else FAILED


def _say_how_to_look(name: str, as_json: bool) -> None:
    command = f"{sys.executable} -c 'from relata_celery.demo.run import uri_of; print(uri_of(\"{name}\"))'"
    print(
        f"The database {name} is kept. To look at it:\n"
        f'  export RELATA_MONGODB_URI="$({command})"\n'
        "  celery -A relata_celery relata jobs list",
        file=sys.stderr if as_json else sys.stdout,
    )


def _say_how_to_stop(as_json: bool) -> None:
    print(
        "The embedded MongoDB goes on running, for the next who asks. To stop it:\n"
        "  celery -A relata_celery relata embedded stop",
        file=sys.stderr if as_json else sys.stdout,
    )


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return USAGE
