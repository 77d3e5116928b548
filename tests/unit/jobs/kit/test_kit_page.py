from __future__ import annotations

import json
import re

import pytest

from benchmarks.gpu.figures import COPIES, FIGURES, THROUGHPUT
from hsx_dist.jobs.kit.outcomes import Outcome
from hsx_dist.jobs.kit.report_page import about, verdict, write

PASSED = Outcome("states", "eager", "passed", "errors are small", 3.0)
OTHERS = {
    "failed": Outcome("states", "compiled", "failed", "the states are not the model's", 3.0),
    "crashed": Outcome("states", "two ranks", "crashed", "ended with SIGSEGV; its log ends:\n<script>boom</script>"),
    "timed out": Outcome("states", "three ranks", "timed out", "did not end within 240 s"),
    "not run": Outcome("states", "four ranks", "not run", "no CUDA device"),
}


def rows(html: str) -> dict[str, str]:
    """The state next to each check's name."""
    found = re.findall(r'<tr><td><span class="state [a-z]*">([a-z ]+)</span></td><td>([^<]*)<', html)
    return {name: state for state, name in found}


def test_each_state_stands_on_the_page_and_in_the_json(tmp_path):
    outcomes = [PASSED, *OTHERS.values()]
    html = write(tmp_path, about([]), outcomes).read_text()
    assert rows(html) == {o.name: o.state for o in outcomes}
    body = json.loads((tmp_path / "gpu-report.json").read_text())
    assert body["states"] == dict.fromkeys(["passed", *OTHERS], 1)
    assert [o["state"] for o in body["outcomes"]] == [o.state for o in outcomes]
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "this page proves nothing about one" in html
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpu-report.html", "gpu-report.json"]


def test_the_report_is_written_through_no_link(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "report"
    victim.write_text("precious")
    folder.mkdir()
    for name in ("gpu-report.json", ".gpu-report.json.new", ".gpu-report.html.new"):
        (folder / name).symlink_to(victim)
    write(folder, about([]), [PASSED])
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("state", OTHERS)
def test_only_a_page_without_any_other_state_says_passed(state):
    assert verdict([PASSED]) == ("passed", "good")
    word, css = verdict([PASSED, OTHERS[state]])
    assert (word, css) == (("incomplete", "") if state == "not run" else ("failed", "bad"))
    assert verdict([OTHERS["not run"]]) == ("nothing ran", "")


def test_figures_of_engines_that_did_not_run_are_not_made_up(tmp_path):
    load = {"load": "Thin."}
    outcomes = [
        Outcome(THROUGHPUT, "no extraction", "crashed", "status 1"),
        Outcome(THROUGHPUT, "ours", "passed", "", 1.0, {"tokens_per_s": {"1": 500.0, "32": 9000.0}, **load}),
        Outcome(THROUGHPUT, "vLLM's own", "passed", "", 1.0, {"tokens_per_s": {"1": 250.0}, **load}),
    ]
    html = write(tmp_path, about([]), outcomes, FIGURES).read_text()
    assert "9,000" in html
    assert "%</span>" not in html  # each ratio names its reference
    assert re.search(r"vLLM&#x27;s own</td><td class=n>250</td><td class=n>not run</td>", html)
    base = Outcome(THROUGHPUT, "no extraction", "passed", "", 1.0, {"tokens_per_s": {"1": 1000.0}, **load})
    assert (
        "500<br><span class=ratio>50%</span>" in write(tmp_path, about([]), [base, *outcomes[1:]], FIGURES).read_text()
    )


def test_gpus_and_the_bandwidth_of_copies(tmp_path):
    result = {
        "model": "Llama", "tokens": 8192, "order": "TLH", "gb_per_s": {"ours": 50.0, "limit": 55.0}, "of_limit": 0.91
    }  # fmt: skip
    outcomes = [Outcome(COPIES, "side-stream copies", "passed", "", 9.0, {"results": [result]})]
    html = write(tmp_path, about(["NVIDIA H200", "NVIDIA H200"]), outcomes, FIGURES).read_text()
    assert "NVIDIA H200 (2 of them)" in html
    assert "token-major</td><td class=n>50.0</td><td class=n>55.0</td><td class=n>0.91" in html
