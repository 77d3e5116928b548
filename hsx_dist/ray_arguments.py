"""Checks of arguments of Ray actors and tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from hsx_dist.config.models import Settings
from hsx_dist.config.secrets import hide_secrets
from hsx_dist.errors import ConfigError

T = TypeVar("T")

#: Limit of the levels of settings that an error names: a mapping may contain itself.
_DEPTH = 6


def sendable(value: T, *name: str) -> T:
    """Return ``value`` if Ray can pickle it. ``name``: its name, if it is a setting.

    Ray's error would print an argument that it cannot pickle with all members, including credentials.

    Raises:
        ConfigError: the value cannot be pickled. The message names the innermost setting, and shows no value.
    """
    if _pickles(value):
        return value
    path, found = list(name), value
    while len(path) < _DEPTH and (culprit := next((i for i in _settings(found) if not _pickles(i[1])), None)):
        path.append(hide_secrets(str(culprit[0])))
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
    """Return names and values of the settings in ``value``, if any."""
    if isinstance(value, Settings):
        return value
    if isinstance(value, Mapping):
        return value.items()
    return [(f.name, getattr(value, f.name)) for f in fields(value)] if is_dataclass(value) else ()
