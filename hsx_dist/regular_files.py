"""Files that a user names, or that other users may replace: opened without waiting for a FIFO or a device."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from hsx_dist.errors import ConfigError


def open_regular(path: str, flags: int) -> int:
    """Opener for ``open`` that follows links. Raises ``OSError`` for a FIFO, a socket, a device and a folder.

    Examines the open file: another user may replace it between a check of the path and the opening.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "not a regular file", path)
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise
    return fd


def is_descriptor(path: Path) -> bool:
    """Whether a path is a device in ``/dev`` or a descriptor of the process. Shells name one for ``<(COMMAND)``.

    Bash names ``/dev/fd/N``, and zsh ``/proc/self/fd/N``.
    """
    # Not by Path.resolve, which raises RuntimeError for a loop of links before Python 3.13.
    return os.path.realpath(path.parent) in ("/dev", os.path.realpath("/dev/fd"))


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise ``ConfigError`` if a library that loads a model's folder may wait for a FIFO or a device in it.

    Only for libraries that open files by their names. ``path`` may also be an id of the hub.
    """
    for folder in (Path(path), Path(path, "additional_chat_templates")):
        with suppress(OSError):  # the library names it
            for file in folder.iterdir():
                with suppress(OSError):  # of a link without a target
                    mode = file.stat().st_mode
                    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                        raise ConfigError(
                            f"{file}: expected a regular file, got a FIFO, socket or device. Remove it, or name "
                            "another folder"
                        )
