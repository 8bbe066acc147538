"""What ``relata doctor`` looks at. Each check says what it found and how to mend it; none changes anything.

A check that cannot be made because an earlier one failed (no connection, say) is left out: the failed one
says what to do first.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qsl

from relata_celery import bootstrap
from relata_celery.conf import ENVIRONMENT_PREFIX, PREFIX, Settings, environment_warnings
from relata_celery.domain.errors import ConfigurationError, MissingKey, ServerTooOld, StoreError
from relata_celery.domain.privacy import ENCRYPTED
from relata_celery.private import private_tasks
from relata_celery.sealing import VARIABLE, Keyring
from relata_celery.store.client import Database, ServerInfo, connect, masked
from relata_celery.store.codec import COLLECTION
from relata_celery.store.indexes import check_indexes
from relata_celery.worker.checks import UNSAFE_CONTENT

from .commands import told
from .reach import configuration, name_an_app

OK, WARNING, ERROR = "ok", "warning", "error"

#: Times that people and ETAs give are off by this; leases are not, the server alone counts them.
CLOCK_WARNING_S = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: ``ok``, ``warning`` or ``error``; ``mend`` says what to do about it."""

    name: str
    status: str
    found: str
    mend: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting's value in force, and who gave it: ``environment``, ``configuration`` or ``default``."""

    name: str
    value: Any
    source: str


def check_up(app: Any) -> Iterator[Check]:
    """Every check that can be made, in the order in which things have to work."""
    try:
        conf = configuration(app)
    except ConfigurationError as exc:
        yield _failed("configuration", exc, "correct what it names")
        return
    yield from _settings(app)
    yield from _environment()
    yield from _content(conf)
    yield from _encryption(app)
    try:
        uri = bootstrap.mongodb_uri(app)
    except ConfigurationError as exc:
        yield _failed("broker", exc, f"set broker_url to relata+mongodb://host/database{name_an_app(app)}")
        return
    database = connect(uri)
    try:
        started = time.monotonic()
        info = database.server_info()
    except (StoreError, ConfigurationError) as exc:
        text, mending = told(exc)
        yield Check("connection", ERROR, f"{masked(uri)}: {text}", mending or "correct the broker URL")
        return
    took_ms = (time.monotonic() - started) * 1000
    yield Check("connection", OK, f"{masked(uri)} answers, database {database.name} ({took_ms:.0f} ms)")
    yield from _server(database, info)


def settings_in_force(app: Any) -> list[Setting]:
    """Every setting with where it came from; empty when they are not valid."""
    try:
        values = bootstrap.settings_of(app)
    except ConfigurationError:
        return []
    in_environment = {name.upper() for name, value in os.environ.items() if value.strip()}
    in_conf = {key.lower() for mapping in app.conf.maps for key in mapping if isinstance(key, str)}

    def source(name: str) -> str:
        if ENVIRONMENT_PREFIX + name.upper() in in_environment:
            return "environment"
        return "configuration" if PREFIX + name in in_conf else "default"

    return [Setting(name, getattr(values, name), source(name)) for name in Settings.model_fields]


def _settings(app: Any) -> Iterator[Check]:
    try:
        values = bootstrap.settings_of(app)
    except ConfigurationError as exc:
        for line in told(exc)[0].splitlines():
            yield Check("settings", ERROR, line, "workers refuse to start until this is corrected")
        return
    changed = [setting.name for setting in settings_in_force(app) if setting.source != "default"]
    told_of = f"; not the default: {', '.join(changed)}" if changed else ", all at their defaults"
    yield Check("settings", OK, f"valid{told_of}")
    if not values.workers_enabled:
        yield Check(
            "workers",
            WARNING,
            "relata_workers_enabled is false: workers run no jobs",
            "set it to true to run jobs",
        )


def _environment() -> Iterator[Check]:
    for line in environment_warnings(os.environ):
        yield Check("environment", WARNING, line, "correct its name, or unset it")


def _content(conf: Any) -> Iterator[Check]:
    # The very settings may be what is wrong, so the raw value is looked at.
    allowed = str(
        os.environ.get("RELATA_ALLOW_UNSAFE_CONTENT") or conf.get("relata_allow_unsafe_content") or ""
    ).lower() in ("1", "true", "yes", "on", "t", "y")
    unsafe = False
    for name in ("accept_content", "result_accept_content"):
        found = sorted(set(map(str, conf.get(name) or ())) & UNSAFE_CONTENT)
        if found:
            unsafe = True
            yield Check(
                "content",
                WARNING if allowed else ERROR,
                f"{name} accepts {', '.join(found)}: whoever can write to the database can run code in the workers",
                "accept json only"
                if allowed
                else "accept json only, or set relata_allow_unsafe_content; "
                "until then workers refuse to start",
            )
    if not unsafe:
        yield Check("content", OK, "only formats that run no code are accepted")


