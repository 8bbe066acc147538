"""Everything that is said to the embedded server: as its own member, then as its user.

Whoever holds the key file is the internal user ``__system``. It can do what the localhost exception
can (initiate the set, create the first user) and what it cannot (repair either later), and needs
no moment in which the server takes commands from anyone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import EmbeddedUnavailable
from .place import Place

if TYPE_CHECKING:
    from pymongo import MongoClient

REPLICA_SET = "relata"
USER = "relata"
DATABASE = "relata"

_ALREADY_INITIALIZED = 23
_AUTHENTICATION_FAILED = 18
_USER_EXISTS = 51003


def make_ready(place: Place, port: int, alive: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Bring the server to the point where the user can write; return once it was seen to be there.

    Does only what is missing. Raises EmbeddedUnavailable when the process ends or time is up.
    """
    from pymongo.errors import OperationFailure, PyMongoError

    deadline = time.monotonic() + timeout_s
    with _client(port, "__system", place.key(), "local") as member:
        while True:
            failure: PyMongoError | None = None
            try:
                if _is_primary(member, port):
                    break
            except OperationFailure as exc:
                raise _failed("setting it up", exc) from exc
            except PyMongoError as exc:
                failure = exc
            if not alive():
                raise EmbeddedUnavailable("the embedded MongoDB ended while it started")
            if time.monotonic() >= deadline:
                raise _failed(f"waiting {timeout_s:g} s for it to take writes", failure) from failure
            time.sleep(0.02)
        try:
            if not _user_is_known(place, port):
                _set_user(member, place)
        except PyMongoError as exc:
            raise _failed("creating its user", exc) from exc


def shut_down(place: Place, port: int) -> bool:
    """Ask the server to shut down cleanly; False when it did not take the command."""
    from pymongo.errors import AutoReconnect, PyMongoError

    try:
        with _client(port, "__system", place.key(), "local") as member:
            member.admin.command("ping")
            try:
                member.admin.command("shutdown", 1, force=True, timeoutSecs=0)
            except AutoReconnect:
                pass  # the server closes the connection instead of answering
    except PyMongoError:
        return False
    return True


def _client(port: int, user: str, password: str | None, source: str) -> MongoClient[dict[str, Any]]:
    from pymongo import MongoClient

    return MongoClient(
        "127.0.0.1",
        port,
        directConnection=True,
        username=user,
        password=password,
        authSource=source,
        serverSelectionTimeoutMS=500,
        connectTimeoutMS=5_000,
        socketTimeoutMS=15_000,
        appname="relata_celery embedded",
    )


def _is_primary(member: MongoClient[dict[str, Any]], port: int) -> bool:
    """Whether the server takes writes; when it has no usable replica set, give it one first."""
    from pymongo.errors import OperationFailure

    hello = member.admin.command("hello")
    if hello.get("isWritablePrimary") or hello.get("setName"):
        return bool(hello.get("isWritablePrimary"))
    host = f"127.0.0.1:{port}"
    try:
        member.admin.command("replSetInitiate", {"_id": REPLICA_SET, "members": [{"_id": 0, "host": host}]})
    except OperationFailure as exc:
        if exc.code != _ALREADY_INITIALIZED:
            raise
        # Its data knows itself under another port: it has removed itself from its own set.
        config = member.admin.command("replSetGetConfig")["config"]
        if config["members"][0]["host"] != host:
            config["members"][0]["host"] = host
            config["version"] += 1
            member.admin.command("replSetReconfig", config, force=True)
    return False


def _user_is_known(place: Place, port: int) -> bool:
    from pymongo.errors import OperationFailure

    with _client(port, USER, place.password(), "admin") as user:
        try:
            user.admin.command("usersInfo", USER)
        except OperationFailure as exc:
            if exc.code != _AUTHENTICATION_FAILED:
                raise
            return False
    return True


def _set_user(member: MongoClient[dict[str, Any]], place: Place) -> None:
    from pymongo.errors import OperationFailure

    password = place.password()
    durable = {"w": "majority", "j": True}
    try:
        member.admin.command("createUser", USER, pwd=password, roles=["root"], writeConcern=durable)
    except OperationFailure as exc:
        if exc.code != _USER_EXISTS:
            raise
        member.admin.command("updateUser", USER, pwd=password, writeConcern=durable)


def _failed(doing: str, exc: Exception | None) -> EmbeddedUnavailable:
    return EmbeddedUnavailable(
        f"the embedded MongoDB could not be used: {doing} failed: {exc or 'no answer'}"
    )
