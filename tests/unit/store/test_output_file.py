"""Local output files, in a folder with links and FIFOs of another user."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hsx_dist.errors import ConfigError
from hsx_dist.jobs.kit import report_page
from hsx_dist.models import builtin
from hsx_dist.observe.dashboard import write_dashboards
from hsx_dist.reading.cache import CachedStore
from hsx_dist.store.folder_listing import UNFINISHED
from hsx_dist.store.local import LocalStore
from hsx_dist.store.output_file import output_file, regular_file, writable


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("there", ["nothing", "file", "link", "dangling", "fifo"])
def test_an_output_replaces_a_file_a_link_or_a_fifo(tmp_path: Path, there: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("precious")
    if there == "file":
        path.write_text("the report of yesterday, which is longer")
    elif there in ("link", "dangling"):
        path.symlink_to("victim" if there == "link" else "absent")
    elif there == "fifo":
        os.mkfifo(path)
    with output_file(path) as f:
        f.write(b"page")
        assert sum(name.startswith(UNFINISHED) for name in names(tmp_path)) == 1
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.read_text() == "page"
    assert victim.read_text() == "precious"
    assert names(tmp_path) == ["report.html", "victim"]


def test_an_output_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with output_file(tmp_path / "new"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_failed_output_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(TypeError, match="bytes-like"), output_file(path) as f:
        f.write("text")  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert names(tmp_path) == ["report.html"]


def test_devices_are_written_directly(tmp_path: Path) -> None:
    with output_file(Path("/dev/null")) as f:
        f.write(b"page")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    read, write = os.pipe()
    with output_file(Path(f"/dev/fd/{write}")) as f:
        f.write(b"page")
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"page"


@pytest.mark.parametrize("mode", ["rb", "a"])
@pytest.mark.parametrize("kind", ["file", "link", "fifo", "device"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str, mode: str) -> None:
    path = Path("/dev/null") if kind == "device" else tmp_path / "name"
    if kind == "file":
        path.touch()
    elif kind == "link":
        path.symlink_to("absent")
    elif kind == "fifo":
        os.mkfifo(path)
    with nullcontext() if kind == "file" else pytest.raises(OSError, match=str(path)):
        open(path, mode, opener=regular_file).close()


@pytest.mark.parametrize("library", ["torch", "safetensors"])
def test_a_full_disk_is_the_users_error_in_every_librarys_words(tmp_path: Path, library: str) -> None:
    tensors = {"x": torch.zeros(10_000)}

    def write() -> None:
        with writable(tmp_path, "folder"):
            if library == "safetensors":
                save_file(tensors, tmp_path / "x")
                return
            with (tmp_path / "x").open("wb") as f:
                torch.save(tensors, f)

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, usual[1]))
    try:
        with pytest.raises(ConfigError, match=f"{tmp_path}: .*got: File too large. Free"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_librarys_own_error_is_not_one_of_the_disk() -> None:
    with pytest.raises(OSError, match="the hub is offline"), writable("x", "folder"):
        raise OSError("the hub is offline")


WRITERS: dict[str, Callable[[Path], Any]] = {
    "dashboards": write_dashboards,
    "report of engines": lambda folder: report_page.write(folder, {}, []),
    "cache": lambda folder: CachedStore(LocalStore(folder.parent.parent), folder, 1),
    "built-in model": builtin.smollm2,
    "page": lambda folder: output_file(folder / "report.html").__enter__(),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    parent = tmp_path / "file"
    parent.touch()
    with pytest.raises(ConfigError, match=f"{parent}/below.*: expected a f.* that can be written, got: Not a dir"):
        write(parent / "below")
