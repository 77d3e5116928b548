"""A benchmark that fails is reported with the results so far, and leaves no process behind."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import bench
from benchmarks.bench import Row

MODULE = """
import json, pathlib, subprocess, sys, time
place = pathlib.Path(sys.argv[sys.argv.index("--results") + 1])
(place / "made.json").write_text(json.dumps({"ratio": 1.5}))
(place / "made.md").write_text("the table")
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``made(more)``: run a benchmark whose program ends with the lines ``more``."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = tmp_path / "results"
    results.mkdir()

    def run(more: str) -> dict:
        (tmp_path / "made_benchmark.py").write_text(MODULE + more)
        entry = ("made_benchmark", [], [], lambda found: iter([Row("a ratio", found["ratio"], "≥ 1")]))
        monkeypatch.setattr(bench, "BENCHMARKS", {"made": entry})
        return bench.run("made", full=False, results=results)

    return run


def test_one_that_ends_well(made, tmp_path: Path):
    found = made("")
    assert found["failed"] == ""
    assert [row["measured"] for row in found["rows"]] == [1.5]
    assert json.loads((tmp_path / "results" / "short" / "made.json").read_text()) == {"ratio": 1.5}
    assert (tmp_path / "results" / "short" / "made.md").read_text() == "the table"


def test_one_that_dies_after_it_wrote_something(made, capsys: pytest.CaptureFixture[str]):
    found = made('sys.exit("cell 2 of 23 died")\n')
    assert found["failed"] == "ended with status 1"
    assert [row["measured"] for row in found["rows"]] == [1.5]
    assert "cell 2 of 23 died" in capsys.readouterr().err


def test_one_that_writes_nothing(made):
    assert made('(place / "made.json").unlink()\n')["failed"] == "wrote no made.json"


@pytest.mark.slow
def test_one_that_takes_too_long_ends_with_all_that_it_started(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "LIMIT_S", 10)
    found = made(
        'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)\n'
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    assert found["failed"] == "took more than 10 s"
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "expected the child process to end"
        time.sleep(0.05)
