"""The folder of an export. Below the destination no link is followed."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hsx_dist.errors import ConfigError
from hsx_dist.store.folders import opened


@contextmanager
def folder_below(dest: Path, below: str = "") -> Iterator[int]:
    """Yield a descriptor of the folder ``below`` the destination. Makes it. Raises ``ConfigError`` for a link."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(opened(dest, below, make=True))
        except OSError as e:
            if e.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise ConfigError(
                f"{dest / below}: expected a folder, got a link or a file. Remove it, or choose another destination"
            ) from e
        yield folder
