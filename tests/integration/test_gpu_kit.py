"""The GPU kit end to end, with the minimum that a CPU can run: one engine, and checks of every other outcome."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.gpu import kit
from hsx_dist.jobs.kit import engine_states
from hsx_dist.jobs.kit.engine_states import Case
from hsx_dist.jobs.kit.outcomes import Check, python

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(900)]


def test_the_kit_writes_a_page_of_what_ran_and_of_what_did_not(tmp_path):
    case = Case(direct=True, preempt=True)  # the engine checks vLLM's reaction to each
    planned = [
        *(c for c in kit.plan(tmp_path / "a", 0) if c.cannot),
        *engine_states.checks(tmp_path / "b", 0, [case]),
        Check("made up", "a crash", python("-c", "import os; os.abort()")),
    ]
    outcomes = kit.run_kit(planned, tmp_path, [], 1200)
    found = {o.name: o for o in outcomes}
    ours = found[case.name]
    assert ours.state == "passed", ours
    assert max(ours.figures["errors"].values()) < 0.05 < min(ours.figures["shifted"].values())
    assert found["a crash"].state == "crashed"
    assert {o.state for o in outcomes if o.name not in (case.name, "a crash")} == {"not run"}
    assert found["tests/gpu"].message == "no CUDA device"
    body = json.loads((tmp_path / "gpu-report.json").read_text())
    assert body["states"] == {"passed": 1, "crashed": 1, "not run": len(planned) - 2}
    html = (tmp_path / "gpu-report.html").read_text()
    assert len(re.findall(r'<span class="state good">passed</span>', html)) == 1
    assert "SIGABRT" in html
