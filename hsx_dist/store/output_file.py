"""Files that a command writes for its user, in a folder that may be another user's run, with links and FIFOs."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hsx_dist.errors import ConfigError, HsxError
from hsx_dist.store.folder_listing import UNFINISHED
from hsx_dist.store.folders import SAFELY, opened


def without_link(path: str, flags: int) -> int:
    """Opener for ``open``. Raises ``OSError`` for a link."""
    return os.open(path, flags | SAFELY, 0o666)


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that gets the name ``path`` when it is complete. Replaces a file, a link or a FIFO of that name.

    A device such as ``/dev/stdout`` cannot be replaced: it is written directly. Raises ``ConfigError`` if the file
    cannot be written.
    """
    try:
        with _output_file(path) as f:
            yield f
    except HsxError:
        raise
    except OSError as e:
        why = e.strerror or type(e).__name__
        raise ConfigError(f"{path}: expected a file that can be written, got: {why}. Choose another file") from e


@contextmanager
def _output_file(path: Path) -> Iterator[BinaryIO]:
    if path.parent.resolve() in (Path("/dev"), Path("/dev/fd").resolve()):
        with path.open("wb") as f:
            yield f
        return
    with opened(path.parent) as folder:
        temporary = f"{UNFINISHED}{uuid.uuid4().hex}"  # in a run no store lists the file, and ``hsx gc`` removes it
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o666, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as f:
                yield f
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
