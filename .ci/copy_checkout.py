"""Copy a checkout without its package: ``copy_checkout.py FROM TO``.

Tests run from the copy, so what they import, and what the workers they start import, is the
installed wheel and never the source tree.
"""

from __future__ import annotations

import shutil
import sys

LEFT_OUT = {"__pycache__", "build", "dist"}


def main(source: str, target: str) -> None:
    def left_out(folder: str, names: list[str]) -> list[str]:
        top = folder == source
        return [n for n in names if n in LEFT_OUT or n.startswith(".") or (top and n == "relata_celery")]

    shutil.copytree(source, target, ignore=left_out, dirs_exist_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
