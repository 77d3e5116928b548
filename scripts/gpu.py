"""Set up an environment and run ``benchmarks.gpu.kit`` in it: ``make gpu``. Needs only Python.

    python3 scripts/gpu.py [ARGUMENTS of benchmarks.gpu.kit]

With a GPU the environment is ``.gpu/``, with the newest CUDA build of vLLM on PyPI that the extra ``vllm`` allows.
Without a GPU it is ``.venv/``, from ``make setup``. Later runs reuse the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Extras and packages that the kit needs.
EXTRAS = "vllm,s3,report"
PACKAGES = ("pytest", "pytest-timeout", "psutil")

Run = Callable[[Sequence[str | Path]], object]


def has_gpu() -> bool:
    """Whether the NVIDIA driver of this machine lists a GPU."""
    return Path("/dev/nvidiactl").exists() and any(Path("/dev").glob("nvidia[0-9]*"))


def execute(argv: Sequence[str | Path]) -> object:
    return subprocess.run(argv, cwd=ROOT, check=True)


def environment(*, gpu: bool, root: Path = ROOT, run: Run = execute) -> Path:
    """Set up the environment if needed. Returns its interpreter."""
    folder = root / (".gpu" if gpu else ".venv")
    python, ready = folder / "bin/python", folder / ".ready"
    if ready.exists():
        return python
    if not gpu:
        run(["make", "setup"])
        return python
    if not python.exists():
        run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder])
    # The outer pip installs into the new environment: some distributions ship venv without pip.
    run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "uv"])
    uv = folder / "bin/uv"
    # auto: uv chooses the build of torch for this machine's driver.
    common: list[str | Path] = ["--quiet", "--python", python, "--torch-backend", "auto"]
    run([uv, "pip", "install", *common, "--editable", f"{root}[{EXTRAS}]", *PACKAGES])
    ready.touch()
    return python


def main() -> int:
    python = environment(gpu=has_gpu())
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv: list[str | Path] = [python, "-m", "benchmarks.gpu.kit", *sys.argv[1:]]
    return subprocess.run(argv, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
