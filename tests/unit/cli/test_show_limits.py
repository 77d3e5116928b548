"""``hsx show RUN KEY`` on samples that decode to much more than their stored bytes, or in uneven chunks."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.cli.inspect import _layer_norms, print_sample
from hsx_dist.errors import FormatError
from hsx_dist.format.codecs import ZstdCodec
from hsx_dist.format.codecs.base import EXPANSION_VARIABLE
from hsx_dist.page import HIDDEN_STATES, token_hash
from hsx_dist.reading import Run, Sample
from hsx_dist.reading.sample import columns_of
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, write_v1_run
from tests.harness.traced_memory import trace_memory


def zeros_at(folder: Path, shape: tuple[int, int, int], *, points: int = 1, shards: int = 1) -> str:
    store = LocalStore(folder)
    write_v1_run(store, {"meaning": {"layers": [3]}, "settings": {}, "id": "x"})
    tokens, layers, _ = shape
    made = RandomSample("a", np.zeros(shape, np.uint16), np.arange(tokens), tuple(range(layers)), "bfloat16", tokens)
    facts: Any = {"shards": shards, "columns": points * shards, "sample_hash": token_hash(made.token_ids)}
    segments = [
        replace(made.segments()[0], **facts, point=f"p{p}", shard=i, column=p * shards + i)
        for p in range(points)
        for i in range(shards)
    ]
    RunWriter(store, ZstdCodec()).put([(made, segment, 0) for segment in segments])
    return store.url


@pytest.mark.traced
@pytest.mark.parametrize("shards", [30, 64])
def test_totals_of_a_wide_point_are_not_allocated_before_its_check(shards: int, tmp_path: Path) -> None:
    """A row of 30 shards has 60 MiB, and the totals of its channels would have 240 MiB."""
    url = zeros_at(tmp_path, (1, 1, 1 << 20), shards=shards)
    trace_memory()
    with pytest.raises(FormatError, match=EXPANSION_VARIABLE):
        print_sample(url, "a", (), as_json=True)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20


@pytest.mark.parametrize(("shape", "points"), [((16, 3, 1 << 20), 1), ((16, 1, 1 << 20), 3)])
def test_the_limit_of_decoded_bytes_is_that_of_all_steps(
    shape: tuple[int, int, int], points: int, tmp_path: Path
) -> None:
    """Each step is small enough, and all are not."""
    url = zeros_at(tmp_path, shape, points=points)
    with pytest.raises(FormatError, match=EXPANSION_VARIABLE):
        print_sample(url, "a", (), as_json=True)


def test_a_step_has_the_largest_chunk_of_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the first segment's chunk would decode the large chunk once for each of them."""
    store = MemoryStore()
    write_v1_run(store, {"meaning": {}, "settings": {}, "id": "x"})
    made = random_sample("a", 65, layer_ids=range(64), hidden_size=8, odd=False)
    first, second = made.segments(1)
    RunWriter(store).put([(replace(made, chunk_tokens=1), first, 0), (replace(made, chunk_tokens=64), second, 0)])
    sample = Run(store)["a"]
    spans: list[Any] = []
    load = Sample.load_carrier
    monkeypatch.setattr(Sample, "load_carrier", lambda *a: spans.append(a[2]) or load(*a))
    monkeypatch.setattr("hsx_dist.cli.inspect._BYTES_AT_ONCE", 64 * 8 * 2 + 8 * 8)  # one layer of the large chunk
    norms = _layer_norms(sample, HIDDEN_STATES, columns_of(sample)[HIDDEN_STATES])
    assert set(spans) == {(0, 64), (64, 128)}
    whole = sample.load(framework="numpy")["hidden_states"].astype(np.float64)
    assert norms[5]["max_norm"] == np.linalg.norm(whole[:, 5], axis=1).max()
