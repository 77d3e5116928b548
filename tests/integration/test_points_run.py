"""A run with points of a model that vLLM's extraction refuses: its rows against transformers, and its resume."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hsx_dist
from hsx_dist.config import ExtractConfig
from hsx_dist.connector import plugin
from hsx_dist.errors import RunMismatch
from hsx_dist.exporting import export_run
from hsx_dist.jobs import doctor_points
from hsx_dist.jobs.capture import CapturedRows
from hsx_dist.jobs.check import load_points
from hsx_dist.jobs.preflight import examine_model
from hsx_dist.models.tiny import write_tiny_tokenizer
from tests.harness.hooked_model import HookedModel, tiny_model, worst_row
from tests.harness.snippets import snippets
from tests.integration.exact import prompts

PAGE = Path(hsx_dist.__file__).parents[1] / "docs" / "capture.md"
_POINTS: dict[str, Any] = {name: [2] for name in "qkvz"} | {name: [1, 4] for name in ("topk_ids", "topk_weights")}
CAPTURE: dict[str, Any] = {"points": {"hidden_states": [0, -1], "mlp_out": "all"} | _POINTS}
LAYERS = {
    "hidden_states": (0, 5),
    **dict.fromkeys("qkvz", (2,)),
    "mlp_out": (0, 1, 2, 3, 4),
    **dict.fromkeys(("topk_ids", "topk_weights"), (1, 4)),
}
HEADS = {"q": (4, 32), "k": (2, 32), "v": (2, 32), "z": (4, 32)}


def extract(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> hsx_dist.Run:
    return hsx_dist.extract(
        rows,
        model=str(folder / "model"),
        output=folder / "run",
        engine_kwargs={"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 256},
        page_bytes=1 << 15,
        segment_bytes=1 << 16,
        **settings,
    )


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    # Numbers with which no layer has a near tie between experts, where rounding would decide.
    return [{"id": f"row-{len(p)}", "token_ids": p} for p in prompts(21, 1, 31, 33, 100, 150)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> Path:
    """A folder with a model and its run."""
    plugin.register()
    found = tmp_path_factory.mktemp("points")
    write_tiny_tokenizer(tiny_model("mixtral", found / "model"), 512, 512)
    extract(found, rows, source="taps", capture=CAPTURE, check_samples=3)
    return found


def check(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Compare every row that a reader gets from the run with the model's.

    Raises:
        AssertionError: names the first row that differs.
    """
    hooked, run = HookedModel(folder / "model"), hsx_dist.open_run(folder / "run")
    assert run.keys() == [row["id"] for row in rows]
    for row in rows:
        right = hooked.rows(row["token_ids"])
        sample = run[row["id"]]
        assert {name: point.layers for name, point in sample.points.items()} == LAYERS
        for point, layers in LAYERS.items():
            for layer in layers:
                got, expected = sample.point(point, layer), right[point, layer]
                assert got.shape[1:] == HEADS.get(point, expected.shape[1:])
                assert worst_row(got, expected) < 2e-5, (row["id"], point, layer)
        assert sample.load([0, 5], framework="torch")["hidden_states"].shape == (len(row["token_ids"]), 2, 64)


def test_every_stored_row_is_the_models(folder: Path, rows: list[dict[str, Any]]) -> None:
    check(folder, rows)


