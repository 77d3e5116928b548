"""``scripts/matrix.py``: which rows of the page's table a run replaces."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hsx_dist.connector.versions import TESTED
from scripts import matrix


def outcome(release: str, configuration: str, **fields) -> matrix.Outcome:
    versions = {"torch": "2.13.0", "transformers": "5.19.0", "python": "3.11.7"}
    return matrix.Outcome(release, configuration, versions=versions, **fields)


def test_a_run_of_some_configurations_keeps_the_other_rows():
    first = matrix.merged("", matrix.rows([outcome("0.31", "V1, synchronous"), outcome("0.33", "V2, asynchronous")]))
    new = outcome("0.33", "V2, asynchronous", failed={1: ["a::b"], 2: []})
    second = matrix.merged(first, matrix.rows([new, outcome("0.32", "V1, synchronous")]))
    rows = second.splitlines()[2:]
    assert [row[:8] for row in rows] == ["| 0.31 |"] * 2 + ["| 0.32 |"] * 2 + ["| 0.33 ("] * 2
    assert rows[:2] == first.splitlines()[2:4]
    assert "| 1 `a::b` |" in rows[4]
    assert matrix.merged(second, {}) == second


def test_a_release_without_a_cpu_build_says_whose_kernels_it_has():
    (row, _) = matrix.rows([outcome("0.33", "V1, synchronous")])
    assert row == "| 0.33 (kernels: 0.32) | V1, synchronous | 1 |"


def test_an_outcome_is_good_only_if_tests_passed_with_one_rank_and_with_two():
    assert not outcome("0.32", "x").ok
    assert not outcome("0.32", "x", passed={1: 5, 2: 0}).ok
    assert outcome("0.32", "x", passed={1: 5, 2: 1}).ok
    assert not outcome("0.32", "x", passed={1: 5, 2: 1}, failed={1: [], 2: ["t"]}).ok


def test_the_page_has_a_row_of_each_tested_release():
    page = (Path(__file__).parents[2] / "docs/connector.md").read_text()
    table = page.partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    (_, first), (_, last) = TESTED
    assert set(re.findall(r"^\| 0\.(\d+)", table, re.MULTILINE)) == {str(n) for n in range(first, last + 1)}


def functions_of(path: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (matrix.ROOT / path).read_text(), re.MULTILINE))


def test_all_tests_of_points_with_one_eager_model_run_where_taps_are_tested():
    """With decode, preemption, aborts and mixed askers. The connector's tests with similar names are not left out."""
    ahead, v2 = matrix.CONFIGURATIONS[1:3]
    assert [ahead.name, v2.name] == ["V1, asynchronous", "V2, synchronous"]
    arguments, others = v2.arguments, "tests/unit/connector/test_points.py"
    assert arguments[-1] == f"{ahead.arguments[-1]} and not straight_into_the_cache"
    assert arguments[:-2] == ahead.arguments[:-2] == (*matrix.EXACT, *matrix.POINTS)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", others, *arguments]
    found = subprocess.run(command, cwd=matrix.ROOT, check=True, capture_output=True, text=True).stdout
    tests: dict[str, set[str]] = {}
    for path, name in re.findall(r"^(\S+\.py)::(\S+)$", found, re.MULTILINE):
        function, _, parameters = name.partition("[")
        assert path != "tests/integration/test_taps.py" or "qwen3_moe-eager" in parameters
        tests.setdefault(path, set()).add(function)
    assert tests.keys() == {others, *matrix.EXACT, *matrix.POINTS}
    for path, functions in tests.items():
        left_out = {name for name in functions_of(path) if "straight_into_the_cache" in name}
        assert functions == functions_of(path) - left_out
