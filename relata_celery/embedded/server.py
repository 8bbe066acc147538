"""The embedded server's life: uri, start, stop, status."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from . import members, process, program
from .errors import EmbeddedUnavailable
from .place import Place, State

PORT_TRIES = 5
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class EmbeddedStatus:
    """What is known about the embedded server. ``uri`` shows no password; ``since`` is aware UTC."""

    running: bool
    home: Path
    log: Path
    pid: int | None = None
    port: int | None = None
    version: str | None = None
    since: datetime | None = None
    uri: str | None = None


def uri(home: Path | None = None) -> str:
    """The URI, with credentials, of the running embedded server; starts it when it does not run."""
    place = Place(home)
    state, password = place.state(), place.password()
    if not (state and state.ready and password and process.running(place, state) == state.pid):
        state = _start(place)
        password = place.password()
    return _uri(state.port, password or "")


def start(home: Path | None = None) -> EmbeddedStatus:
    """Start the embedded server unless it runs, wait until it takes writes, and say where it is."""
    place = Place(home)
    _start(place)
    return _status(place)


def status(home: Path | None = None) -> EmbeddedStatus:
    """Whether the embedded server runs, and where; starts and waits for nothing."""
    return _status(Place(home))


def stop(home: Path | None = None, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Shut the embedded server down and wait until it is gone; False when none was running.

    Asks by command first, then by SIGTERM, each for up to ``timeout_s``. Never kills: data could
    need repair. Raises EmbeddedUnavailable when the process does not end.
    """
    place = Place(home)
    if not place.folder.exists():
        return False
    with place.locked():
        state = place.state()
        pid = process.running(place, state)
        if pid is None:
            return False
        since = process.started_at(pid)
        port = process.port_of(pid) or (state.port if state else None)
        asked = port is not None and members.shut_down(place, port)
        if not (asked and process.gone(pid, since, timeout_s)):
            process.terminate(pid, since)
            if not process.gone(pid, since, timeout_s):
                raise EmbeddedUnavailable(
                    f"the embedded MongoDB (process {pid}) was asked to end but has not in {timeout_s:g} s"
                )
        if port is not None:
            place.record(State(port=port))
        return True


def _start(place: Place) -> State:
    """Under the lock: find or launch the server, complete what a broken start left out, record it."""
    place.prepare()
    with place.locked():
        state = place.state()
        pid = process.running(place, state)
        if state and state.ready and pid == state.pid is not None and place.password():
            return state
        place.make_secrets()
        if pid is None:
            state = _launch(place, state.port if state else None)
        else:
            state = _adopted(pid, state)
            _set_up(place, state)
        state = replace(state, ready=True)
        place.record(state)
        return state


def _launch(place: Place, recorded_port: int | None) -> State:
    """Start the process and set it up; a port that another program takes meanwhile is given up."""
    found = program.find(place.bin)
    port = process.port_to_use(recorded_port)
    for chance in range(PORT_TRIES):
        log_start = place.log.stat().st_size if place.log.exists() else 0
        place.record(State(port=port, version=found.version))
        pid = process.spawn(found.path, place, port, members.REPLICA_SET)
        state = State(
            port=port,
            pid=pid,
            pid_started=process.started_at(pid),
            version=found.version,
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        place.record(state)
        try:
            _set_up(place, state)
            return state
        except EmbeddedUnavailable as exc:
            if not process.gone(pid, state.pid_started, 0):
                raise
            words = process.last_words(place, log_start)
            if any("DBPathInUse" in line for line in words):
                # A start that died within its first moments had left a server behind after all.
                holder = process.holder(place, timeout_s=10.0)
                if holder is not None:
                    state = _adopted(holder, None)
                    _set_up(place, state)
                    return replace(state, version=found.version)
            if chance + 1 < PORT_TRIES and any("Address already in use" in line for line in words):
                port = process.port_to_use(None)
                continue
            raise EmbeddedUnavailable(
                f"the embedded MongoDB ended as soon as it was started ({found.path}, version "
                f"{found.version}, data in {place.data}). From its log {place.log}:",
                words or ["(nothing was written)"],
            ) from exc
    raise AssertionError("unreachable: the last try returns or raises")


def _adopted(pid: int, state: State | None) -> State:
    """The state of a server that runs, although the start that launched it did not come to its end."""
    port = process.port_of(pid) or (state.port if state else None)
    if port is None:
        raise EmbeddedUnavailable(
            f"an embedded MongoDB runs (process {pid}), but nothing says on which port: "
            f"end that process, then try again"
        )
    since = state.since if state and state.pid == pid else None
    version = state.version if state else None
    return State(port, pid, process.started_at(pid), version, since)


def _set_up(place: Place, state: State) -> None:
    pid, since = state.pid or 0, state.pid_started
    members.make_ready(place, state.port, lambda: not process.gone(pid, since, 0))


def _uri(port: int, password: str) -> str:
    return (
        f"mongodb://{members.USER}:{password}@127.0.0.1:{port}/{members.DATABASE}"
        f"?replicaSet={members.REPLICA_SET}&authSource=admin"
    )


def _status(place: Place) -> EmbeddedStatus:
    state = place.state()
    pid = process.running(place, state)
    if pid is None or state is None:
        return EmbeddedStatus(running=pid is not None, pid=pid, home=place.home, log=place.log)
    return EmbeddedStatus(
        running=True,
        home=place.home,
        log=place.log,
        pid=pid,
        port=state.port,
        version=state.version,
        since=datetime.fromisoformat(state.since) if state.since else None,
        uri=_uri(state.port, "***"),
    )
