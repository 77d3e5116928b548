"""What hsx_dist hands to Ray's actors and tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from hsx_dist.config.models import Settings
from hsx_dist.errors import ConfigError

T = TypeVar("T")

#: Levels of settings that an error names: a mapping may hold itself.
_DEPTH = 6


def sendable(value: T, *name: str) -> T:
    """``value``, which Ray can pickle. ``name``: the setting that it is, if it is one.

    Ray's own error prints an argument that it cannot pickle and all its members, credentials included.

    Raises:
        ConfigError: it cannot be pickled; names the innermost setting, and shows no value.
    """
    if _pickles(value):
        return value
    path, found = list(name), value
    while len(path) < _DEPTH and (culprit := next((i for i in _settings(found) if not _pickles(i[1])), None)):
        path.append(str(culprit[0]))
        found = culprit[1]
    raise ConfigError(
        f"{'.'.join(path) or 'an argument of a Ray task'}: expected a value that can be pickled for other processes, "
        f"got one of type {type(found).__name__}. Remove it, or run without Ray (pool: threads)"
    )


def _pickles(value: object) -> bool:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - raised by the value's own code
        return False
    return True


def _settings(value: object) -> Iterable[tuple[Any, Any]]:
    """Names and values of what ``value`` holds, if it holds settings."""
    if isinstance(value, Settings):
        return value
    if isinstance(value, Mapping):
        return value.items()
    return [(f.name, getattr(value, f.name)) for f in fields(value)] if is_dataclass(value) else ()
