"""Folders for unfinished files, next to a neighbour who may rename and replace every name in the parent folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.store import unfinished_folder as module
from hsx_dist.store.folders import opened
from hsx_dist.store.unfinished_folder import remove_unfinished_folders, unfinished_folder
from tests.harness.users import OTHER, as_root

KEY = "0" * 32


def test_a_replaced_name_redirects_no_write_and_no_delete(tmp_path: Path) -> None:
    victim, parent = tmp_path / "victim", tmp_path / "shared"
    victim.mkdir()
    parent.mkdir()
    (victim / "thesis").write_text("precious")
    with opened(parent) as folder, unfinished_folder(folder, ".new-") as new:
        [made] = parent.iterdir()
        made.rename(parent / "aside")
        made.symlink_to(victim)
        (new.path / "thesis").write_text("of the export")
        new.complete("thesis")
        new.move("thesis", folder, "moved")
        (new.path / "left").write_text("unfinished")
    assert (victim / "thesis").read_text() == "precious"
    assert (parent / "moved").read_text() == "of the export"
    assert [path.name for path in victim.iterdir()] == ["thesis"]
    assert not list((parent / "aside").iterdir())


@pytest.mark.parametrize("kind", ["writable", pytest.param("of another user", marks=as_root)])
def test_a_folder_that_a_neighbour_can_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mkdir = os.mkdir

    def replaced(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if kind == "writable":
            (tmp_path / name).chmod(0o770)
        else:
            os.chown(tmp_path / name, OTHER, OTHER)

    monkeypatch.setattr(module.os, "mkdir", replaced)
    with (
        opened(tmp_path) as folder,
        pytest.raises(PermissionError, match="another user replaced"),
        unfinished_folder(folder, ".new-"),
    ):
        pytest.fail("the folder was used")


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_mount_that_gives_all_files_one_mode_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    """As a mount of gcsfuse with ``--dir-mode=777``, which gives files the mode 0644."""
    mkdir = os.mkdir

    def one_mode(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(name, dir_fd=dir_fd)
        os.chmod(name, 0o777, dir_fd=dir_fd)

    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(module.os, "mkdir", one_mode)
    monkeypatch.setattr(module.os, "fchmod", refused)
    before = os.umask(umask)
    try:
        with opened(tmp_path) as folder, unfinished_folder(folder, ".new-") as new:
            (new.path / "file").touch()
            new.complete("file")
            new.move("file", folder, "file")
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_complete_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with opened(tmp_path) as folder, unfinished_folder(folder, ".new-") as new:
            (new.path / "file").touch(0o600)
            new.complete("file")
            new.move("file", folder, "file")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_a_regular_file_is_complete(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path) as folder, unfinished_folder(folder, ".new-") as new:
        path = new.path / "name"
        if kind == "link":
            path.symlink_to("/etc/passwd")
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
        with pytest.raises(OSError, match=r"Too many levels|not a regular file"):
            new.complete("name")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["killed", "own", "writable", "link", "file"])
def test_only_folders_of_killed_processes_are_removed(tmp_path: Path, kind: str) -> None:
    """A neighbour may give another folder of this user the name of an unfinished one, or put it into such a folder."""
    left, victim = tmp_path / f".new-{KEY}", tmp_path / "victim"
    (victim / KEY).mkdir(parents=True)
    (victim / KEY / "file").touch()
    if kind == "link":
        left.symlink_to(victim)
    elif kind == "file":
        left.touch()
    else:
        left.mkdir(0o700)
        content = left / ("thesis" if kind == "own" else KEY)
        content.mkdir()
        (content / "file").touch()
        if kind == "writable":
            left.chmod(0o770)
    with opened(tmp_path) as folder:
        remove_unfinished_folders(folder, ".new-")
    assert left.exists() == (kind != "killed")
    assert kind not in ("own", "writable") or (content / "file").exists()
    assert (victim / KEY / "file").exists()
