"""A private MongoDB for people who have none.

One server per home folder (``RELATA_HOME``), started by whoever asks first, shared by all of the
user's processes, and left running when they exit. Invariants:

- It listens on 127.0.0.1 only and every client must authenticate, from its first moment on: the
  localhost exception is off, and the user is created with the key file's own right.
- The password and the key live in files of mode 0600 in a folder of mode 0700, and nowhere else:
  not in arguments, the environment, the log, a repr or an error.
- Start and stop happen under a file lock. What a start did is checked, never assumed, so one that
  was broken off at any point (no replica set yet, no user yet, another port, lost state file) is
  completed by the next one, and a server that was killed is started again on its data.

Failure: :class:`EmbeddedUnavailable`, whose text says what was looked for and what to do.

    __init__.py   uri, start, stop, status
    program.py    finding a mongod that runs here
    place.py      the home folder: lock, state, secrets
    process.py    starting the process apart from ours, and recognising it later
    members.py    everything that is said to the server
"""

from __future__ import annotations

from .errors import EmbeddedUnavailable
from .server import EmbeddedStatus, start, status, stop, uri

__all__ = ["EmbeddedStatus", "EmbeddedUnavailable", "start", "status", "stop", "uri"]
