"""The job's own check of points, against rows of the same model from other hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hsx_dist.jobs.check import LayerError, PointRows, layer_errors
from tests.harness.hooked_model import HookedModel, tiny_model

pytestmark = pytest.mark.slow
IDS = [7, 3, 99, 4, 250, 11, 12]


def points_of(hooked: HookedModel) -> dict[str, PointRows]:
    rows = hooked.rows(IDS)
    names = dict.fromkeys(name for name, _ in rows)
    layers = {name: sorted(i for n, i in rows if n == name) for name in names}
    return {name: PointRows(of, torch.stack([rows[name, i] for i in of], 1)) for name, of in layers.items()}


def errors(hooked: HookedModel, points: dict[str, PointRows]) -> dict[tuple[str, int], LayerError]:
    with torch.inference_mode():
        found = layer_errors([(torch.tensor(IDS), points)], hooked.model.base_model, 5)
    return {(e.point, e.layer_id): e for e in found}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "mixtral"])
def test_each_point_is_compared_and_another_layer_or_row_fails(kind: str, tmp_path: Path) -> None:
    hooked = HookedModel(tiny_model(kind, tmp_path))
    points = points_of(hooked)
    found = errors(hooked, points)
    assert found.keys() == {(name, i) for name, of in points.items() for i in of.layers}
    assert all(e.passed("float32") for e in found.values()), found
    for name, of in points.items():
        shifted = {name: PointRows(of.layers, of.rows.roll(1, 0))}
        assert not any(e.passed("bfloat16") for e in errors(hooked, shifted).values()), name
        if len(of.layers) > 1:
            rolled = {name: PointRows(of.layers, of.rows.roll(1, 1))}
            wrong = errors(hooked, rolled)
            assert not any(wrong[name, i].passed("bfloat16") for i in of.layers), name


def test_experts_of_nearly_equal_weights_may_change_places(tmp_path: Path) -> None:
    hooked = HookedModel(tiny_model("mixtral", tmp_path))
    ids = points_of(hooked)["topk_ids"]
    turned = PointRows(ids.layers, ids.rows.flip(2).to(torch.int32))
    assert all(e.norm == 0 for e in errors(hooked, {"topk_ids": turned}).values())


def test_a_point_that_transformers_names_otherwise_is_not_compared(tmp_path: Path) -> None:
    hooked = HookedModel(tiny_model("qwen3", tmp_path))
    found = errors(hooked, {"router_logits": PointRows([2], torch.zeros(len(IDS), 1, 8))})
    assert found == {}
