"""Routes as Parquet: compared with transformers' own router, and runs that cannot be exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from hsx_dist import HiddenStatesDataset
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.exporting import ExportOptions, export_run
from hsx_dist.reading import Run
from tests.harness.hooked_model import HookedModel, tiny_model
from tests.harness.points import computed_sample, run_of

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = [np.random.default_rng(i).integers(3, 500, n).tolist() for i, n in enumerate((1, 40, 17))]
WEIGHTED = {"topk_ids": (0, 2, 4), "topk_weights": (0, 2, 4)}


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> HookedModel:
    return HookedModel(tiny_model("mixtral", tmp_path_factory.mktemp("model")))


def run_with(hooked: HookedModel, points: dict[str, Any], keys: str = "abc") -> Run:
    samples = (computed_sample(key, ids, hooked.rows(ids), points) for key, ids in zip(keys, IDS, strict=True))
    return run_of(*(sample.segments(i) for i, sample in enumerate(samples)))


def test_routes_are_those_of_transformers_router(hooked: HookedModel, tmp_path: Path) -> None:
    run = run_with(hooked, WEIGHTED)
    assert export_run(run, "routing", tmp_path / "all", ExportOptions(samples_per_file=2)).written == 2
    assert export_run(run, "routing", tmp_path / "some", ExportOptions(aux_layers=(4, 0))).written == 1
    found = [row for path in sorted((tmp_path / "all").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    some = pq.read_table(tmp_path / "some" / "data-000000.parquet")
    assert some.schema.metadata[b"layers"] == b"4,0"
    assert "decoder layers [4, 0]" in json.loads((tmp_path / "some" / "export.json").read_text())["routed_experts"]
    items = list(HiddenStatesDataset(run, points=["topk_ids", "topk_weights"], framework="torch"))
    for ids, row, picked, item in zip(IDS, found, some.to_pylist(), items, strict=True):
        routed = hooked.rows(ids)
        experts = torch.stack([routed["topk_ids", k] for k in (0, 2, 4)], 1)
        weights = torch.stack([routed["topk_weights", k] for k in (0, 2, 4)], 1)
        assert experts.shape == (len(ids), 3, 2)
        assert row["input_ids"] == ids
        assert row["routed_experts"] == experts.tolist() == item["topk_ids"].tolist()
        assert row["routed_weights"] == weights.tolist() == item["topk_weights"].tolist()
        assert picked["routed_experts"] == experts[:, [2, 0]].tolist()
        assert picked["routed_weights"] == weights[:, [2, 0]].tolist()


def test_a_row_group_is_bounded_by_bytes(hooked: HookedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(hooked, WEIGHTED)
    export_run(run, "routing", tmp_path / "whole")
    monkeypatch.setattr("hsx_dist.reading.groups.GROUP_BYTES", 1000)
    export_run(run, "routing", tmp_path / "groups")
    whole, groups = (pq.ParquetFile(tmp_path / name / "data-000000.parquet") for name in ("whole", "groups"))
    assert (whole.num_row_groups, groups.num_row_groups) == (1, 3)
    assert groups.read().equals(whole.read())


def test_weights_that_are_not_of_all_layers_are_left_out(hooked: HookedModel, tmp_path: Path) -> None:
    export_run(run_with(hooked, {**WEIGHTED, "topk_weights": (0, 2)}), "routing", tmp_path)
    assert pq.read_table(tmp_path / "data-000000.parquet").column_names == ["key", "input_ids", "routed_experts"]
    assert json.loads((tmp_path / "export.json").read_text())["routed_weights"] == "not stored"


def test_a_run_with_too_many_experts_of_a_token_is_refused(
    hooked: HookedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow's lists of a fixed size raise an untyped error from 2^31 on."""
    monkeypatch.setattr("hsx_dist.exporting.routing.MAX_HIDDEN_SIZE", 1)
    with pytest.raises(FormatError, match="expected at most 1 experts of a token, got 2"):
        export_run(run_with(hooked, WEIGHTED), "routing", tmp_path)


def test_runs_without_routes_are_refused(hooked: HookedModel, tmp_path: Path) -> None:
    run = run_with(hooked, WEIGHTED)
    for refused, options, message in (
        (run_with(hooked, {"mlp_out": (1,)}), ExportOptions(), "expected the point topk_ids, got mlp_out"),
        (run, ExportOptions(aux_layers=(0, 1)), r"expected layers among \[0, 2, 4\], got \[1\] too"),
        (run_with(hooked, WEIGHTED, "ab\ud800"), ExportOptions(), "expected valid Unicode"),
    ):
        with pytest.raises(ConfigError, match=message):
            export_run(refused, "routing", tmp_path / "x", options)
        assert not list(tmp_path.rglob("*.parquet"))
