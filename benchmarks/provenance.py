"""Hardware, versions and commit of a result. No host names, no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def provenance(*packages: str) -> dict[str, Any]:
    """A dict of JSON types, with the versions of those ``packages`` that are installed.

    ``commit`` ends in ``+`` if the checkout has uncommitted changes.
    """
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "hsx_dist", "benchmarks/*.py")
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in packages if (found := _version(name))},
        "commit": commit + ("+" if changed else ""),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:  # no git on this machine
        done = ""
    return done.strip() or ("unknown" if args[0] == "rev-parse" else "")
