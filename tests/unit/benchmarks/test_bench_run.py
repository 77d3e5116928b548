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


def test_a_successful_benchmark_stores_its_result_and_table(made, tmp_path: Path):
    found = made("")
    assert found["failed"] == ""
    assert [row["measured"] for row in found["rows"]] == [1.5]
    assert json.loads((tmp_path / "results" / "short" / "made.json").read_text()) == {"ratio": 1.5}
    assert (tmp_path / "results" / "short" / "made.md").read_text() == "the table"


def test_a_benchmark_that_exits_with_an_error_keeps_its_rows(made, capsys: pytest.CaptureFixture[str]):
    found = made('sys.exit("cell 2 of 23 died")\n')
    assert found["failed"] == "ended with status 1"
    assert [row["measured"] for row in found["rows"]] == [1.5]
    assert "cell 2 of 23 died" in capsys.readouterr().err


def test_a_benchmark_without_a_result_file_fails(made):
    assert made('(place / "made.json").unlink()\n')["failed"] == "wrote no made.json"


@pytest.mark.slow
def test_a_benchmark_over_its_time_limit_is_killed_with_its_child_processes(
    made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
