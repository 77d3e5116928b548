"""A user's selection of points becomes a plan, or an error that names the expected values."""

from __future__ import annotations

from typing import Any

import pytest

from hsx_dist.errors import ConfigError
from hsx_dist.taps.points import POINTS, PRESETS, plan_capture, shard_of

#: A model of 4 layers without q_norm. Only its layer 1 is dense.
HAS = {
    "hidden_states": {0, 1, 2, 3, 4},
    "embed": {0},
    "resid_pre": {0, 1, 2, 3},
    "q": {0, 1, 2, 3},
    "ln2": {0, 1, 2, 3},
    "mlp_post": {1},
    "resid_final": {0},
}


def test_layers_are_resolved_and_sorted() -> None:
    plan = plan_capture({"points": {"resid_final": "all", "q": [-1, 0], "resid_pre": "all", "ln2": "last"}}, 4, HAS)
    assert plan.points == {"resid_pre": (0, 1, 2, 3), "q": (0, 3), "ln2": (3,), "resid_final": (0,)}
    assert list(plan.points) == ["resid_pre", "q", "ln2", "resid_final"]


def test_hidden_states_have_a_layer_more_than_the_model() -> None:
    plan = plan_capture({"points": {"q": "last", "hidden_states": [0, "last", -2]}}, 4, HAS)
    assert plan.points == {"hidden_states": (0, 3, 4), "q": (3,)}
    assert plan_capture({"preset": "hidden-states"}, 4, HAS).points == {"hidden_states": (0, 1, 2, 3, 4)}
    with pytest.raises(ConfigError, match="expected layers 0 to 4, -1 to -5"):
        plan_capture({"points": {"hidden_states": [5]}}, 4, HAS)


def test_an_alias_is_stored_once_with_the_layers_of_both() -> None:
    plan = plan_capture({"points": {"mlp_in": [1], "ln2": [3]}}, 4, HAS)
    assert plan.points == {"ln2": (1, 3)}
    assert plan.aliases == {"mlp_in": "ln2"}


def test_a_preset_leaves_out_what_the_model_lacks() -> None:
    assert plan_capture({"preset": "full"}, 4, HAS).points.keys() == HAS.keys() - {"hidden_states"}  # the same rows
    assert plan_capture({"preset": "mlp"}, 4, HAS).points == {"ln2": (0, 1, 2, 3), "mlp_post": (1,)}
    assert plan_capture({"points": {"mlp_post": "all"}}, 4, HAS).points == {"mlp_post": (1,)}


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ({}, "either points or preset"),
        ({"points": {"q": 0}, "preset": "full"}, "either points or preset"),
        ({"preset": "everything"}, "one of hidden-states"),
        ({"preset": ["full"]}, "one of hidden-states"),
        ({"points": {}}, "a table"),
        ({"points": ["q"]}, "a table"),
        ({"points": {"query": [0]}}, "names among .* got 'query'"),
        ({"points": {"q_norm": [0]}}, "q_norm: expected a point of this model"),
        ({"points": {"q": [4]}}, "layers 0 to 3, .* got 4"),
        ({"points": {"q": [-5]}}, "got -5"),
        ({"points": {"q": [True]}}, "got True"),
        ({"points": {"q": "most"}}, "got 'most'"),
        ({"points": {"q": []}}, "each layer once"),
        ({"points": {"q": [3, -1]}}, "each layer once"),
        ({"points": {"mlp_post": [0, 1]}}, r"among \[1\], got \[0\]"),
        ({"points": {"embed": [0]}}, "expected all"),
    ],
)
def test_a_wrong_choice_is_refused(capture: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_capture(capture, 4, HAS)


def test_presets_name_points_that_are_stored() -> None:
    assert {name for names in PRESETS.values() for name in names} <= {n for n, p in POINTS.items() if not p.alias_of}


@pytest.mark.parametrize(
    ("point", "ranks", "kv_heads", "shards"),
    [
        ("attn_out", 2, 8, [0, None]),
        ("q", 4, 1, [0, 1, 2, 3]),
        ("k", 2, 8, [0, 1]),
        ("k", 4, 2, [0, None, 1, None]),
        ("v", 4, 1, [0, None, None, None]),
    ],
)
def test_each_part_of_a_row_is_stored_by_one_rank(
    point: str, ranks: int, kv_heads: int, shards: list[int | None]
) -> None:
    assert [shard_of(point, rank, ranks, kv_heads) for rank in range(ranks)] == shards
