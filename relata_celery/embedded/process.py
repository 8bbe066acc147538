"""Starting mongod apart from this process, and recognising it later."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from .errors import EmbeddedUnavailable
from .place import Place, State

#: Handed down to mongod; the rest (settings, credentials of other programs) is none of its business.
ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
PORTS = range(20_000, 32_000)
LOG_BYTES_KEPT = 16 * 1024 * 1024


def spawn(program: Path, place: Place, port: int, replica_set: str) -> int:
    """Start mongod in a session of its own and return its process number.

    The shell in between ends at once, so the server is nobody's child: it outlives us, takes no
    Ctrl-C from our terminal, and leaves no zombie behind in a long-lived starter.
    """
    arguments = [
        *("--dbpath", str(place.data), "--logpath", str(place.log), "--logappend"),
        *("--port", str(port), "--bind_ip", "127.0.0.1", "--nounixsocket"),
        *("--replSet", replica_set, "--keyFile", str(place.key_file)),
        *("--setParameter", "enableLocalhostAuthBypass=false"),
        *("--setParameter", "diagnosticDataCollectionEnabled=false"),
        *("--wiredTigerCacheSizeGB", "0.5", "--oplogSize", "512", "--slowms", "1000", "--quiet"),
    ]
    with contextlib.suppress(OSError):
        if place.log.stat().st_size > LOG_BYTES_KEPT:
            place.log.replace(place.log.with_name("log.old"))
    script = 'out=$1; shift; "$@" </dev/null >"$out" 2>&1 & echo $!'
    try:
        started = subprocess.run(
            ["/bin/sh", "-c", script, "sh", str(place.output), str(program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**{k: os.environ[k] for k in ENVIRONMENT if k in os.environ}, "LC_ALL": "C"},
            cwd=place.folder,
            umask=0o077,
            start_new_session=True,
            timeout=30,
            check=True,
        )
        return int(started.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise EmbeddedUnavailable(f"{program} cannot be started: {exc}") from exc


def running(place: Place, state: State | None) -> int | None:
    """The process number of this home's server, or None when it does not run.

    A recorded number counts only with its start time. Without a recorded number (the starter died
    before it wrote one) mongod's own lock file names it, if that process was started on our data.
    """
    if state and state.pid and state.pid_started and started_at(state.pid) == state.pid_started:
        return state.pid
    try:
        pid = int((place.data / "mongod.lock").read_text())
    except (OSError, ValueError):
        return None
    return pid if started_at(pid) and f" --dbpath {place.data} --logpath " in _command(pid) else None


def holder(place: Place, timeout_s: float) -> int | None:
    """The server that has locked our data; it writes its number there only when its storage is open."""
    deadline = time.monotonic() + timeout_s
    while (pid := running(place, None)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return pid


def started_at(pid: int) -> str | None:
    """When this process was started, in the system's own terms; None when there is no live one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return None
        return _ps("lstart=", pid)
    return None if fields[0] in "ZX" else fields[19]


def _command(pid: int) -> str:
    """The command line of a process, its arguments set apart by single spaces."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return _ps("command=", pid) or ""


def port_of(pid: int) -> int | None:
    """The port that a server of ours was told to listen on."""
    found = re.search(r" --port (\d+) --bind_ip ", _command(pid))
    return int(found[1]) if found else None


def _ps(column: str, pid: int) -> str | None:
    try:
        answer = subprocess.run(
            ["ps", "-ww", "-o", column, "-p", str(pid)],
            check=False,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def terminate(pid: int, since: str | None) -> None:
    """Ask the process to end, if it still is the one that started at ``since``."""
    if since is not None and started_at(pid) == since:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def gone(pid: int, since: str | None, timeout_s: float) -> bool:
    """True as soon as that process has ended, False when it has not within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while started_at(pid) == since is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def port_to_use(recorded: int | None) -> int:
    """The recorded port when nobody holds it, else a free one.

    Chosen below the range from which systems give ports to outgoing connections, so that it is
    likely to be free again at the next start.
    """
    for port in (recorded, *random.sample(PORTS, 50), 0):
        if port is None:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise EmbeddedUnavailable("no port of 127.0.0.1 is free")


def last_words(place: Place, log_start: int) -> list[str]:
    """What a server that ended wrote since ``log_start``: its errors, then its last lines, all cut short."""
    lines = []
    with contextlib.suppress(OSError), open(place.log, "rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").splitlines()[-500:]
    errors = [line for line in lines if _severity(line) in ("E", "F")][:5]
    with contextlib.suppress(OSError):
        errors += place.output.read_text(errors="replace").splitlines()[-5:]
    return [line[:500] for line in (*errors, *(line for line in lines[-3:] if line not in errors))]


def _severity(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry.get("s") if isinstance(entry, dict) else None
