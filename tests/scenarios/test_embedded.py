"""The embedded MongoDB, as people who have no MongoDB meet it."""

from __future__ import annotations

import json
import os
import signal
import socketserver
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from pymongo.errors import OperationFailure

from relata_celery import embedded
from relata_celery.domain.errors import ConfigurationError
from relata_celery.embedded import members, process
from relata_celery.embedded.place import Place, State
from relata_celery.embedded.program import find
from tests.mongo import NoMongod, find_mongod
from tests.waiting import wait_until

Client = pymongo.MongoClient[dict[str, Any]]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of this test's own, whose server is ended whatever the test did to it."""
    try:
        monkeypatch.setenv("RELATA_MONGOD", str(find_mongod()))
    except NoMongod as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))
    home = tmp_path / "home of relata"
    monkeypatch.setenv("RELATA_HOME", str(home))
    yield home
    pid = process.running(Place(home), Place(home).state())
    if pid is not None:
        since = process.started_at(pid)
        os.kill(pid, signal.SIGKILL)
        process.gone(pid, since, 10)


def _ask_in_another_process() -> subprocess.Popen[str]:
    code = "from relata_celery import embedded; print(embedded.uri())"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def _running_pid() -> int:
    status = embedded.status()
    assert status.running
    assert status.pid is not None
    return status.pid


def _kill(pid: int) -> None:
    since = process.started_at(pid)
    os.kill(pid, signal.SIGKILL)
    assert process.gone(pid, since, 10)


def _mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_processes_that_race_to_start_get_one_server_that_outlives_them(home: Path) -> None:
    racers = [_ask_in_another_process() for _ in range(3)]
    uris = {racer.communicate(timeout=90)[0].strip() for racer in racers}
    assert len(uris) == 1
    uri = uris.pop()
    assert embedded.uri() == uri
    with Client(uri) as client:
        hello = client.admin.command("hello")
        assert hello["isWritablePrimary"]
        client["relata"].get_collection("things").insert_one({"_id": 1})
        assert client.get_default_database().name == "relata"
    assert os.getsid(_running_pid()) != os.getsid(0)


def test_only_loopback_only_with_password_and_everything_private(home: Path) -> None:
    uri = embedded.uri()
    place, pid = Place(home), _running_pid()
    password, key = place.password(), place.key()
    assert password
    assert key
    assert password in uri

    with Client(uri.replace(password, "wrong")) as client, pytest.raises(OperationFailure):
        client["relata"]["things"].find_one()
    with Client("127.0.0.1", embedded.status().port, directConnection=True) as client:
        with pytest.raises(OperationFailure, match="requires authentication"):
            client["relata"]["things"].find_one()
        with pytest.raises(OperationFailure, match="requires authentication"):
            client.admin.command("createUser", "eve", pwd="x", roles=["root"])

    assert _mode(home) == _mode(place.folder) == _mode(place.data) == "0o700"
    for name in ("password", "key", "state.json", "lock", "log", "output"):
        assert _mode(place.folder / name) == "0o600", name
    assert not list(place.folder.glob("*.unfinished"))

    listening = {address for address, port in _listening() if port == embedded.status().port}
    assert listening in ({"0100007F"}, set())

    shown = [
        subprocess.run(["ps", "eww", str(pid)], check=False, capture_output=True, text=True).stdout,
        (place.folder / "state.json").read_text(),
        place.log.read_text(),
        place.output.read_text(),
        repr(place),
        repr(embedded.status()),
    ]
    for text in shown:
        assert password not in text
        assert key not in text
    assert f"relata:***@127.0.0.1:{embedded.status().port}/relata" in str(embedded.status().uri)


