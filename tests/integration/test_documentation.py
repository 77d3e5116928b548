"""README's and the pages' commands and snippets, run in order in a copy of the checkout, as a user would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.snippets import as_program, snippets
from tests.unit.test_documentation import ROOT, WHOLE

#: Timeout: the first page also waits for the demo.
pytestmark = [pytest.mark.pages, pytest.mark.timeout(900)]

#: `make demo` of README.md and quickstart.md, on fewer rows.
_FEWER = ["input.limit=12", "check_samples=2"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that Git tracks, with this environment as ``.venv`` and the demo's run and report."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    demo = [sys.executable, "-m", "scripts.demo", *_FEWER]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        demo,
        cwd=folder,
        env={**env, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "MISMATCH" not in done.stdout
    report = (folder / "runs" / "demo-report.html").read_text()
    assert "<svg" in report
    assert "Samples, token by token" in report
    assert "Tokens are shown as ids" not in report
    return folder


@pytest.mark.parametrize("page", WHOLE)
def test_a_page_runs_from_its_first_block_to_its_last(page: str, checkout: Path):
    done = set()
    for before in WHOLE[: WHOLE.index(page)]:
        done |= {s.text for s in snippets(checkout / before) if s.language == "python"}
    found = [
        s for s in snippets(checkout / page)
        if s.language in ("python", "sh") and not s.not_run and not s.run_by and s.text not in done
    ]  # fmt: skip
    path = f"{checkout / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    result = subprocess.run(
        [sys.executable, "-c", as_program(found)],
        cwd=checkout,
        env={**env, "PATH": path, "PYTHONPATH": str(checkout), "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
