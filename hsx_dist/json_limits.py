"""Encoding JSON values of unknown size and depth at a bounded cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_CONTAINERS = (list, tuple, dict)


def json_text(value: Any, *, max_bytes: int, max_depth: int) -> str:
    """Encode ``value`` as JSON text in ASCII.

    Walks the value level by level, without recursion, and stops as soon as the text must exceed ``max_bytes``. So the
    cost depends on the limits, not on the value.

    Raises:
        ValueError: the value is nested deeper than ``max_depth`` (a scalar has depth 0), or its text exceeds
            ``max_bytes``. Or JSON cannot hold the value: other types, mixed types of names, NaN, lone surrogates.
    """
    left, depth, level = max_bytes, 0, [value]
    while level:
        below: list[Any] = []
        for item in level:
            # Checks of abstract classes for each item would be most of the cost.
            kind = _kind(type(item))  # type: ignore[arg-type]  # mypy: a type is not hashable
            if kind is int:
                left -= item.bit_length() * 3 // 10 or 1
            elif kind is float:
                left -= len(float.__repr__(item))  # 3 to 24 characters, and slow to encode
            elif kind is object:
                left -= 4  # true, false, null
            else:
                left -= len(item) + 2 if kind is str else (2 if kind is list else 4) * len(item) or 2
            if left < 0:  # before anything is iterated
                raise ValueError(f"expected at most {max_bytes} bytes as JSON, got more. Shorten the value")
            if kind is list:
                below += item
            elif kind is dict and item:
                # 1 and "1" would be encoded as the same name. Most dictionaries of a small text have one name.
                if len(item) > 1 and len({isinstance(name, str) for name in item}) > 1:
                    raise ValueError("expected names that are strings, got others too. Use strings")
                below += item
                below += item.values()
            elif kind is str and not item.isascii():
                _check_unicode(item)
        if below and depth == max_depth:
            raise ValueError(f"expected values nested at most {max_depth} deep, got deeper ones. Flatten the value")
        depth, level = depth + 1, below
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"expected a value that JSON can hold, got another: {e}") from None
    if len(text) > max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes as JSON, got {len(text)}. Shorten the value")
    return text


def is_deeper(value: Any, max_depth: int, max_containers: int) -> bool:
    """Whether ``value``, which consists of JSON types, has more levels than ``max_depth``, or more lists and objects
    than ``max_containers``. Does not recurse. A long flat list costs 20 ns a value."""
    level, count = [value] if isinstance(value, _CONTAINERS) else [], 0
    for _ in range(max_depth):
        if not level:
            return False
        below: list[Any] = []
        for item in level:
            values = item.values() if isinstance(item, dict) else item
            if any(issubclass(kind, _CONTAINERS) for kind in set(map(type, values))):
                below += [v for v in values if isinstance(v, _CONTAINERS)]
                if count + len(below) > max_containers:
                    return True
        level, count = below, count + len(below)
    return bool(level)


@lru_cache(maxsize=64)
def _kind(of: type) -> type:
    """Return the JSON type that values of a class are encoded as: str, list, dict, int or float; else ``object``."""
    kinds = {str: str, list: list, tuple: list, Mapping: dict, bool: object, int: int, float: float}
    return next((kind for base, kind in kinds.items() if issubclass(of, base)), object)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("expected text without lone surrogates, got some. Remove them") from None
