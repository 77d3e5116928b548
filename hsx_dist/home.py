"""Paths that begin with the user's home folder."""

from __future__ import annotations

import os
from pathlib import Path

from hsx_dist.errors import ConfigError


def with_home(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with ``~``, ``~/…`` or ``~USER/…`` expanded. Without such a user it is a name: ``~old.jsonl``.

    Not by ``Path.expanduser``: ``Path`` drops the ``./`` of ``./~/x``, and then reads another folder's file.

    Raises:
        ConfigError: the current user has no home folder.
    """
    text = os.fspath(path)
    found = os.path.expanduser(text)  # noqa: PTH111
    if found == text and (text == "~" or text.startswith("~/")):
        raise ConfigError(f"{text}: expected a home folder for ~, got none. Set HOME, or write the whole path")
    return Path(found)
