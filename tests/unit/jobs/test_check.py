"""The samples that ``check_samples`` compares, while consumers remove parts."""

from __future__ import annotations

import io
import json
from typing import Any
from unittest.mock import MagicMock

import pytest

from hsx_dist.config import load_config
from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.names import CHECK
from hsx_dist.format.place import open_place
from hsx_dist.jobs import check
from hsx_dist.observe.console import Console
from hsx_dist.reading.retention import Retention
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run


@pytest.mark.parametrize(
    ("before", "meanwhile", "compared"),
    [
        ("", "", ["k0", "k5"]),
        ("01", "", ["k2", "k5"]),  # the remaining samples are spread again
        ("01", "2345", []),
        ("", "01", ["k5"]),
        ("012345", "", None),
    ],
)
def test_samples_that_consumers_removed_are_not_compared(
    before: str, meanwhile: str, compared: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    samples = {f"k{i}": random_sample(f"k{i}", 5 + i, layer_ids=(1,), hidden_size=8) for i in range(6)}
    store_run(store, samples.values(), per_part=2, codec=NoneCodec())
    place = open_place(store)
    used = Retention(place)
    used.ack(*(f"k{i}" for i in before))
    seen: list[list[str]] = []

    def compare(stored: Any, *_: Any, **__: Any) -> list[check.LayerError]:
        used.ack(*(f"k{i}" for i in meanwhile))
        keys = {sample.token_ids.tobytes(): key for key, sample in samples.items()}
        seen.append([keys[ids.numpy().tobytes()] for ids, _ in stored])
        return [check.LayerError(1, False, 0.0, 0.0)]

    monkeypatch.setattr(check, "compare", compare)
    config = load_config(None, (), model="m", output="/tmp/x", check_samples=2)
    console = Console(file=io.StringIO())
    passed = check.check_run(config, place, MagicMock(dtype="bfloat16"), 1, console)
    assert passed is (True if compared else None)
    assert seen == ([] if compared is None else [compared])
    if compared:
        assert json.loads(place.store.get(CHECK))["samples"] == len(compared)
    else:
        assert "no sample is stored any more" in console.file.getvalue()
        assert CHECK not in {info.name for info in place.store.list("")}


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [
        ("bfloat16", ["1.00e-02 (limit 0.05)", "9.00e-02 (no limit)"]),
        ("float32", ["1.00e-02 (no limit)", "9.00e-02 (limit 0.001)"]),
    ],
)
def test_the_table_shows_a_limit_only_at_the_figure_that_it_limits(dtype: str, shown: list[str]) -> None:
    console = Console(file=io.StringIO(), width=120)
    check.print_errors([check.LayerError(2, False, 1e-2, 9e-2)], dtype, 3, console)
    printed = console.file.getvalue()
    assert all(text in printed for text in shown)
    assert ("MISMATCH" in printed) is (dtype == "float32")


@pytest.mark.parametrize(("unknown", "passed", "shown"), [(True, True, "unclear"), (False, False, "MISMATCH")])
def test_an_error_that_unknown_experts_explain_does_not_fail_a_job(
    unknown: bool, passed: bool, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    store_run(store, [random_sample("a", 5, layer_ids=(1,), hidden_size=8)], per_part=2, codec=NoneCodec())

    def compare(stored: Any, *_: Any, **__: Any) -> list[check.LayerError]:
        assert len(list(stored)) == 1
        return [
            check.LayerError(1, False, 0.3, 0.9, "mlp_out", unknown_routes=unknown),
            check.LayerError(1, False, 0.2, 0.7, "topk_ids"),
        ]

    monkeypatch.setattr(check, "compare", compare)
    config = load_config(None, (), model="m", output="/tmp/x", check_samples=1)
    console = Console(file=io.StringIO())
    assert check.check_run(config, open_place(store), MagicMock(dtype="bfloat16"), 1, console) is passed
    printed = console.file.getvalue()
    assert shown in printed
    assert ("expected topk_ids of all earlier MoE layers" in printed) is unknown
    assert "others for 4.0% of the experts (layer 1)" in printed
