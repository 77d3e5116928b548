"""Checks of the arguments of public functions: ``ConfigError`` with the argument's name, instead of a ``TypeError``."""

from __future__ import annotations

import os
from numbers import Integral
from operator import index

from hsx_dist.config.urls import check_no_credentials
from hsx_dist.errors import ConfigError


def require_positive(least: int = 1, /, **counts: object) -> None:
    """Raise ``ConfigError`` unless all ``counts`` are integers of at least ``least``."""
    for name, value in counts.items():
        if not isinstance(value, Integral) or value < least:
            raise _wrong(name, f"an integer of at least {least}", value)


def whole(name: str, value: object) -> int:
    """Return an integer, also of a scalar of NumPy or torch. Raises ``ConfigError`` for another value."""
    try:
        return index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without values, such as one of the device ``meta``
        raise _wrong(name, "an integer", value) from None


def path_text(name: str, value: object) -> str:
    """Return a path or a URL as text. Raises ``ConfigError`` for another value, and for one with credentials."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise _wrong(name, "a path or a URL as text", value)
    check_no_credentials(text)  # a folder's name would show them
    return text


def _wrong(name: str, expected: str, value: object) -> ConfigError:
    return ConfigError(f"{name}: expected {expected}, got {value!r:.100}. Correct it")
