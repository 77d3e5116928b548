"""Local output files, in a folder with links and FIFOs of another user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hsx_dist.store.folder_listing import UNFINISHED
from hsx_dist.store.output_file import output_file


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
