"""``celery -A APP relata ...`` as a person runs it: a process of its own, its output and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.workers import ROOT


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON value and nothing else."""
        return json.loads(self.out)

    def refused(self, code: int = 1) -> str:
        """The one message of a command that ended with ``code``, without output and without a traceback."""
        assert self.code == code, self
        assert self.out == ""
        assert "Traceback" not in self.err
        message = self.err.strip()
        assert message.startswith("Error: ")
        return message


def relata(
    uri: str | None,
    *arguments: str,
    app: str = "relata_celery",
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: str | None = None,
) -> Done:
    """Run the command on this MongoDB (None: whichever the environment says) and wait for it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELATA_")}
    for kept in ("RELATA_HOME", "RELATA_MONGOD"):
        if kept in os.environ:
            environment[kept] = os.environ[kept]
    if uri is not None:
        environment["RELATA_MONGODB_URI"] = uri
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment["COLUMNS"] = "200"  # whatever terminal, or none, the tests run in
    environment.update(env or {})
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", app, "relata", *arguments],
        env=environment,
        cwd=folder,
        input=stdin or "",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)
