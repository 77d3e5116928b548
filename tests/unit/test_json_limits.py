"""JSON of unknown size: accepted and refused texts, and their cost."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import pytest

from hsx_dist.json_limits import is_deeper, json_text

FITTING = [
    {}, [], "", "abc", 5, -1, 8, 64, 123456789, 10**30, 0.5, None, True,
    [1, 2], [[], []], [0] * 9, {"a": 1}, {"": []}, {"a": {}, "b": {}}, {"k": [1, {"x": "\u00e9\x00"}]}, {1: "a"}, (1,),
]  # fmt: skip


@pytest.mark.parametrize("value", FITTING, ids=repr)
def test_a_value_is_taken_up_to_its_exact_length(value):
    length = len(json.dumps(value))
    assert json_text(value, max_bytes=length, max_depth=3) == json.dumps(value)
    with pytest.raises(ValueError, match="expected at most"):
        json_text(value, max_bytes=length - 1, max_depth=3)


def nested(depth: int) -> Any:
    value: Any = "x"
    for i in range(depth):
        value = {"k": value} if i % 2 else [value]
    return value


def test_depth_has_a_limit_and_is_found_without_recursion():
    assert json_text(nested(8), max_bytes=1000, max_depth=8)
    for depth in (9, 600, 100_000):
        with pytest.raises(ValueError, match="nested at most 8 deep"):
            json_text(nested(depth), max_bytes=1 << 20, max_depth=8)
    circle: dict[str, Any] = {}
    circle["circle"] = circle
    with pytest.raises(ValueError, match="deep"):
        json_text(circle, max_bytes=1000, max_depth=8)


@pytest.mark.parametrize("value", [float("nan"), {"a": float("inf")}, {"a": object()}, "\ud800", {"\ud800": 1}])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(ValueError):
        json_text(value, max_bytes=1000, max_depth=8)


@pytest.mark.parametrize(
    "value",
    [[0] * 3_000_000, dict.fromkeys(range(300_000)), "x" * 50_000_000, [["y"] * 3_000_000], 1 << 50_000_000],
    ids=["list", "object", "text", "inner", "number"],
)
def test_the_cost_does_not_grow_with_the_value(value):
    before = time.thread_time()
    with pytest.raises(ValueError, match="expected at most"):
        json_text(value, max_bytes=64 << 10, max_depth=8)
    assert time.thread_time() - before < 0.02


@pytest.mark.parametrize("item", [1.2345678901234567e-300, 1e99, True, None, 7, "x", [], {}], ids=repr)
def test_every_type_is_measured_before_it_is_encoded(item):
    """Encoding 21,000 floats takes 27 ms of the engine's thread."""
    most = 21_000 * (len(json.dumps(item)) + 1)
    with pytest.raises(ValueError, match="got more"):
        json_text([item] * 21_000, max_bytes=most, max_depth=8)


def test_an_item_costs_little_more_than_its_encoding():
    """The engine's thread encodes the metadata of each of a request's ``n`` choices."""
    value = {"a": [0] * 21_000}

    def seconds(call) -> float:
        before = time.thread_time()
        call()
        return time.thread_time() - before

    ours = min(seconds(lambda: json_text(value, max_bytes=64 << 10, max_depth=8)) for _ in range(20))
    assert ours < 9 * min(seconds(lambda: json.dumps(value)) for _ in range(20))


def test_subclasses_of_json_types_are_measured_like_their_types():
    class Name(str):
        __slots__ = ()

    value = OrderedDict({Name("a"): (True, IntEnum("Of", "X").X, Name("b"))})
    text = json.dumps(value)
    assert json_text(value, max_bytes=len(text), max_depth=2) == text == '{"a": [true, 1, "b"]}'
    with pytest.raises(ValueError, match="nested"):
        json_text(value, max_bytes=len(text), max_depth=1)


@pytest.mark.parametrize("depth", [0, 1, 7, 8, 9, 600, 100_000])
def test_depth_alone_is_found_without_recursion(depth):
    assert is_deeper(nested(depth), 8, 10) == (depth > 8)
    assert is_deeper([0, {"a": ()}, nested(depth)], 9, 11) == (depth > 8)


def test_many_containers_are_found_and_long_flat_lists_cost_little():
    assert not is_deeper([[]] * 10, 2, 10)
    assert is_deeper([[]] * 11, 2, 10)
    assert is_deeper([[[], []], [[]] * 7], 3, 10)
    flat = [1] * 1_000_000
    assert _seconds_of(lambda: is_deeper({"a": flat}, 2, 10)) < 4 * _seconds_of(lambda: set(map(type, flat)))


def _seconds_of(do):
    """The least CPU time of five calls."""

    def once():
        began = time.thread_time()
        do()
        return time.thread_time() - began

    return min(once() for _ in range(5))
