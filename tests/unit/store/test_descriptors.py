"""A system call that fails keeps no descriptor open: a retried put would use up the process's descriptors."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.errors import HsxError
from hsx_dist.fleet.cpu_binding import CoreClaim
from hsx_dist.reading.object_lock import exclusive_lock
from hsx_dist.store.folders import open_own, opened, private_folder
from hsx_dist.store.local import LocalStore, _synced
from hsx_dist.store.output_file import output_file, regular_file
from hsx_dist.store.within import ConfinedFolder

#: Calls that need an open descriptor, and calls that make a further one.
CALLS = ("close", "dup", "fstat", "fsync", "mkdir", "open", "readlink", "stat", "unlink")


def _put(folder: Path) -> None:
    LocalStore(folder).put("data/deep/a", [b"1"])


def _put_through_a_link(folder: Path) -> None:
    LocalStore(folder).put("link/deep/a", [b"1"])


def _replace(folder: Path) -> None:
    LocalStore(folder).put("old", [b"1"])


def _read(folder: Path) -> None:
    LocalStore(folder).get("real/old")


def _read_confined(folder: Path) -> None:
    ConfinedFolder(folder).get("real/old")


def _walk(folder: Path) -> None:
    with opened(folder, "data/deep", make=True):
        pass


def _private(folder: Path) -> None:
    os.close(private_folder(folder / "private"))


def _own(folder: Path) -> None:
    with opened(folder) as fd:
        os.close(open_own(fd, "own", os.O_RDWR | os.O_CREAT))


def _regular(folder: Path) -> None:
    with open(folder / "old", opener=regular_file):
        pass


def _output(folder: Path) -> None:
    with output_file(folder / "out") as f:
        f.write(b"1")


def _lock(folder: Path) -> None:
    with exclusive_lock(str(folder), "old"):
        pass


def _server_lock(folder: Path) -> None:
    locks = ObjectLocks(folder)
    with (folder / "old.lock").open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        try:
            locks.hold("new", "1")
            locks.hold("old", "2")
        finally:
            locks.release_all()


def _cores(_: Path) -> None:
    CoreClaim(1).release()


@pytest.mark.parametrize(
    "use",
    [
        _put, _put_through_a_link, _replace, _read, _read_confined, _walk, _private, _own, _regular, _output, _lock,
        _server_lock, _cores,
    ],
)  # fmt: skip
def test_a_system_call_that_fails_keeps_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    leaks = set[str]()
    for call in CALLS:
        n = 0
        while True:
            folder = tmp_path / f"{call}-{n}"
            (folder / "real").mkdir(parents=True)
            for name in ("old", "real/old", "old.lock"):
                (folder / name).write_bytes(b"0")
            (folder / "link").symlink_to("real")
            before = _descriptors()
            with pytest.MonkeyPatch.context() as patch:
                failed = _failing(patch, call, n)
                with suppress(HsxError, OSError):
                    use(folder)
            _synced.close()
            if _descriptors() > before:
                leaks.add(f"{call} {n}")
            if not failed:
                break
            n += 1
    assert not leaks


def _failing(patch: pytest.MonkeyPatch, name: str, nth: int) -> list[str]:
    """Let the ``nth`` call of a function of ``os`` fail. The returned list gets its name then."""
    real, calls, failed = getattr(os, name), 0, list[str]()

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth + 1:
            failed.append(name)
            if name == "close":  # Linux closes the descriptor also if it reports an error
                real(*args)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*args, **kwargs)

    patch.setattr(os, name, call)
    return failed


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
