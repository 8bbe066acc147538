"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from .contenders.base import Contender
from .processes import ROOT


def facts() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "revision": _revision(),
        "load_before": load(),
    }


def load() -> float:
    """Runnable processes over the last minute: what else the machine was doing."""
    return round(psutil.getloadavg()[0], 2)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def package_versions(contenders: Iterable[Contender]) -> dict[str, str]:
    found: dict[str, str] = {}
    for contender in contenders:
        found |= contender.versions()
    return dict(sorted(found.items()))
