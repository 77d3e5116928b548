"""``hsx doctor --engine`` without settings. Its engines are replaced."""

from __future__ import annotations

import json

import pytest

from hsx_dist.cli import main
from hsx_dist.errors import EngineError
from hsx_dist.jobs import doctor
from hsx_dist.jobs.diagnosis import Diagnosis
from hsx_dist.jobs.kit import engine_states, machine
from hsx_dist.jobs.kit.outcomes import Check, Outcome


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Names of the started engines. The first one returns wrong states."""
    started: list[str] = []

    def run(check: Check) -> Outcome:
        if check.cannot:
            return Outcome(check.group, check.name, "not run", check.cannot)
        started.append(check.name)
        return Outcome(check.group, check.name, "failed" if len(started) == 1 else "passed", "as said")

    monkeypatch.setattr(machine, "run_check", run)
    monkeypatch.setattr(engine_states, "visible_gpus", list)
    return started


def test_every_engine_is_a_line_and_the_page_is_written(ran, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_all", lambda _: iter([Diagnosis("torch", "ok", "2")]))
    with pytest.raises(SystemExit) as e:
        main(["doctor", "--engine", "--report", str(tmp_path)])
    assert e.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    names = [case.name for case in engine_states.cases(0)]
    assert len(lines) == 1 + len(names) + 1
    for line, name in zip(lines[1:], names, strict=False):
        assert line[6:].startswith(f"{name}: ")
    assert lines[1].startswith("FAIL  runner V1, eager, synchronous scheduling: failed: as said")
    assert any(line.startswith("warn") and "not run: vLLM's V2 model runner needs a GPU" in line for line in lines)
    assert 1 < len(ran) < len(names)
    assert json.loads((tmp_path / "gpu-report.json").read_text())["states"] == {
        "passed": len(ran) - 1, "failed": 1, "not run": len(names) - len(ran),
    }  # fmt: skip


def test_no_engine_is_started_on_a_machine_that_cannot(ran, monkeypatch):
    monkeypatch.setattr(doctor, "_all", lambda _: iter([Diagnosis("torch", "fail", "expected it")]))
    found = list(machine.examine_machine(None))
    assert ran == []
    assert {c.state for c in found[1:]} == {"warn"}
    assert {c.message for c in found[1:]} == {"not run: a check of the machine failed. Correct that first"}


def test_a_torch_that_cannot_be_imported_is_a_typed_error(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"could not list this machine's GPUs: ImportError: libcudart"):
        engine_states.visible_gpus()
