"""The servers that contenders need: private ones, on free loopback ports, in a temporary folder.

Each is started when first asked for and stopped by its pid. :class:`Missing` says that a machine has
no such program; the contender is then left out.

How much each keeps when the power fails is part of what is compared, and is each one's own default
or usual setting: MongoDB journals (the clients ask for majority and journal), PostgreSQL commits with
fsync, RabbitMQ gets durable queues and persistent messages without publisher confirms (Celery's way),
Redis runs without persistence, which is the fastest it can be.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pymongo

from tests.mongo import Mongod, NoMongod, ReplicaSet, free_port

from .processes import Process, cpu_seconds, wait_for

HOST = "127.0.0.1"
#: MongoDB's own default is half of the memory; the tests' 0.25 GB would make deep queues a disk benchmark.
MONGODB_CACHE = "1G"


class Missing(Exception):
    """A server's program or a package is not installed here."""


def program(name: str, *folders: str) -> str:
    """The path of an installed program. Raises Missing."""
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        raise Missing(f"no {name} on PATH")
    return found


class MongoDB:
    """A one-member replica set, so that change streams work."""

    def __init__(self, folder: Path) -> None:
        self.member = Mongod(folder, options=("--replSet", "rs0", "--oplogSize", "2048"))
        try:
            self.member.start()
        except NoMongod as exc:
            raise Missing(str(exc)) from exc
        with self.member.client() as client:
            host = self.member.address
            client.admin.command("replSetInitiate", {"_id": "rs0", "members": [{"_id": 0, "host": host}]})
            client.admin.command(
                {"setParameter": 1, "wiredTigerEngineRuntimeConfig": f"cache_size={MONGODB_CACHE}"}
            )
            self.version = f"MongoDB {client.server_info()['version']}"
        ReplicaSet([self.member]).primary()
        self.client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(self.uri("admin"))

    def uri(self, database: str) -> str:
        return f"mongodb://{self.member.address}/{database}?replicaSet=rs0"

    def operations(self) -> dict[str, int]:
        """The server's counters of operations since it started, by kind."""
        counters = self.client.admin.command("serverStatus")["opcounters"]
        return {
            kind: int(counters[kind])
            for kind in ("insert", "query", "update", "delete", "getmore", "command")
        }

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.member.pid)

    def stop(self) -> None:
        self.client.close()
        self.member.kill()


