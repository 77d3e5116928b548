"""The doctor's findings for each point, from errors and from stored samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hsx_dist.jobs.capture import CapturedRows
from hsx_dist.jobs.check import LayerError, PointRows
from hsx_dist.jobs.doctor_points import judge_points

MODEL: Any = SimpleNamespace(
    num_layers=4,
    dtype="float32",
    rows={name: CapturedRows((1, 2), 8) for name in ("hidden_states", "q", "mlp_out", "topk_ids")},
)
SAMPLE = (torch.tensor([1]), {name: PointRows((1, 2), torch.zeros(1, 2, 4)) for name in MODEL.rows})


def error(point: str, layer: int, size: float) -> LayerError:
    return LayerError(layer, False, size, size, point)


def judged(right: float | dict[tuple[str, int], float], wrong: float = 1.0, sample: Any = SAMPLE) -> dict[str, Any]:
    every = [(name, i) for name in MODEL.rows for i in (1, 2)]
    sizes = right if isinstance(right, dict) else dict.fromkeys(every, right)
    found = judge_points(
        MODEL, [sample], [error(*key, sizes.get(key, 0.0)) for key in every], [error(*key, wrong) for key in every]
    )
    return {d.name.removeprefix("point "): d for d in found}


def test_right_rows_are_ok() -> None:
    assert {d.state for d in judged(1e-6).values()} == {"ok"}
    assert judged(1e-6).keys() == MODEL.rows.keys()


def test_the_first_point_that_differs_in_the_order_of_the_computation_is_named() -> None:
    found = judged({("hidden_states", 2): 0.5, ("mlp_out", 1): 0.5, ("mlp_out", 2): float("nan")})
    assert [found[name].state for name in MODEL.rows] == ["fail", "ok", "fail", "ok"]
    assert "layers [1, 2] differ; layer 1 is the first of all points" in found["mlp_out"].message
    assert "first" not in found["hidden_states"].message


def test_a_check_that_shifted_rows_pass_proves_little() -> None:
    assert {d.state for d in judged(1e-6, wrong=1e-6).values()} == {"warn"}


def test_a_point_that_is_not_stored_is_said() -> None:
    ids, points = SAMPLE
    lacking = (ids, {**points, "q": PointRows((1,), torch.zeros(1, 1, 4))})
    found = judged(1e-6, sample=lacking)
    assert found["q"].state == "warn"
    assert "got none of [2]" in found["q"].message
    assert found["mlp_out"].state == "ok"


def test_an_error_that_unknown_experts_explain_is_a_warning_below_float32() -> None:
    def mlp_out(dtype: str, known: float, unknown: float) -> Any:
        model: Any = SimpleNamespace(num_layers=4, dtype=dtype, rows={"mlp_out": CapturedRows((1, 2), 8)})
        second = LayerError(2, False, unknown, unknown, "mlp_out", unknown_routes=True)
        wrong = [error("mlp_out", i, 1.0) for i in (1, 2)]
        (found,) = judge_points(model, [SAMPLE], [error("mlp_out", 1, known), second], wrong)
        return found

    warned = mlp_out("bfloat16", 0.01, 0.3)
    assert warned.state == "warn"
    assert "layers [2] differ: expected topk_ids of all earlier MoE layers" in warned.message
    assert mlp_out("bfloat16", 0.01, 0.05).state == "ok"
    assert mlp_out("float32", 1e-4, 0.3).state == "fail"
    for known, unknown in ((0.3, 0.3), (0.01, 0.6), (0.01, float("nan"))):
        assert mlp_out("bfloat16", known, unknown).state == "fail"
    assert "layers [1] differ; layer 1 is the first of all points" in mlp_out("bfloat16", 0.3, 0.3).message
