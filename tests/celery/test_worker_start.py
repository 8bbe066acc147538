"""A worker that could not do its work does not start, and says why in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.celery.test_behaviour_input import refused
from tests.mongo import Mongod, start_standalone

GREEN = """
from celery.concurrency.thread import TaskPool
class Pool(TaskPool):
    is_green = True
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    """A server that wants to know its users; ``reader`` may read the database ``app``."""
    server = start_standalone(tmp_path_factory.mktemp("guarded"))
    with server.client() as client:
        client["app"].command("createUser", "reader", pwd="secret-word", roles=["read"])
    server.stop()
    server.options = ("--auth",)
    server.start()
    yield server
    server.kill()


def one_line(output: str, words: str) -> str:
    (line,) = [line for line in output.splitlines() if words in line]
    return line


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_a_user_without_rights(guarded: Mongod, tmp_path: Path, pool: str) -> None:
    uri = f"mongodb://reader:secret-word@{guarded.address}/app?directConnection=true"
    output = refused(uri, tmp_path, "", None, "-P", pool)
    assert "not authorized" in one_line(output, "cannot be used")
    assert "secret-word" not in output


def test_a_wrong_password(guarded: Mongod, tmp_path: Path) -> None:
    output = refused(f"mongodb://reader:wrong@{guarded.address}/app?directConnection=true", tmp_path)
    assert "Authentication failed" in one_line(output, "cannot be used")


def test_a_server_that_is_too_old(database_uri: str, tmp_path: Path) -> None:
    limit = "import relata_celery.store.client as client\nclient.MINIMUM_VERSION = (99, 1)\n"
    assert one_line(refused(database_uri, tmp_path, limit), "is version").endswith("relata_celery needs 99.1 or newer")


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_autoscale_with_a_pool_that_cannot_grow(database_uri: str, tmp_path: Path, pool: str) -> None:
    output = refused(database_uri, tmp_path, "", None, "-P", pool, "--autoscale", "6,1")
    assert "prefork" in one_line(output, "--autoscale needs")


def test_a_green_pool(database_uri: str, tmp_path: Path) -> None:
    output = refused(
        database_uri, tmp_path, GREEN, {"CELERY_CUSTOM_WORKER_POOL": "wrong_app:Pool"}, "-P", "custom"
    )
    assert "prefork, threads or solo" in one_line(output, "gevent or eventlet")


def test_a_limit_that_is_no_number(database_uri: str, tmp_path: Path) -> None:
    source = "from datetime import timedelta\napp.conf.task_soft_time_limit = timedelta(seconds=5)\n"
    assert "must be seconds" in one_line(refused(database_uri, tmp_path, source), "task_soft_time_limit is")