class Redis:
    def __init__(self, folder: Path) -> None:
        try:
            import redis
        except ImportError as exc:
            raise Missing("no package redis") from exc
        folder.mkdir()
        redis_server = program("redis-server")
        self.port = free_port()
        place = ("--port", str(self.port), "--bind", HOST, "--dir", str(folder))
        self.process = Process([redis_server, *place, "--save", "", "--appendonly", "no"], folder / "log")
        self.client = redis.Redis(HOST, self.port)
        _until_answers(self, 20)
        self.version = f"Redis {self.client.info()['redis_version']}"

    def _answers(self) -> bool:
        self.process.check()
        try:
            return bool(self.client.ping())
        except Exception:
            return False

    @property
    def uri(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def empty(self) -> None:
        self.client.flushall()

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def stop(self) -> None:
        self.process.stop()


class RabbitMQ:
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        # The distribution's wrapper on PATH changes the user; the program itself is preferred.
        server = program("rabbitmq-server", "/usr/lib/rabbitmq/bin")
        epmd = program("epmd")
        self.port, epmd_port = free_port(), str(free_port())
        (folder / "plugins").write_text("[].\n")
        self.epmd = Process([epmd, "-address", HOST, "-port", epmd_port], folder / "epmd.log")
        self.process = Process(
            [server],
            folder / "log",
            {
                "HOME": str(folder),
                "ERL_EPMD_PORT": epmd_port,
                "RABBITMQ_NODENAME": f"bench{self.port}@localhost",
                "RABBITMQ_NODE_IP_ADDRESS": HOST,
                "RABBITMQ_NODE_PORT": str(self.port),
                "RABBITMQ_DIST_PORT": str(free_port()),
                "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
                "RABBITMQ_LOG_BASE": str(folder),
                "RABBITMQ_LOGS": "-",
                "RABBITMQ_PID_FILE": str(folder / "pid"),
                "RABBITMQ_CONF_ENV_FILE": str(folder / "none.conf"),
                "RABBITMQ_CONFIG_FILE": str(folder / "none"),
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
                # Replace the starting shell by the server, so that its pid is the one we know.
                "RUNNING_UNDER_SYSTEMD": "true",
            },
        )
        _until_answers(self, 90)

    def _answers(self) -> bool:
        import kombu

        self.process.check()
        try:
            with kombu.Connection(self.uri, connect_timeout=2) as connection:
                connection.connect()
                self.version = f"RabbitMQ {connection.connection.server_properties['version']}"
                return True
        except OSError:
            return False

    @property
    def uri(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}//"

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def stop(self) -> None:
        self.process.stop()
        self.epmd.stop()


class PostgreSQL:
    def __init__(self, folder: Path) -> None:
        try:
            import psycopg
        except ImportError as exc:
            raise Missing("no package psycopg") from exc
        folder.mkdir()
        versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=str, reverse=True)
        folders = [str(path) for path in versions]
        initdb, postgres = program("initdb", *folders), program("postgres", *folders)
        self.user, as_user = getpass.getuser(), {}
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # it refuses to run as root
            self.user, as_user = "postgres", {"user": "postgres", "group": "postgres"}
            try:
                shutil.chown(folder, "postgres", "postgres")
            except LookupError as exc:
                raise Missing("PostgreSQL does not run as root, and there is no user postgres") from exc
        data = folder / "data"
        subprocess.run(
            [initdb, "-D", str(data), "-A", "trust", "-E", "UTF8", "--locale=C", "-U", self.user],
            check=True, capture_output=True, cwd="/", **as_user,
        )  # fmt: skip
        self.port = free_port()
        log = folder / "log"
        command = [postgres, "-D", str(data), "-p", str(self.port), "-h", HOST, "-k", ""]
        self.process = Process(command, log, cwd="/", **as_user)
        self._connect: Callable[..., Any] = psycopg.connect
        _until_answers(self, 30)

    def _answers(self) -> bool:
        self.process.check()
        try:
            with self._connect(self.uri) as connection:
                self.version = f"PostgreSQL {connection.info.server_version // 10000}"
                return True
        except Exception:
            return False

    @property
    def uri(self) -> str:
        return f"postgresql://{self.user}@{HOST}:{self.port}/postgres"

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def stop(self) -> None:
        self.process.stop()


def _until_answers(server: Any, timeout: float) -> None:
    """Wait for a server that was just started; stop it when it does not come up."""
    try:
        wait_for(server._answers, timeout, f"{type(server).__name__} answers", 0.1)
    except BaseException:
        server.stop()
        raise


KINDS: dict[str, Callable[[Path], Any]] = {
    "mongodb": MongoDB,
    "redis": Redis,
    "rabbitmq": RabbitMQ,
    "postgresql": PostgreSQL,
}


class Servers:
    """Starts each server once, and remembers which are missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, Any] = {}
        self._missing: dict[str, Missing] = {}

    def get(self, kind: str) -> Any:
        """The running server. Raises Missing."""
        if kind in self._missing:
            raise self._missing[kind]
        if kind not in self._running:
            try:
                self._running[kind] = KINDS[kind](self.folder / kind)
            except Missing as exc:
                self._missing[kind] = exc
                raise
            except (OSError, RuntimeError, subprocess.SubprocessError) as exc:
                self._missing[kind] = Missing(f"{kind} does not start: {exc}")
                raise self._missing[kind] from exc
        return self._running[kind]

    def versions(self) -> list[str]:
        return [server.version for server in self._running.values()]

    def stop(self) -> None:
        while self._running:
            self._running.popitem()[1].stop()