def test_z_is_the_attention_of_the_stored_queries_keys_and_values(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Attention per head, each with its keys. Only the rotary embedding is transformers'."""
    rotary, run = HookedModel(folder / "model").model.model.rotary_emb, hsx_dist.open_run(folder / "run")
    for row in rows:
        q, k, v, z = (run[row["id"]].point(name, 2).transpose(0, 1)[None] for name in "qkvz")
        cos, sin = rotary(q, torch.arange(q.shape[2])[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 32**0.5
        weights = (scores + torch.full(scores.shape[2:], -torch.inf).triu(1)).softmax(-1)
        right = weights @ v.repeat_interleave(2, 1)
        assert worst_row(z[0].transpose(0, 1), right[0].transpose(0, 1).flatten(1)) < 2e-5


def test_routes_are_the_routers_of_transformers(folder: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """The rows that a reader, a data set and the export return."""
    run, hooked = hsx_dist.open_run(folder / "run"), HookedModel(folder / "model")
    export_run(run, "routing", tmp_path)
    table = pq.read_table(tmp_path / "data-000000.parquet")
    assert table["key"].to_pylist() == [row["id"] for row in rows]
    assert table["input_ids"].to_pylist() == [row["token_ids"] for row in rows]
    assert table.schema.metadata[b"layers"] == b"1,4"
    items = {x["key"]: x for x in hsx_dist.HiddenStatesDataset(run, points=["topk_ids", "topk_weights"])}
    for row, exported in zip(rows, table.to_pylist(), strict=True):
        of = hooked.rows(row["token_ids"])
        ids, weights = (torch.stack([of[name, k] for k in (1, 4)], 1) for name in ("topk_ids", "topk_weights"))
        read = run[row["id"]].load(points=["topk_ids", "topk_weights"], framework="torch")["points"]
        assert read["topk_ids"].dtype == torch.int32
        assert torch.equal(read["topk_ids"].long(), ids)
        torch.testing.assert_close(read["topk_weights"], weights, atol=1e-5, rtol=1e-5)
        for name, states in read.items():
            assert torch.equal(torch.as_tensor(items[row["id"]][name]), states)
        assert exported["routed_experts"] == ids.tolist()
        assert exported["routed_weights"] == read["topk_weights"].tolist()


def test_the_jobs_own_check_compares_every_point(folder: Path) -> None:
    (check,) = (json.loads(path.read_text()) for path in (folder / "run").rglob("check.json"))
    assert check["passed"]
    assert {(e["point"], e["layer_id"]) for e in check["layers"]} == {(p, i) for p in LAYERS for i in LAYERS[p]}


def test_a_plan_says_the_bytes_that_are_stored(folder: Path, rows: list[dict[str, Any]]) -> None:
    settings = {"source": "taps", "capture": CAPTURE, "engine_kwargs": {"dtype": "float32"}}
    model = examine_model(ExtractConfig(model=str(folder / "model"), output="x", **settings))
    index = hsx_dist.open_run(folder / "run").select().run_index
    assert index.raw_bytes.tolist() == [len(row["token_ids"]) * model.token_bytes for row in rows]


def test_the_doctor_judges_each_point(
    folder: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads the existing run instead of starting a second engine."""

    def stored(config: ExtractConfig, prompts: Any, _: Any) -> None:
        assert [row.token_ids for row in prompts()] == [row["token_ids"] for row in rows]
        assert (config.source, config.capture, config.pool) == ("taps", CAPTURE, "threads")
        shutil.copytree(folder / "run", config.output, dirs_exist_ok=True)

    monkeypatch.setattr(doctor_points, "run_extraction", stored)
    settings = {"source": "taps", "capture": CAPTURE, "engine_kwargs": {"dtype": "float32"}}
    config = ExtractConfig(model=str(folder / "model"), output="x", **settings)
    model, prompts = examine_model(config), [row["token_ids"] for row in rows]
    found = doctor_points.measure_points(config, model, prompts)
    assert {d.name: d.state for d in found} == {f"point {name}": "ok" for name in LAYERS}
    shifted = {**model.rows, "q": CapturedRows((3,), 1)}
    (lacking,) = (
        d for d in doctor_points.measure_points(config, replace(model, rows=shifted), prompts) if d.state != "ok"
    )
    assert lacking.name == "point q"

    def with_wrong_rows(sample: hsx_dist.Sample) -> Any:
        ids, points = load_points(sample)
        wrong = {name: points[name].rows.clone() for name in ("mlp_out", "z")}
        wrong["mlp_out"][:, 1:] *= 1.5  # from layer 1 on
        wrong["z"] *= 1.5  # layer 2 only
        return ids, {**points, **{name: replace(points[name], rows=rows) for name, rows in wrong.items()}}

    monkeypatch.setattr(doctor_points, "load_points", with_wrong_rows)
    judged = {d.name: d for d in doctor_points.measure_points(config, model, prompts)}
    assert {name for name, d in judged.items() if d.state == "fail"} == {"point mlp_out", "point z"}
    assert "layers [1, 2, 3, 4] differ; layer 1 is the first of all points" in judged["point mlp_out"].message
    assert "first of all points" not in judged["point z"].message


def test_the_page_reads_points(folder: Path) -> None:
    names: dict[str, Any] = {"RUN": str(folder / "run"), "__name__": "page"}
    (block,) = (s for s in snippets(PAGE) if s.language == "python")
    exec(compile(block.text, block.where, "exec"), names)
    tokens = names["sample"].num_tokens
    assert names["loaded"]["points"]["topk_ids"].shape == (tokens, 1, 2)
    assert names["sample"].point("q", 2).shape == (tokens, 4, 32)


def test_a_run_that_is_complete_needs_no_engine_and_another_capture_is_refused(
    folder: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.LLM", None)
    run = extract(folder, rows, capture=CAPTURE)  # without source, which the run was started with
    assert len(run) == len(rows)
    assert run.info["meaning"]["source"] == "taps"
    for other in (
        {"source": "taps", "capture": {"points": {**CAPTURE["points"], "q": [3]}}},
        {"source": "taps", "capture": {"preset": "mlp"}},
        {"source": "cache", "layers": [0, -1]},
        {"source": "taps", "layers": [0, -1]},
    ):
        with pytest.raises(RunMismatch, match=r"capture|source"):
            extract(folder, rows, **other)
