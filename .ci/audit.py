"""Ask pip-audit about everything that is installed beside relata_celery itself, which PyPI may not know.

What cannot be looked up is a failure, not a package without vulnerabilities.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path


def main(arguments: list[str]) -> int:
    pins = {f"{found.name}=={found.version}" for found in distributions() if found.name != "relata_celery"}
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "installed.txt"
        listed.write_text("\n".join(sorted(pins, key=str.lower)) + "\n")
        options = ["--strict", "--disable-pip", "--no-deps", "--progress-spinner", "off", "-r", str(listed)]
        return subprocess.run([sys.executable, "-m", "pip_audit", *options, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
