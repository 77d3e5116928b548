"""Run the tests with the real trainers of sparse autoencoders and drafts in a separate environment: ``make trainers``.

    .venv/bin/python -m scripts.trainers

The environment is ``.trainers/``. It is made from requirements/trainers.in and trainers-alone.in on first use, and
again after they change. Its torch has the version of requirements/dev.lock.
"""

from __future__ import annotations

import re
import subprocess
import sys

from scripts.matrix import ROOT, torch_arguments, uv

FOLDER = ROOT / ".trainers"
WANTED = ROOT / "requirements/trainers.in"
#: Installed without their dependencies.
ALONE = ROOT / "requirements/trainers-alone.in"


def make_environment() -> str:
    """Make the environment if needed. Returns the path of its Python."""
    python, done = FOLDER / "bin/python", FOLDER / "trainers.in"
    text = WANTED.read_text() + ALONE.read_text()
    if not done.exists() or done.read_text() != text:
        uv("venv", "--quiet", "--clear", "--python", str(ROOT / ".venv/bin/python"), str(FOLDER))
        torch = re.findall(r"^torch==\S+", (ROOT / "requirements/dev.lock").read_text(), re.MULTILINE)
        common = ["--quiet", "--python", str(python), *torch_arguments()]
        override = ["--override", str(ROOT / "requirements/overrides.txt")]
        own = ["-r", "pyproject.toml", "--extra", "torch"]
        uv("pip", "install", *common, *override, *own, "-r", str(WANTED), *torch)
        uv("pip", "install", *common, "--no-deps", "-r", str(ALONE))
        done.write_text(text)
    return str(python)


def main() -> int:
    tests = [make_environment(), "-m", "pytest", "-q", "tests/trainers", *sys.argv[1:]]
    return subprocess.run(tests, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
