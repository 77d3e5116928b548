"""Each process of this package redacts its records, and loads no shared libraries from its working folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hsx_dist
from hsx_dist import new_process
from hsx_dist.errors import ConfigError
from hsx_dist.new_process import begin_process
from hsx_dist.working_folder import require_no_settings_of

NAME = "LD_LIBRARY_PATH"


@pytest.mark.parametrize(
    ("before", "after"), [(None, "/dev/null"), ("", "/dev/null"), (":/a::/b;", "/a:/b"), ("/a", "/a")]
)
def test_no_entry_is_empty(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, before or "")
    if before is None:
        monkeypatch.delenv(NAME)
    monkeypatch.setattr(new_process, "redact_records", lambda: None)
    begin_process()
    assert os.environ[NAME] == after


def test_an_import_of_cv2_adds_no_empty_entry() -> None:
    """vLLM imports cv2, which puts its folder and a colon before the variable."""
    code = (
        "import os; from hsx_dist.new_process import begin_process; begin_process(); "
        f"import cv2; print(os.environ['{NAME}'])"
    )
    env = {name: value for name, value in os.environ.items() if name != NAME}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    entries = done.stdout.strip().split(":")
    assert "/dev/null" in entries
    assert all(entries)


def test_each_entry_point_begins_its_process() -> None:
    """The connector's process may be a user's server. There vLLM's plugin decides. Actors: see test_ray_calls.py."""
    package = Path(hsx_dist.__file__).parent
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}

    def those_with(pattern: str) -> set[str]:
        return {name for name, text in sources.items() if re.search(pattern, text, re.MULTILINE)}

    entries = those_with(r"^def (\w+_)?main\(|__name__ == .__main__.|^def run_app\(|^def _guarded_call\(")
    commands = {"cli/__init__.py", "cli/__main__.py", "cli/extract.py", "cli/verify.py"}  # by ``run_app``
    assert those_with(r"^ +begin_process\(\)$") == entries - commands
    assert those_with(r"\bredact_records\(") == {"new_process.py", "observe/logs.py"}
    for name in commands - {"cli/__main__.py"}:
        assert "run_app(" in sources[name]


def test_no_engine_starts_where_numba_would_read_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can name a folder of the run as the place of compiled functions, which numba unpickles."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: data")
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    with pytest.raises(ConfigError, match=r"expected no \.numba_config\.yaml in the working folder"):
        require_no_settings_of("numba", ".numba_config.yaml")
    starts = 0
    for path in Path(hsx_dist.__file__).parent.rglob("*.py"):
        before, *after = re.split(r"^ +from vllm import LLM$", path.read_text(), flags=re.MULTILINE)
        starts += len(after)
        assert not after or before.endswith('require_no_settings_of("numba", ".numba_config.yaml")\n')
    assert starts == 3
