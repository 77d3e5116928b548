"""The GPU benchmark's code, on a CPU: what it copies is right, and without a GPU it claims nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import copies
from benchmarks.gpu.ways import BLOCK, Cache, Shape, Ways

CPU = torch.device("cpu")


@pytest.mark.parametrize("order", ["LTH", "TLH"])
def test_both_ways_copy_the_same(order):
    shape = Shape("tiny", 3, 256, 10 * BLOCK, order)
    cache = Cache(shape, 24, CPU)
    ways = Ways(cache, 1 << 20)
    requests = list(cache.requests(4))
    reference = ways.reference(requests)
    assert reference.shape == (shape.tokens, 3, 256)
    pages = ways.ours(requests)
    axis = 1 if order == "LTH" else 0
    whole = torch.cat(pages, dim=axis)
    assert torch.equal(
        (whole.transpose(0, 1) if order == "LTH" else whole).view(torch.int16), reference.view(torch.int16)
    )


def test_a_ring_smaller_than_a_request_goes_round():
    shape = Shape("tiny", 4, 4096, 40 * BLOCK, "TLH")
    ways = Ways(Cache(shape, 50, CPU), 1)
    assert len(ways.ring) == 2
    pages = ways.ours(list(ways.cache.requests(2)))
    assert len(pages) == -(-shape.blocks // shape.page_blocks) > len(ways.ring)


def test_measuring():
    found = copies.measure(Shape("tiny", 2, 256, 100, "LTH", tp=8), CPU, rounds=2, least_bytes=1)
    assert found["of_limit"] > 0
    assert found["over_reference"] > 0
    assert "product_slowed" not in found


def test_without_a_gpu_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["copies", "--results", str(tmp_path)])
    copies.main()
    assert json.loads((tmp_path / "gpu.json").read_text())["results"] == []
    assert "Not measured on a GPU" in (tmp_path / "gpu.md").read_text()


def test_the_table_of_what_was_measured():
    row = {
        "model": "m", "layers": 2, "hidden": 64, "tp": 1, "tokens": 512, "order": "LTH", "block": 16,
        "gb_per_s": {"ours": 20.0, "reference": 5.0, "limit": 21.0}, "of_limit": 0.95, "over_reference": 4.0,
        "device_mib": 9.0, "reference_device_mib": 600.0, "product_slowed": 0.05,
    }  # fmt: skip
    about = {"cpu": "c", "versions": {"torch": "2"}, "commit": "abc"}
    text = copies.table({"about": about, "device": "a GPU", "results": [row]})
    assert "of_limit: 0.95 to 0.95, goal 0.9: met." in text
    assert "product_slowed: 0.05 to 0.05, goal 0.03: missed." in text
