"""A run recognizes its input in every place, and with any number of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import RunMismatch
from hsx_dist.fleet.replica import row_seed
from hsx_dist.inputs.rows import rows_from
from hsx_dist.jobs.input_identity import FIRST_ROWS, check_same_input, differences, first_rows, run_seed

PROMPTS = [{"id": f"r{i}", "text": f"text {i}"} for i in range(40)]


def rows(prompts: list[Any], **settings: Any) -> Any:
    return lambda: rows_from(prompts, InputConfig(**settings))


def check(prompts: list[Any], stored: list[str], **settings: Any) -> None:
    run = {"first_rows": first_rows(rows(PROMPTS))}
    manifest: Any = SimpleNamespace(samples=dict.fromkeys(stored))
    check_same_input("s3://b/run", run, manifest, rows(prompts, **settings))


ALL = [p["id"] for p in PROMPTS]


def test_only_the_first_rows_are_remembered() -> None:
    assert list(first_rows(rows([{"id": "bad", "text": ""}, *PROMPTS]))) == [f"r{i}" for i in range(FIRST_ROWS)]


def test_the_same_input_grown_shuffled_or_cut() -> None:
    check(PROMPTS, ALL)
    check([*PROMPTS, {"id": "new", "text": "x"}], ALL)
    check(PROMPTS[::-1], ALL)
    check(PROMPTS, ALL, limit=1)
    check(PROMPTS, ALL, sample=0.5)


def test_a_row_without_a_sample_may_be_corrected() -> None:
    corrected = [{"id": "r0", "text": "better"}, *PROMPTS[1:]]
    check(corrected, ALL[1:])
    check([{"id": "other", "text": "x"}], [])  # nothing is stored yet
    with pytest.raises(
        RunMismatch, match=r"s3://b/run.*: expected the input of the stored run, got row 'r0' with other content"
    ):
        check(corrected, ALL)


def test_another_input() -> None:
    with pytest.raises(RunMismatch, match="without any of its first rows"):
        check([{"id": f"x{i}", "text": "y"} for i in range(40)], ALL)


def test_a_run_of_before_knows_no_input() -> None:
    check_same_input("u", {}, SimpleNamespace(samples={}), rows([]))  # type: ignore[arg-type]


def test_seeds_are_the_runs_and_the_rows_own() -> None:
    run = run_seed({"id": "abc"}, {})
    assert row_seed(run, "a") == row_seed(run, "a")
    assert len({row_seed(run, "a"), row_seed(run, "b"), row_seed(run_seed({"id": "abd"}, {}), "a")}) == 3
    assert run_seed({"id": "abc"}, {"seed": 3}) == run_seed({"id": "abd"}, {"seed": 3}) != run_seed({}, {"seed": 4})
    assert all(0 <= row_seed(run, str(i)) < 1 << 63 for i in range(1000))


def test_settings_that_differ_are_named_down_to_the_field() -> None:
    before = {"input": {"text": "text", "id": "id"}, "layers": [1], "engine_kwargs": {"dtype": "float32"}}
    now = {"input": {"text": "body", "id": "id"}, "layers": [1], "engine_kwargs": {}, "select": "last"}
    assert differences(before, now) == [
        ("engine_kwargs.dtype", "float32", None),
        ("input.text", "text", "body"),
        ("select", None, "last"),
    ]
    assert differences(before, before) == []