def _server(database: Database, info: ServerInfo) -> Iterator[Check]:
    try:
        database.require_supported()
    except ServerTooOld:
        yield Check("version", ERROR, f"MongoDB {info.version}", "upgrade to MongoDB 5.0 or newer")
        return
    yield Check("version", OK, f"MongoDB {info.version}")
    yield _topology(info)
    checks: tuple[tuple[str, Callable[[Database], Check]], ...] = (
        ("change streams", _change_streams),
        ("indexes", _indexes),
        ("writes", _writes),
        ("clock", _clock),
    )
    for name, check in checks:
        try:
            yield check(database)
        except StoreError as exc:
            yield _failed(name, exc, "mend this, then ask again")


def _failed(name: str, exc: Exception, mend: str) -> Check:
    """What kept a check from being made; ``mend`` is for errors that do not say it themselves."""
    text, mending = told(exc)
    return Check(name, ERROR, text, mending or mend)


def _encryption(app: Any) -> Iterator[Check]:
    """Keys are told by name; nothing is said where neither a key nor an encrypted task is."""
    try:
        wanted = sorted(name for name, privacy in private_tasks(app).items() if privacy == ENCRYPTED)
    except ConfigurationError:  # wrong settings, or options of a task: told where they are looked at
        wanted = []
    try:
        keys = Keyring.from_environment()
        if keys.names or wanted:
            keys.require()
    except (ConfigurationError, MissingKey) as exc:
        whose = f" ({', '.join(wanted[:5])} cannot be published or run)" if wanted else ""
        yield Check("encryption", ERROR, f"{exc}{whose}", f"set {VARIABLE} wherever these jobs are published or run")
        return
    if keys.names:
        yield Check("encryption", OK, f"encrypts with key {keys.names[0]}; decrypts with {', '.join(keys.names)}")


def _topology(info: ServerInfo) -> Check:
    if info.sharded:
        return Check("topology", OK, "a sharded cluster")
    if info.standalone:
        return Check(
            "topology",
            WARNING,
            "a standalone server: no failover, no change streams (workers poll every relata_poll_interval instead)",
            "start it with --replSet rs0 and call rs.initiate() once; one member is enough",
        )
    return Check("topology", OK, f"replica set {info.replica_set}")


def _change_streams(database: Database) -> Check:
    command = {"aggregate": COLLECTION, "pipeline": [{"$changeStream": {}}], "cursor": {}}
    try:
        cursor = database.command(command)["cursor"]["id"]
    except StoreError as exc:
        return Check(
            "change streams",
            WARNING,
            f"not available, so workers poll every relata_poll_interval: {told(exc)[0]}",
            "use a replica set, and give the user the role readWrite (it includes changeStream)",
        )
    if cursor:
        database.command({"killCursors": COLLECTION, "cursors": [cursor]})
    return Check("change streams", OK, "available: workers are woken at once")


def _indexes(database: Database) -> Check:
    problems = check_indexes(database)
    if not problems:
        return Check("indexes", OK, "all there, as expected")
    missing = [problem for problem in problems if problem.endswith("is missing")]
    if len(missing) == len(problems):
        return Check(
            "indexes",
            WARNING,
            "; ".join(missing),
            "start a worker, or publish a job: the first use of a process builds them",
        )
    return Check(
        "indexes",
        ERROR,
        "; ".join(problems),
        f"drop the ones that differ (db.{COLLECTION}.dropIndex(name)); the next worker builds them as expected",
    )


def _clock(database: Database) -> Check:
    before = datetime.now(timezone.utc)
    at_server: datetime = database.command({"hello": 1}, database="admin")["localTime"]
    after = datetime.now(timezone.utc)
    # The server looked at its clock somewhere between the two.
    ahead_s = max((before - at_server).total_seconds(), (at_server - after).total_seconds(), 0.0)
    if ahead_s <= CLOCK_WARNING_S:
        return Check("clock", OK, f"differs from the server's by {ahead_s:.3f} s at least")
    return Check(
        "clock",
        WARNING,
        f"differs from the server's by {ahead_s:.1f} s: leases do not care, but an eta given here means another moment",
        "synchronise both clocks (NTP)",
    )


def _writes(database: Database) -> Check:
    """Confirm a write that matches nothing: the right to write, and that a majority answers."""
    started = time.monotonic()
    reply = database.command(
        {
            "update": COLLECTION,
            "updates": [{"q": {"_id": {"$in": []}}, "u": {"$set": {"schema": 1}}}],
            "writeConcern": {"w": "majority", "j": True},
        }
    )
    problem = reply.get("writeConcernError") or next(iter(reply.get("writeErrors", ())), None)
    if problem:
        return Check(
            "writes", ERROR, f"not confirmed: {problem.get('errmsg')}", "bring a majority of the members up"
        )
    took_ms = (time.monotonic() - started) * 1000
    found = f"allowed, confirmed by a majority with journal ({took_ms:.1f} ms)"
    return Check("writes", OK, f"{found}{_uri_concern(database.uri)}")


def _uri_concern(uri: str) -> str:
    options: Mapping[str, str] = {name.lower(): value for name, value in parse_qsl(uri.partition("?")[2])}
    stated = [f"{name}={options[name]}" for name in ("w", "journal", "readpreference") if name in options]
    if not stated or re.fullmatch(r"(?i)w=majority", " ".join(stated)):
        return ""
    return f"; the URI's {', '.join(stated)} does not count for jobs"