def _listening() -> Iterator[tuple[str, int]]:
    """Address and port of each listening IPv4 and IPv6 socket (nothing where there is no /proc)."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    address, _, port = fields[1].partition(":")
                    yield address, int(port, 16)


def test_stop_and_start_keep_port_and_data(home: Path) -> None:
    assert embedded.stop() is False
    assert embedded.status().running is False
    first = embedded.start()
    assert first.running
    assert first.version
    assert first.since
    with Client(embedded.uri(), w="majority") as client:
        client["relata"]["things"].insert_one({"_id": 1})
    assert embedded.stop() is True
    assert embedded.stop() is False
    assert embedded.status().running is False
    assert not process.started_at(first.pid or 0)
    assert '"exitCode":0' in Place(home).log.read_text()

    second = embedded.start()
    assert second.port == first.port
    assert second.pid != first.pid
    with Client(embedded.uri()) as client:
        assert client["relata"]["things"].count_documents({}) == 1


def test_a_killed_server_is_started_again_on_its_data(home: Path) -> None:
    with Client(embedded.uri(), w="majority", journal=True) as client:
        client["relata"]["things"].insert_one({"_id": 1})
    pid = _running_pid()
    _kill(pid)
    assert embedded.status().running is False
    with Client(embedded.uri()) as client:
        assert client["relata"]["things"].count_documents({}) == 1
    assert _running_pid() != pid


class _Squatter(socketserver.TCPServer):
    """Another program on our port: it hangs up on whoever calls."""

    allow_reuse_address = True


def test_a_port_taken_meanwhile_is_given_up(home: Path) -> None:
    old = embedded.uri()
    port = embedded.status().port
    embedded.stop()
    with _Squatter(("127.0.0.1", port or 0), socketserver.BaseRequestHandler) as squatter:
        server = threading.Thread(target=squatter.serve_forever, args=(0.02,))
        server.start()
        new = embedded.uri()
        squatter.shutdown()
        server.join(10)
    assert new != old
    with Client(new) as client:
        client["relata"]["things"].insert_one({})


def test_a_start_that_was_broken_off_before_replica_set_and_user_is_completed(home: Path) -> None:
    place = Place(home)
    place.prepare()
    place.make_secrets()
    port = process.port_to_use(None)
    pid = process.spawn(find(place.bin).path, place, port, members.REPLICA_SET)
    wait_until((place.data / "mongod.lock").exists, message="mongod has locked its data")
    place.record(State(port=port))

    with Client(embedded.uri()) as client:
        client["relata"]["things"].insert_one({})
    assert _running_pid() == pid


def test_a_lost_state_file_and_a_lost_password_are_repaired(home: Path) -> None:
    old = embedded.uri()
    pid = _running_pid()
    place = Place(home)
    (place.folder / "state.json").write_text("{")
    (place.folder / "password").unlink()
    new = embedded.uri()
    assert new != old
    assert _running_pid() == pid
    with Client(new) as client:
        client["relata"]["things"].insert_one({})


def test_a_stopped_server_is_recognised_although_its_number_is_in_use(home: Path) -> None:
    embedded.start()
    place, pid = Place(home), _running_pid()
    _kill(pid)
    state = json.loads((place.folder / "state.json").read_text())
    state["pid"] = os.getpid()
    (place.folder / "state.json").write_text(json.dumps(state))
    (place.data / "mongod.lock").write_text(f"{os.getpid()}\n")
    assert embedded.status().running is False
    assert embedded.stop() is False


def test_without_a_mongod_the_error_says_what_was_looked_for_and_what_helps(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RELATA_MONGOD")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("relata_celery.embedded.program.WHEELS", ("no-such-wheel",))
    with pytest.raises(ConfigurationError) as caught:
        embedded.uri()
    for part in (
        "the wheel no-such-wheel: not installed",
        "PATH: no mongod there",
        "RELATA_MONGOD: not set",
        "set RELATA_MONGODB_URI",
        'pip install "relata_celery[embedded]"',
        "so that mongod is on PATH",
    ):
        assert part in str(caught.value)


def test_a_named_mongod_that_does_not_run_is_named_in_the_error(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "mongod"
    broken.write_text("#!/bin/sh\necho libsomething.so is missing >&2\nexit 127\n")
    monkeypatch.setenv("RELATA_MONGOD", str(broken))
    with pytest.raises(embedded.EmbeddedUnavailable, match=r"does not run: libsomething\.so is missing"):
        embedded.uri()
    monkeypatch.setenv("RELATA_MONGOD", str(tmp_path / "absent"))
    with pytest.raises(embedded.EmbeddedUnavailable, match="absent does not exist"):
        embedded.uri()


def test_a_mongod_that_ends_at_once_shows_its_log(home: Path) -> None:
    place = Place(home)
    place.prepare()
    (place.data / "storage.bson").write_bytes(b"not what mongod wrote")
    with pytest.raises(embedded.EmbeddedUnavailable, match="ended as soon as it was started") as caught:
        embedded.uri()
    assert "Unable to read the storage engine metadata file" in str(caught.value)
    assert str(place.password()) not in str(caught.value)


def test_a_program_that_cannot_be_made_runnable_is_copied(tmp_path: Path, monkeypatch: Any) -> None:
    program = tmp_path / "mongod"
    program.write_text("#!/bin/sh\necho db version v6.0.5\n")
    program.chmod(0o600)
    monkeypatch.setenv("RELATA_MONGOD", str(program))

    def refuse(self: Path, mode: int) -> None:
        if self == program:
            raise PermissionError("read-only file system")
        os.chmod(self, mode)

    monkeypatch.setattr(Path, "chmod", refuse)
    found = find(tmp_path / "bin")
    assert found.path.parent == tmp_path / "bin"
    assert found.version == "6.0.5"
