"""Points of an engine with two tensor-parallel ranks. Both ranks have heads and experts; readers get whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hsx_dist
from hsx_dist.connector import plugin
from hsx_dist.models.tiny import write_tiny_tokenizer
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import open_store
from tests.harness.hooked_model import HookedModel, tiny_model, worst_row
from tests.integration.exact import prompts

#: Of a model with dense layers and layers of experts.
CAPTURE: dict[str, Any] = {
    "points": {
        **{name: [0, 2, -1] for name in ("hidden_states", "q", "k", "v", "q_norm", "z", "attn_out", "mlp_out")},
        **{name: [2, -1] for name in ("router_logits", "topk_ids", "topk_weights")},
        "mlp_post": [1],
    }
}


def test_two_ranks_store_every_head_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # otherwise two ranks on one NUMA node do not start
    plugin.register()
    write_tiny_tokenizer(tiny_model("qwen3_moe", tmp_path / "model"), 512, 512)
    rows = [{"id": f"row-{len(p)}", "token_ids": p} for p in prompts(21, 1, 31, 33, 100, 150)]
    engine = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 256}
    run = hsx_dist.extract(
        rows,
        model=str(tmp_path / "model"),
        output=tmp_path / "run",
        engine_kwargs={**engine, "max_num_batched_tokens": 64, "tensor_parallel_size": 2},
        page_bytes=1 << 15,
        segment_bytes=1 << 16,
        source="taps",
        capture=CAPTURE,
    )
    assert verify_run(open_store(str(tmp_path / "run"))).ok
    assert run.keys() == [row["id"] for row in rows]
    hooked = HookedModel(tmp_path / "model")
    for row in rows:
        right, sample = hooked.rows(row["token_ids"]), run[row["id"]]
        assert set(sample.points) == set(CAPTURE["points"])
        heads = {name: point.heads for name, point in sample.points.items() if point.heads}
        assert heads == {"q": 4, "q_norm": 4, "z": 4, "k": 2, "v": 2}
        for name, point in sample.points.items():
            for layer in point.layers:
                error = worst_row(sample.point(name, layer), right[name, layer])
                assert error < 2e-5, (row["id"], name, layer, error)
