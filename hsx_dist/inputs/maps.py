"""Converts maps of Arrow, which are lists of pairs in Python, to objects whose names are text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_Converter = Callable[[Any], Any]
#: Converts values of columns, by their names.
Converters = Mapping[str, _Converter]


def converters(schema: Any) -> Converters:
    """Return a function for each column with maps. It converts a Python value of the column, or raises TypeError."""
    found = {field.name: _column(field.type) for field in schema}
    return {name: convert for name, convert in found.items() if convert is not None}


def _column(kind: Any) -> _Converter | None:
    try:
        return _with_objects(kind)
    except RecursionError:  # the column's rows are refused, not the file
        return _refuse


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} of a type that is nested too deep")


def _with_objects(kind: Any) -> _Converter | None:
    """Return a function that converts a Python value of an Arrow type. None: the type has no maps.

    Integer keys become text, because Python hashes integers without a seed. A file can choose integers that collide,
    and a mapping of them takes quadratic time.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_map(kind):
        inner = _with_objects(kind.item_type)
        return lambda pairs: None if pairs is None else _object(pairs, inner)
    if types.is_struct(kind):
        return _of_structure({f.name: convert for f in kind if (convert := _with_objects(f.type)) is not None})
    if not types.is_nested(kind):
        return None
    convert = _with_objects(kind.value_type)  # all other nested types are lists
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
