"""Files written past the page cache: the bytes are equal, also if the file system refuses or shortens writes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.errors import StoreError
from hsx_dist.store import direct
from hsx_dist.store.local import LocalStore


def _views(*sizes: int) -> list[bytes]:
    rng = np.random.default_rng(3)
    return [rng.bytes(n) for n in sizes]


def _aligned(nbytes: int) -> memoryview:
    """Random bytes in memory of whole pages."""
    block = mmap.mmap(-1, nbytes)
    block[:] = np.random.default_rng(4).bytes(nbytes)
    return memoryview(block)


@pytest.mark.parametrize("before", [0, 4096, 100])
@pytest.mark.parametrize("nbytes", [direct.LEAST_BYTES, 3 * direct.LEAST_BYTES + 4097])
def test_aligned_memory_is_written_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, nbytes: int
) -> None:
    views = [*_views(before), _aligned(nbytes), *_views(1528)]
    place = np.frombuffer(views[1], np.uint8).ctypes.data
    from_there: list[int] = []
    real = os.write

    def write(fd: int, data: Any) -> int:
        at = np.frombuffer(data, np.uint8).ctypes.data
        from_there.append(len(data) if place <= at < place + nbytes else 0)
        return real(fd, data)

    monkeypatch.setattr(direct.os, "write", write)
    LocalStore(tmp_path).put("a", views)
    assert (tmp_path / "a").read_bytes() == b"".join(views)
    assert sum(from_there) == (0 if before % 4096 else nbytes // 4096 * 4096)


@pytest.mark.parametrize(
    "sizes",
    [
        (direct.LEAST_BYTES,),
        (direct.LEAST_BYTES - 1,),
        (123, 0, direct.LEAST_BYTES, 1),  # the form of a part: a header of any length, then chunks
        ((9 << 20) + 4097,),  # larger than the buffer
    ],
)
def test_any_lengths(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    views = _views(*sizes)
    LocalStore(tmp_path).put("a", views)
    assert (tmp_path / "a").read_bytes() == b"".join(views)


def test_large_objects_go_past_the_cache_and_small_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = os.write

    def write(fd: int, data: Any) -> int:
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, data)

    monkeypatch.setattr(direct.os, "write", write)
    store = LocalStore(tmp_path)
    store.put("small", _views(1000))
    assert seen == []
    store.put("large", _views(direct.LEAST_BYTES + 1))
    assert seen
    assert all(seen)


@pytest.mark.parametrize("answer", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_direct_writes_gets_normal_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    _refusing(monkeypatch, answer, lambda _: True)
    (view,) = views = _views(direct.LEAST_BYTES + 5)
    LocalStore(tmp_path).put("a", views)
    assert (tmp_path / "a").read_bytes() == view


@pytest.mark.parametrize("answer", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_the_flag_gets_normal_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(answer, os.strerror(answer))
        return real(fd, command, argument)

    monkeypatch.setattr(direct.fcntl, "fcntl", refuse)
    (view,) = views = _views(direct.LEAST_BYTES + 5)
    LocalStore(tmp_path).put("a", views)
    assert (tmp_path / "a").read_bytes() == view


@pytest.mark.parametrize("before", [0, 100])
@pytest.mark.parametrize("nbytes", [(2 << 20) + 5, (5 << 20) + 3 * 4096 + 7, (9 << 20) + 4096])
def test_a_device_with_larger_blocks_gets_the_rest_by_normal_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, before: int
) -> None:
    _refusing(monkeypatch, errno.EINVAL, lambda n: n % (64 << 10) > 0)
    views = [*_views(before), _aligned(nbytes)]
    LocalStore(tmp_path).put("a", views)
    assert (tmp_path / "a").read_bytes() == b"".join(views)


def _refusing(monkeypatch: pytest.MonkeyPatch, answer: int, refused: Callable[[int], bool]) -> None:
    """Let direct writes fail whose number of bytes is ``refused``."""
    real = os.write

    def write(fd: int, data: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and refused(len(data)):
            raise OSError(answer, os.strerror(answer))
        return real(fd, data)

    monkeypatch.setattr(direct.os, "write", write)


def test_short_direct_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    calls = 0

    def short(fd: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(fd, data[:4096])
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        # A short write may end anywhere, but O_DIRECT forbids the test to write such a length.
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        written = real(fd, data[: len(data) // 2 + 1])
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return written

    monkeypatch.setattr(direct.os, "write", short)
    (view,) = views = _views(direct.LEAST_BYTES + 5)
    LocalStore(tmp_path).put("a", views)
    assert (tmp_path / "a").read_bytes() == view


def test_a_full_disk_raises_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    calls = 0

    def full(fd: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:4096])  # a short write: aligned memory would otherwise need only this call

    monkeypatch.setattr(direct.os, "write", full)
    with pytest.raises(StoreError, match="No space left on device"):
        LocalStore(tmp_path).put("a", _views(9 << 20))
    assert list(tmp_path.iterdir()) == []


#: The forked process puts its object after the parent has filled its buffer, and before the parent writes it.
_FORKED = """
import os, sys
from hsx_dist.store import direct
from hsx_dist.store.local import LocalStore

store, write = LocalStore(sys.argv[1]), direct._write_all
store.put("first", [b"1" * (2 << 20)])
filled, fill = os.pipe()
child = os.fork()
if child == 0:
    os.read(filled, 1)
    store.put("child", [b"2" * (2 << 20)])
    os._exit(0)

def after_the_child(fd, data):
    direct._write_all = write
    os.write(fill, b"1")
    os.waitpid(child, 0)
    write(fd, data)

direct._write_all = after_the_child
store.put("parent", [b"3" * (2 << 20)])
"""


def test_a_forked_process_does_not_write_into_its_parents_buffer(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _FORKED, str(tmp_path)], check=True)
    assert {name: set((tmp_path / name).read_bytes()) for name in ("child", "parent")} == {
        "child": {ord("2")},
        "parent": {ord("3")},
    }
