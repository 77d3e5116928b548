"""Converts maps of Arrow, which are lists of pairs in Python, to objects whose names are text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_Converter = Callable[[Any], Any]


def with_objects(kind: Any) -> _Converter | None:
    """Return a function that converts a Python value of an Arrow type. None: the type has no maps.

    Integer keys become text, because Python hashes integers without a seed. A file can choose integers that collide,
    and a mapping of them takes quadratic time.

    Raises:
        TypeError: a union has maps. In Python, an empty map and an empty list of a union are equal.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_map(kind):
        inner = with_objects(kind.item_type)
        return lambda pairs: None if pairs is None else _object(pairs, inner)
    if types.is_struct(kind):
        return _of_structure({f.name: convert for f in kind if (convert := with_objects(f.type)) is not None})
    if types.is_union(kind):
        if any(with_objects(field.type) is not None for field in kind):
            raise TypeError("a map in a union")
        return None
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return with_objects(kind.value_type)
    if not types.is_nested(kind):
        return None
    convert = with_objects(kind.value_type)  # all other nested types are lists
    return None if convert is None else lambda items: None if items is None else list(map(convert, items))


def _of_structure(members: dict[str, _Converter]) -> _Converter | None:
    def convert(value: Any) -> Any:
        return None if value is None else value | {name: members[name](value[name]) for name in members}

    return convert if members else None


def _object(pairs: list[tuple[Any, Any]], inner: _Converter | None) -> dict[Any, Any]:
    """Return a map as an object.

    A map with a key that is neither a string nor an integer keeps only this key. Later, the row is refused for it.

    Raises:
        KeyError: two keys are the same text.
    """
    found: dict[Any, Any] = {}
    for key, item in pairs:
        if type(key) is not str and type(key) is not int:
            return {key: None}
        found[str(key)] = item if inner is None else inner(item)
    if len(found) < len(pairs):
        raise KeyError
    return found
