"""The home folder of an embedded MongoDB: its lock, its state, its secrets.

RELATA_HOME/            made with mode 0700; left as it is when it exists
  mongodb/              always mode 0700
    lock  state.json  password  key       mode 0600
    data/  log  output  bin/
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import EmbeddedUnavailable

LOCK_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class State:
    """What the last start or stop recorded. A hint: whether the process still is that one is checked.

    ``pid_started`` tells this process from a later one with the same number. ``ready`` is true
    when replica set and user were seen to be there.
    """

    port: int
    pid: int | None = None
    pid_started: str | None = None
    version: str | None = None
    since: str | None = None
    ready: bool = False


def default_home() -> Path:
    """RELATA_HOME, else ``relata_celery`` in the user's data folder."""
    named = os.environ.get("RELATA_HOME")
    if named:
        return Path(named)
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / "relata_celery"
        data = os.environ.get("XDG_DATA_HOME", "")
        base = Path(data) if os.path.isabs(data) else Path.home() / ".local" / "share"
    except RuntimeError as exc:
        raise EmbeddedUnavailable("this user has no home folder; name a folder in RELATA_HOME") from exc
    return base / "relata_celery"


class Place:
    """The files under one home."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = Path(os.path.abspath((home or default_home()).expanduser()))
        self.folder = self.home / "mongodb"
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self.output = self.folder / "output"
        self.bin = self.folder / "bin"
        self.key_file = self.folder / "key"
        self._password_file = self.folder / "password"
        self._state_file = self.folder / "state.json"

    def __repr__(self) -> str:
        return f"Place({str(self.home)!r})"

    def prepare(self) -> None:
        """Make the folders, private to this user; EmbeddedUnavailable when that is not possible."""
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self.folder.chmod(0o700)
            self.data.mkdir(mode=0o700, exist_ok=True)
        except OSError as exc:
            raise EmbeddedUnavailable(f"the folder {self.folder} cannot be used: {exc}") from exc

    @contextmanager
    def locked(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Hold this home's lock, against other processes and threads alike.

        The system frees it when its holder dies. It is polled for, because a blocking wait has no
        deadline.
        """
        import fcntl

        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + timeout_s
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as exc:
                    if time.monotonic() >= deadline:
                        raise EmbeddedUnavailable(
                            f"another process has been starting or stopping the embedded MongoDB in "
                            f"{self.home} for over {timeout_s:g} s"
                        ) from exc
                    time.sleep(0.05)
            yield
        finally:
            os.close(handle)

    def state(self) -> State | None:
        """The recorded state, or None when there is none that can be read."""
        try:
            return State(**json.loads(self._state_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def record(self, state: State) -> None:
        _write(self._state_file, json.dumps(asdict(state)))

    def password(self) -> str | None:
        """The user's password, or None before the first start."""
        return _read(self._password_file)

    def key(self) -> str | None:
        """The replica set's key, or None before the first start."""
        return _read(self.key_file)

    def make_secrets(self) -> None:
        """Make the password and the key where they are missing; the next steps bring the server in line."""
        if not self.password():
            _write(self._password_file, secrets.token_urlsafe(32))
        if not self.key():
            _write(self.key_file, base64.b64encode(secrets.token_bytes(96)).decode())
        self._password_file.chmod(0o600)
        self.key_file.chmod(0o600)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise EmbeddedUnavailable(f"the file {path} cannot be read: {exc}") from exc


def _write(path: Path, text: str) -> None:
    """Put ``text`` into a file of mode 0600, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
