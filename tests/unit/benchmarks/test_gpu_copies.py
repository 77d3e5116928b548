"""The GPU benchmark's code on a CPU: its copies are correct, and without a GPU it reports no result."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import copies, ways
from benchmarks.gpu.ways import BLOCK, Cache, Shape, Ways
from benchmarks.null_sender import NullSender
from benchmarks.provenance import ROOT
from hsx_dist.connector.connector_config import ConnectorConfig

CPU = torch.device("cpu")


class Keeping(NullSender):
    """Copies of the received pages, by request and first token."""

    def __init__(self) -> None:
        self.pages: dict[str, dict[int, np.ndarray]] = {}

    def send(self, pages, release):
        for page in pages:
            axis = 1 if page.order == "LTH" else 0
            tokens = page.data[:, : page.num_tokens] if axis else page.data[: page.num_tokens].swapaxes(0, 1)
            self.pages.setdefault(page.segment.key, {})[page.start] = tokens.copy()
        super().send(pages, release)

    def states(self, key: str) -> np.ndarray:
        """``[tokens, layers, hidden]``."""
        return np.concatenate([page for _, page in sorted(self.pages[key].items())], axis=1).swapaxes(0, 1)


@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize("ring_bytes", [1 << 22, 1 << 17])
def test_both_ways_copy_the_same(order: str, ring_bytes: int, monkeypatch: pytest.MonkeyPatch):
    """Also if the ring holds only two pages, and must wrap."""
    monkeypatch.setattr(ways, "PAGE_BYTES", 1 << 16)
    shape = Shape("tiny", 3, 256, 10 * BLOCK - 5, order)
    kept = Keeping()
    with closing(Ways(Cache(shape, 24, CPU), ring_bytes, kept)) as both:
        requests = list(both.cache.requests(4))
        both.ours(requests)
        both.limit(shape.request_bytes)
        for i, ids in enumerate(requests):
            reference = both.reference([ids]).view(torch.uint16).numpy()
            assert reference.shape == (shape.tokens, 3, 256)
            assert np.array_equal(kept.states(str(i)), reference)
    assert len(kept.pages["0"]) > 2


def test_the_benchmark_copies_the_connectors_pages():
    settings = ConnectorConfig(output="anywhere")
    assert (settings.page_bytes, settings.segment_bytes) == (ways.PAGE_BYTES, ways.SEGMENT_BYTES)


def test_the_benchmark_imports_only_torch_and_numpy():
    """A machine with a GPU may have neither vLLM nor any other dependency of this project."""
    code = """
import sys
import benchmarks.gpu.copies
found = {name.split(".")[0] for name in sys.modules}
print(*sorted(found & {"vllm", "ray", "transformers", "pydantic", "yaml", "zstandard", "crc32c", "obstore", "fsspec"}))
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_copies_during_a_matrix_product_copy_and_raise_their_errors():
    """In inference mode, like the benchmark. Errors of the copies are raised: else nothing would slow down."""
    shape = Shape("tiny", 2, 256, 100, "LTH")
    kept = Keeping()
    with torch.inference_mode(), closing(Ways(Cache(shape, 12, CPU), 1 << 22, kept)) as both:
        with copies.copying(both):
            assert both.copied_bytes >= shape.request_bytes
        assert kept.states("0").shape == (100, 2, 256)

        def fail(requests):
            raise RuntimeError("no copies")

        both.ours = fail
        with pytest.raises(RuntimeError, match="no copies"), copies.copying(both):
            pass


def test_measuring():
    found = copies.measure(Shape("tiny", 2, 256, 100, "LTH", tp=8), CPU, rounds=2, least_bytes=1)
    assert found["of_limit"] > 0
    assert found["over_reference"] > 0
    assert 0 < found["page_host_us"] < found["page_us"]
    assert "product_slowed" not in found


def test_without_a_gpu_no_figure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["copies", "--results", str(tmp_path)])
    copies.main()
    assert json.loads((tmp_path / "gpu.json").read_text())["results"] == []
    assert "Not measured on a GPU" in (tmp_path / "gpu.md").read_text()


def test_the_table_shows_figures_and_goals():
    row = {
        "model": "m", "layers": 2, "hidden": 64, "tp": 1, "tokens": 512, "order": "LTH", "block": 16,
        "gb_per_s": {"ours": 20.0, "reference": 5.0, "limit": 21.0, "beside the product": 9.0},
        "of_limit": 0.95, "over_reference": 4.0,
        "device_mib": 9.0, "reference_device_mib": 600.0, "product_slowed": 0.05,
    }  # fmt: skip
    about = {"cpu": "c", "versions": {"torch": "2"}, "commit": "abc"}
    text = copies.table({"about": about, "device": "a GPU", "results": [row]})
    assert "of_limit: 0.95 to 0.95, goal 0.9: met." in text
    assert "product_slowed: 0.05 to 0.05, goal 0.03: missed." in text
