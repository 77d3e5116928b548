"""Check that a sample has all tokens up to its last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.text import head


def require_whole(key: str, meta: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if a sample lacks tokens before its last token. Later tokens of the request may be missing.

    ``meta``: as ``Sample.meta``.
    """
    chosen = meta.get("tokens")
    if isinstance(chosen, Mapping) and (chosen.get("start"), chosen.get("step")) != (0, 1):
        facts = ", ".join(f"{name}={value!r:.40}" for name, value in chosen.items())
        raise ConfigError(
            f"sample {head(key, 200)!a}: expected a whole sample, got a selection of its tokens ({facts:.200}). "
            "Extract with select: all"
        )
