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
