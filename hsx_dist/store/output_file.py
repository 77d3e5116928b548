"""Files that a command writes for its user, in a folder that may be another user's run, with links and FIFOs."""

from __future__ import annotations

import io
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hsx_dist.errors import ConfigError, HsxError
from hsx_dist.regular_files import is_descriptor, open_regular
from hsx_dist.store.faults import FULL
from hsx_dist.store.folder_listing import UNFINISHED
from hsx_dist.store.folders import SAFELY, opened

#: Number in the message of a library in Rust, such as safetensors.
_RUST = re.compile(r"\(os error (\d{1,4})\)")


def regular_file(path: str, flags: int) -> int:
    """Opener for ``open`` of a path that another user may have made. A FIFO does not block it.

    Raises ``OSError`` for a link, a FIFO, a socket, a device and a folder.
    """
    return open_regular(path, flags | os.O_NOFOLLOW)


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that gets the name ``path`` when it is complete. Replaces a file, a link or a FIFO of that name.

    A device such as ``/dev/stdout`` cannot be replaced: it is written directly. Raises ``ConfigError`` if the file
    cannot be written.
    """
    with writable(path, "file"), _output_file(path) as f:
        yield f


@contextmanager
def writable(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Raise ``ConfigError`` if the disk refuses to write a user's ``path``, which is a ``kind`` (file, folder)."""
    try:
        yield
    except HsxError:
        raise
    except Exception as e:
        error = _of_disk(e)
        if error is None:
            raise
        why = error.strerror or type(error).__name__
        todo = "Free some space, or choose" if error.errno in FULL else "Choose"
        raise ConfigError(f"{path}: expected a {kind} that can be written, got: {why}. {todo} another {kind}") from e


def _of_disk(error: Exception) -> OSError | None:
    """Return the error of the operating system behind a library's error.

    An ``OSError`` without a number is a library's own, such as the hub's, and has another cause.
    """
    if isinstance(error, RuntimeError) and isinstance(error.__context__, Exception):
        error = error.__context__  # torch.save raises it while it handles the disk's error
    if isinstance(error, OSError):
        return error if error.errno is not None or isinstance(error, io.UnsupportedOperation) else None
    found = _RUST.search(str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


@contextmanager
def _output_file(path: Path) -> Iterator[BinaryIO]:
    if is_descriptor(path):
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
