from __future__ import annotations

import pytest

from hsx_dist.errors import ConfigError
from hsx_dist.layers import resolve_layers


@pytest.mark.parametrize(
    ("spec", "ids"),
    [
        ([2, 15, 27, 30], (2, 15, 27, 30)),
        ("eagle3", (2, 15, 27, 30)),
        ("2,15,last", (2, 15, 30)),
        ("[27, 2]", (2, 27)),
        ([30, "last"][:1], (30,)),
        (["last", 0], (0, 30)),
        (-1, (30,)),
        ("-1", (30,)),
        (-31, (0,)),
        (0, (0,)),
        ("ALL", tuple(range(31))),
        (["all"], tuple(range(31))),
    ],
)
def test_resolves(spec: list[int | str] | str | int, ids: tuple[int, ...]) -> None:
    assert resolve_layers(spec, 30) == ids


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ([31], ["0 … 30", "31"]),
        (-32, ["-31", "-32"]),
        ([2, 2], ["2 more than once", "0 … 30"]),
        ([30, "last"], ["30 more than once"]),
        ([0, -31], ["more than once"]),
        ("2,,3", ["2,,3"]),
        ("", ["at least one"]),
        ([], ["at least one"]),
        ("2,middle", ["'middle'"]),
        ("all,3", ["expected all alone", "layers=all"]),
        ([True], ["True"]),
        ([1.5], ["1.5"]),
    ],
)
def test_refuses(spec: list[int | str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        resolve_layers(spec, 30)
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize("depth", range(7, 130))
def test_eagle3_is_four_layers_at_any_depth(depth: int) -> None:
    assert len(resolve_layers("eagle3", depth)) == 4


@pytest.mark.parametrize("depth", [1, 2, 4, 5, 6])
def test_eagle3_needs_some_depth(depth: int) -> None:
    with pytest.raises(ConfigError, match="eagle3"):
        resolve_layers("eagle3", depth)
