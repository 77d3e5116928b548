"""The job's own check of points, against rows of the same model from other hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, GPT2Config, GPT2Model

from hsx_dist.jobs.check import LayerError, PointRows, layer_errors
from hsx_dist.page import HIDDEN_STATES
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
    assert all(e.passed("float32") and not e.unknown_routes for e in found.values()), found
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


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rows that a float32 model rounds to bf16, and a function that compares points with a bf16 model."""
    path = tiny_model("mixtral", tmp_path_factory.mktemp("bf16"))
    token_ids = torch.randint(3, 500, (300,), generator=torch.Generator().manual_seed(0))
    rows = {
        key: x if key[0].startswith("topk") else x.bfloat16()
        for key, x in HookedModel(path).rows(token_ids.tolist()).items()
    }
    names = {name: sorted(i for n, i in rows if n == name) for name, _ in rows}
    points = {name: PointRows(of, torch.stack([rows[name, i] for i in of], 1)) for name, of in names.items()}
    reference = AutoModel.from_pretrained(path, dtype=torch.bfloat16).eval()

    def compared(points: dict[str, PointRows]) -> list[LayerError]:
        with torch.inference_mode():
            return layer_errors([(token_ids, points)], reference, 5)

    return points, compared


def test_bf16_rows_are_compared_with_the_engines_experts(bf16: Any) -> None:
    points, compared = bf16
    right = compared(points)
    assert all(e.passed("bfloat16") and not e.unknown_routes for e in right), right
    assert max(e.norm for e in right if e.point != "topk_ids") < 0.03
    assert max(e.norm for e in right if e.point == "topk_ids") > 0  # the models do choose differently


def test_without_the_engines_experts_bf16_rows_after_a_router_are_unclear(bf16: Any) -> None:
    points, compared = bf16
    found = compared({name: of for name, of in points.items() if name != "topk_ids"})
    assert any(e.unclear("bfloat16") for e in found)
    assert not any(e.failed("bfloat16") for e in found)
    early = {e.point for e in found if not e.unknown_routes}
    assert {"embed", "resid_pre", "q", "z", "resid_mid", "router_logits", "topk_weights"} <= early
    assert not {"mlp_out", "resid_final", "final_ln"} & early
    assert all(e.unknown_routes == (e.layer_id > 0) for e in found if e.point in ("q", "hidden_states"))
    (some,) = compared({"topk_ids": PointRows([0], points["topk_ids"].rows[:, :1])})
    assert not some.unknown_routes  # its own router's ids are known


def test_wrong_bf16_rows_fail(bf16: Any) -> None:
    """Layers shifted by one, transposed heads, and wrong ids, with the engine's experts and without."""
    points, compared = bf16
    wrong = {name: of.rows.roll(1, 1) for name, of in points.items() if len(of.layers) > 1}
    everywhere = compared({**points, **{name: PointRows(points[name].layers, rows) for name, rows in wrong.items()}})
    assert all(e.failed("bfloat16") for e in everywhere if e.point in wrong)
    for name in ("resid_pre", "mlp_out", "topk_ids"):
        one = {**points, name: PointRows(points[name].layers, wrong[name])}
        assert all(e.failed("bfloat16") for e in compared(one) if e.point == name), name
        alone = compared({name: PointRows(points[name].layers, wrong[name])})
        assert all(e.failed("bfloat16") for e in alone), name
    q = points["q"]
    transposed = PointRows(q.layers, q.rows.unflatten(2, (4, 32)).transpose(2, 3).flatten(2))
    for given in ({**points, "q": transposed}, {"q": transposed}):
        assert all(e.failed("bfloat16") for e in compared(given) if e.point == "q")


def test_ids_that_no_router_can_choose_fail(bf16: Any) -> None:
    points, compared = bf16
    of = points["topk_ids"]
    for rows in (of.rows + 100, torch.full_like(of.rows, -1), of.rows[:, :, :1]):
        assert all(e.failed("bfloat16") for e in compared({"topk_ids": PointRows(of.layers, rows)}))


def test_a_model_whose_layers_have_another_name_is_compared() -> None:
    model = GPT2Model(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=300)).eval()
    ids = torch.tensor(IDS)
    with torch.inference_mode():
        states = model(ids[None], output_hidden_states=True).hidden_states
        found = layer_errors([(ids, {HIDDEN_STATES: PointRows((0, 1), torch.stack(states[:2], 2)[0])})], model, 2)
    assert [(e.layer_id, e.norm, e.unknown_routes) for e in found] == [(0, 0.0, False), (1, 0.0, False)]
