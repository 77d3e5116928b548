"""The folder of an export. Below the destination no link is followed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from hsx_dist.errors import ConfigError
from hsx_dist.store.folders import opened

#: Names of unfinished files. They keep the file's suffix, as some libraries choose the format by it.
_UNFINISHED = re.compile(r"\.new-[0-9a-f]{32}(\..*)?", re.DOTALL)


def unfinished(path: Path) -> Path:
    """Create an empty file next to ``path``, with the process's default permissions."""
    temporary = path.with_name(f".new-{uuid4().hex}{path.suffix}")
    temporary.touch(exist_ok=False)
    return temporary


def make_folder(dest: Path, below: str) -> None:
    """Make the folder ``below`` the destination. Raises ``ConfigError`` for a link."""
    with _opened(dest, below, make=True):
        pass


def remove_unfinished(dest: Path, below: str) -> None:
    """Remove unfinished files of killed processes. Raises ``ConfigError`` for a link in place of the folder."""
    with _opened(dest, below) as folder, os.scandir(folder) as found:
        for name in [entry.name for entry in found if _UNFINISHED.fullmatch(entry.name)]:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)


@contextmanager
def _opened(dest: Path, below: str, *, make: bool = False) -> Iterator[int]:
    try:
        with opened(dest, below, make=make) as folder:
            yield folder
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise ConfigError(
            f"{dest / below}: expected a folder, got a link or a file. Remove it, or choose another destination"
        ) from e
