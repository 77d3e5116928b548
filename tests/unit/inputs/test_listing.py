"""Files of folders and globs: each is read, refused or left out by a documented rule."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.implementations.zip import ZipFileSystem
from fsspec.utils import glob_translate

from hsx_dist.config import InputConfig, absolute_path
from hsx_dist.errors import ConfigError
from hsx_dist.inputs import folder_limits, listing, sources
from hsx_dist.inputs.file_systems import name_of
from hsx_dist.inputs.listing import find_input
from hsx_dist.inputs.rows import Row
from tests.unit.growth import check_linear
from tests.unit.inputs.test_sources import keys, lines, read, saved, table


class _Denied(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Refuses to list folders named ``secret``, as a server refuses a prefix that a policy excludes."""

    error: type[OSError] = PermissionError

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        if path.endswith("/secret"):
            raise self.error(path)
        return super().ls(path, detail=detail, **kwargs)


@pytest.mark.parametrize("error", [PermissionError, TimeoutError, ConnectionError, FileNotFoundError])
@pytest.mark.parametrize("pattern", ["", "**", "**/*.jsonl", "*/*.jsonl", "[as]*/x.jsonl"])
def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, error: type[OSError]
) -> None:
    """fsspec's find, glob and walk omit such a folder silently."""
    monkeypatch.setattr(sources, "RegularFiles", _Denied)
    monkeypatch.setattr(_Denied, "error", error)
    for name in ("a", "secret"):
        lines(tmp_path / name / "x.jsonl", name)
    with pytest.raises(ConfigError, match=r"expected a readable input at .*secret, got"):
        read(tmp_path / pattern)
    # A folder that the glob cannot match is not listed.
    assert keys(tmp_path / "[ab]*" / "*.jsonl") == ["a/x:00000000"]


def test_a_link_to_a_folder_is_refused_and_one_to_a_file_is_read(tmp_path: Path) -> None:
    lines(tmp_path / "other" / "y.jsonl", "y")
    lines(tmp_path / "in" / "x.jsonl", "x")
    (tmp_path / "in" / "z.jsonl").symlink_to(tmp_path / "other" / "y.jsonl")
    assert keys(tmp_path / "in") == ["x:00000000", "z:00000000"]
    (tmp_path / "in" / "more").symlink_to(tmp_path / "other")
    for pattern in ("", "**", "**/*.jsonl", "*", "*/*.jsonl"):
        with pytest.raises(ConfigError, match=r"got .*in/more, a link to a folder"):
            read(tmp_path / "in" / pattern)
    assert keys(tmp_path / "in" / "*.jsonl") == ["x:00000000", "z:00000000"]
    assert keys(tmp_path / "in" / "more") == ["y:00000000"]  # a path that the user names
    (tmp_path / "in" / "more").unlink()
    (tmp_path / "in" / "more").symlink_to(tmp_path / "not mounted")
    with pytest.raises(ConfigError, match=r"at .*in/more, got no such file"):
        read(tmp_path / "in")


@pytest.mark.parametrize(("name", "other"), [("run[1]", "run1"), ("run?", "run1"), ("r**n", "run"), ("[!a]*", "x")])
def test_the_name_of_a_folder_that_exists_is_no_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, other: str
) -> None:
    """Otherwise a relative path reads the rows of another folder."""
    lines(tmp_path / name / "in" / "own.jsonl", "own")
    lines(tmp_path / other / "in" / "other.jsonl", "other")
    monkeypatch.chdir(tmp_path / name)
    monkeypatch.setenv("HOME", str(tmp_path / name))
    for path in ("in/*.jsonl", "./i[n]/*.jsonl", "**/*.jsonl", "~/in/*.jsonl", f"{tmp_path}/{name}/in/*.jsonl"):
        for resolved in (path, absolute_path(path, Path.cwd())):
            assert [row.text for row in read(resolved)] == ["own"]  # type: ignore[union-attr]
    for path in ("in/other.jsonl", "in/oth*", "~/in/other.jsonl"):
        with pytest.raises(ConfigError, match=r"got no such file|got none"):
            read(path)
    monkeypatch.chdir(tmp_path)
    assert [row.text for row in read(f"{name}/in/*.jsonl")] == ["own"]  # type: ignore[union-attr]


def test_a_folder_whose_name_is_a_pattern_is_read_from_a_zip_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a[1].zip", "w") as archive:
        for name in ("run[1]/own.jsonl", "run1/other.jsonl"):
            archive.writestr(name, '{"text": "a"}\n')
    assert keys(f"zip://run[1]/*.jsonl::{tmp_path}/a[1].zip") == ["own:00000000"]
    with pytest.raises(ConfigError, match="got no such file"):
        read(f"zip://missing.jsonl::{tmp_path}/a[1].zip")


def test_an_unknown_compression_in_a_folder_is_refused(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", "a")
    (tmp_path / "b.jsonl.lz4").write_bytes(b"rows")
    with pytest.raises(ConfigError, match=r"got \.lz4"):
        read(tmp_path)


class _Caching(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Keeps listings in the process, as s3fs does."""

    kept: ClassVar[dict[str, Any]] = {}

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        if path not in self.kept:
            self.kept[path] = super().ls(path, detail=detail, **kwargs)
        return self.kept[path]

    def invalidate_cache(self, path: str | None = None) -> None:  # noqa: ARG002
        self.kept.clear()


def test_a_folder_is_listed_again_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second extraction in one process must find new files."""
    monkeypatch.setattr(sources, "RegularFiles", _Caching)
    lines(tmp_path / "one.jsonl", "a")
    assert keys(tmp_path) == ["one:00000000"]
    lines(tmp_path / "two.jsonl", "a")
    assert keys(tmp_path) == ["one:00000000", "two:00000000"]


@pytest.mark.parametrize("ending", ["lz4", "br", "7z", "Z"])
def test_other_compressions_in_a_folder_are_refused(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"b.jsonl.{ending}").write_bytes(b"rows")
    with pytest.raises(ConfigError, match=rf"got \.{ending.lower()}"):
        read(tmp_path)


@pytest.mark.parametrize("ending", ["gzip", "lzo", "zlib", "bz", "gpg", "gz.part", "1", "incomplete", "new.gz", "csv"])
def test_a_file_that_may_have_rows_is_not_left_out(tmp_path: Path, ending: str) -> None:
    lines(tmp_path / "a.jsonl", "a")
    for name in (f"b.txt.{ending}", f"more/b.Parquet.{ending.upper()}"):
        path = lines(tmp_path / name, "a")
        for place in (tmp_path, f"{tmp_path}/**"):
            with pytest.raises(ConfigError, match=rf"compressed as .*, got '{name}'\. Extract, rename"):
                read(place)
        assert keys(tmp_path / "*.jsonl") == ["a:00000000"]
        path.unlink()


@pytest.mark.parametrize(
    "name",
    [
        "b.jsonl-00000-of-00002", "b.jsonl_1", "b.jsonl2", "b.jsonl (1)", "b.jsonl?part=1", "b.jsonl#x.bin",
        "B.JSON-1.gz", "b.jsonl.part.0", "b.jsonl.gz.part.1", "b.jsonl.part-00000.gz", "b.jsonl.tmp.1", "b.jsonl.0.bin",
        "b.jsonl/part-00000", "b.jsonl/part-00000.gz", "b.zip", "b.tar.gz", "b.TGZ", "b.tar", "b.7z",
    ],
)  # fmt: skip
def test_a_file_that_may_have_rows_is_refused_by_its_whole_name(tmp_path: Path, name: str) -> None:
    lines(tmp_path / "a.jsonl", "a")
    lines(tmp_path / name, "a")
    with pytest.raises(ConfigError, match=rf"expected files of rows.*, got '{re.escape(name)}'\. Extract, rename"):
        read(tmp_path)
    assert keys(tmp_path / "a*") == ["a:00000000"]


def test_a_file_with_an_unknown_ending_is_read_if_the_user_chooses_it(tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl.1", "a")
    assert keys(tmp_path / "b.jsonl.1") == ["b.jsonl.1:00000000"]
    assert keys(tmp_path / "b*", format="jsonl") == ["b.jsonl:00000000"]


def test_shards_that_differ_only_in_their_last_ending_are_refused(tmp_path: Path) -> None:
    for i in range(2):
        lines(tmp_path / f"b.jsonl-0000{i}-of-00002", "a")
    with pytest.raises(ConfigError, match=r"got several 'b' at .* or rename some \(rows-1\.jsonl\)"):
        read(tmp_path, format="jsonl")
    for path in tmp_path.iterdir():
        path.rename(tmp_path / (path.name.replace(".jsonl", "") + ".jsonl"))
    assert keys(tmp_path) == ["b-00000-of-00002:00000000", "b-00001-of-00002:00000000"]


def test_a_file_that_accompanies_rows_is_left_out(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", "a")
    names = [
        "jsonl.md5",
        "jsonl.SHA256",
        "jsonl.gz.crc",
        "jsonl.idx",
        "jsonl.lock",
        "jsonl.bak",
        "jsonl.orig",
        "jsonl.tmp",
        "jsonl.part.0.md5sum",
        "jsonl.sig.asc",
        "jsonl-0001.bak",
        "zip.md5",
        "jsonlist",
        "jsonl.bak.gz",
        "jsonl:Zone.Identifier",
        "jsonl_$folder$",
    ]
    for ending in [*names, "jsonl~", "jsonl.~1~", "jsonl.gz~", "csv", "csv.gzip"]:
        lines(tmp_path / f"a.{ending}", "a")
    assert keys(tmp_path) == ["a:00000000"]


@pytest.mark.parametrize("form", ["jsonl", "text"])
def test_a_file_that_accompanies_rows_is_left_out_if_the_user_chooses_a_format(tmp_path: Path, form: Any) -> None:
    lines(tmp_path / "a.jsonl", "a")
    for ending in (
        "jsonl.bak",
        "jsonl.md5",
        "jsonl.gz.sha256",
        "jsonl~",
        "parquet.crc",
        "jsonl.1.orig",
        "jsonl.old.gz",
    ):
        lines(tmp_path / f"a.{ending}", "a")
    assert keys(tmp_path, format=form) == ["a:00000000"]
    assert keys(tmp_path / "a*", format=form) == ["a:00000000"]
    for name in ("x.txt/b.log", "c.log", "d.jsonl.1"):
        lines(tmp_path / name, "a")
    assert len(keys(tmp_path, format=form)) == 4


@pytest.mark.parametrize("name", ["rows.txt", "rows.json", "rows.arrow", "rows.parquet", "rows.jsonl.bak", "rows"])
@pytest.mark.usefixtures("in_process")
def test_the_chosen_format_of_one_file_holds(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / name)
    found = read(tmp_path / name, format="parquet")
    assert [getattr(row, "text", None) for row in found] == ["a", "b"]
    lines(tmp_path / name, "a", "b")
    assert [getattr(row, "text", None) for row in read(tmp_path / name, format="jsonl")] == ["a", "b"]


@pytest.mark.usefixtures("in_process")
def test_a_missing_member_of_a_zip_file_whose_name_looks_like_a_glob_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x[1].zip", "w") as archive:
        archive.writestr("rows.jsonl", '{"text": "a"}\n')
    for member in ("rows.jsonl", "*.jsonl", "row?.jsonl"):
        assert keys(f"zip://{member}::{tmp_path}/x[1].zip") == ["rows:00000000"]
    with pytest.raises(ConfigError, match="got no such file or bucket"):
        read(f"zip://row.jsonl::{tmp_path}/x[1].zip")


def test_a_relative_glob_is_searched_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run[1]`` as a glob is ``run1``."""
    lines(tmp_path / "run1" / "a.jsonl", "of another run")
    lines(tmp_path / "run[1]" / "in" / "b.jsonl", "b")
    monkeypatch.chdir(tmp_path / "run[1]")
    monkeypatch.setenv("HOME", str(tmp_path / "run[1]"))
    for path in ("in/*.jsonl", "./in/*.jsonl", "**/*.jsonl", "~/in/*.jsonl", "*/[b].jsonl"):
        assert [row.text for row in read(path) if isinstance(row, Row)] == ["b"], path
    for path in ("*.jsonl", "~/*.jsonl"):
        with pytest.raises(ConfigError, match="expected files of rows"):
            read(path)
    with pytest.raises(ConfigError, match="got no such file or bucket"):
        read("a.jsonl")


def test_every_compression_that_is_read_is_read_in_a_folder(tmp_path: Path) -> None:
    packed = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}
    packed["lzma"] = partial(lzma.compress, format=lzma.FORMAT_ALONE)
    for ending, compress in packed.items():
        (tmp_path / f"{ending}.jsonl.{ending}").write_bytes(compress(b'{"text": "a"}\n'))
    assert keys(tmp_path) == sorted(f"{ending}:00000000" for ending in packed)


def test_a_folder_that_a_glob_matches_is_a_saved_data_set_or_refused(tmp_path: Path) -> None:
    """Spark writes folders with names such as rows.parquet."""
    lines(tmp_path / "a.jsonl", "a")
    lines(tmp_path / "b.jsonl" / "part-0.jsonl", "b")
    for pattern in ("*.jsonl", "*"):
        with pytest.raises(ConfigError, match=r"got the folder .*/b\.jsonl\. Use a glob for its files"):
            read(tmp_path / pattern)
    both = ["a:00000000", "b.jsonl/part-0:00000000"]
    assert keys(tmp_path) == keys(tmp_path / "**") == both
    assert keys(tmp_path / "a*") == both[:1]


def test_a_split_of_an_input_without_splits_is_refused(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", "a")
    for path in (tmp_path, tmp_path / "train.jsonl", tmp_path / "*"):
        with pytest.raises(ConfigError, match=r"input\.split: expected the folder of a saved data set"):
            read(path, split="train")


def test_the_list_of_splits_is_not_looked_for_by_a_call_that_hides_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``exists`` of fsspec is false after any error. All splits would be read, instead of one."""
    for split in ("train", "test"):
        saved(tmp_path / "d" / split, table(split))
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    monkeypatch.setattr(LocalFileSystem, "exists", lambda *_, **__: False)
    assert keys(tmp_path / "d", split="test") == ["test:00000000"]
    assert keys(tmp_path / "d") == ["train:00000000", "test:00000000"]
    assert keys(tmp_path / "d" / "t*") == ["test:00000000", "train:00000000"]


def test_a_saved_data_set_with_a_table_of_indices_is_refused(tmp_path: Path) -> None:
    """Old versions of ``datasets`` saved a selection as indices of rows, next to all rows."""
    state = saved(tmp_path / "d", table("a", "b")) / "state.json"
    found = json.loads(state.read_text())
    state.write_text(json.dumps({**found, "_indices_data_files": []}))
    assert len(keys(tmp_path / "d")) == 2
    state.write_text(json.dumps({**found, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(ConfigError, match="got a table of indices"):
        read(tmp_path / "d")


@pytest.mark.parametrize(
    "folders",
    [
        {"b/in": [{"name": "b/in/", "type": "directory", "StorageClass": "DIRECTORY"}]},  # the key in//x.jsonl
        {"b/in": [{"name": "b/in/x.jsonl", "type": t} for t in ("file", "directory")], "b/in/x.jsonl": []},
    ],
)
def test_keys_of_a_bucket_that_a_listing_hides_are_an_error(folders: dict[str, list[dict[str, Any]]]) -> None:
    """s3fs cannot list the keys below ``in//``. A key may also be equal to the name of a folder."""
    fs = SimpleNamespace(ls=lambda path, **_: folders[path], invalidate_cache=lambda: None)
    with pytest.raises(ConfigError, match="with and without a slash at the end"):
        listing._listed(fs, "b/in", "**")
    marker = [{"name": "b/in/", "type": "file", "StorageClass": "STANDARD"}, {"name": "b/in/x.jsonl", "type": "file"}]
    assert listing._listed(SimpleNamespace(**{**vars(fs), "ls": lambda *_, **__: marker}), "b/in", "**") == {
        "b/in/x.jsonl": "file"
    }


def test_a_saved_data_set_below_a_folder_is_refused(tmp_path: Path) -> None:
    """``datasets`` writes caches next to the rows. They are Arrow files, too."""
    folder = saved(tmp_path / "d" / "one", table("a"))
    (folder / "cache-1.arrow").write_bytes(next(folder.glob("data-*.arrow")).read_bytes())
    with pytest.raises(ConfigError, match=r"got a saved data set with .*one/state\.json"):
        read(tmp_path / "d")
    assert keys(tmp_path / "d" / "*") == ["one:00000000"]


def _zipped(folder: Path, *, folders: bool) -> str:
    """Write a folder's files into a zip file, and its folders if ``folders``. Return the file's path."""
    path = f"{folder}.zip"
    with zipfile.ZipFile(path, "w") as file:
        for found in sorted(folder.rglob("*")):
            if folders or found.is_file():
                file.write(found, found.relative_to(folder))
    return path


@pytest.mark.parametrize("folders", [True, False])
@pytest.mark.usefixtures("in_process")
def test_a_zip_file_is_listed_as_its_folder(tmp_path: Path, folders: bool) -> None:
    for name in ("b", "c:d@e", "c:d@f", "a/x", "a/c/y", "a-d/z", "a/_tmp/n"):
        lines(tmp_path / "in" / f"{name}.jsonl", name)
    (tmp_path / "in" / "empty").mkdir()
    saved(tmp_path / "sets" / "one", table("a"))
    saved(tmp_path / "sets" / "two", table("b", "c"))
    path, sets = (_zipped(tmp_path / name, folders=folders) for name in ("in", "sets"))
    for pattern in ("", "**", "**/*.jsonl", "*.jsonl", "*/*.jsonl", "a/**", "a", "a/", "[ab]*/*/*.jsonl"):
        assert keys(f"zip://{pattern}::{path}") == keys(f"{tmp_path}/in/{pattern}"), pattern
    assert (
        keys(f"zip://*::{sets}")
        == keys(tmp_path / "sets" / "*")
        == [f"{k}:{0:08}" for k in ("one", "two")] + ["two:00000001"]
    )
    with pytest.raises(ConfigError, match="got no such file"):
        read(f"zip://other/*.jsonl::{path}")
    with pytest.raises(ConfigError, match="got the folder a"):
        read(f"zip://*::{path}")
    for pattern in ("**.jsonl", "a**", "a**/*.jsonl"):
        for url in (f"zip://{pattern}::{path}", f"{tmp_path}/in/{pattern}"):
            with pytest.raises(ConfigError, match=r"expected \*\* as a whole name"):
                read(url)


def test_a_member_whose_name_looks_like_an_address_is_decompressed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
        file.writestr("10:30@host.txt.gz", gzip.compress(b"a\nb\n"))
    assert [row.text for row in read(f"zip://*::{tmp_path}/in.zip")] == ["a", "b"]


@pytest.mark.parametrize("more", [[], ["in/"]])
def test_a_file_and_a_folder_of_one_name_in_a_zip_file_are_not_confused(tmp_path: Path, more: list[str]) -> None:
    """fsspec returns only one of them."""
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
        for name in ("a/in", *(f"a/{name}" for name in more), "a/in/0.jsonl"):
            file.writestr(name, "" if name.endswith("/") else '{"text": "a"}\n')
    with pytest.raises(ConfigError, match="expected a file or a folder, got both with the name 'a/in'"):
        read(f"zip://a/in::{tmp_path}/in.zip")
    assert keys(f"zip://a/in/::{tmp_path}/in.zip") == ["0:00000000"]
    assert keys(f"zip://a/in/0.jsonl::{tmp_path}/in.zip") == ["0:00000000"]


@pytest.mark.parametrize("name", ["./b.jsonl", "a/./b.jsonl", "a/../b.jsonl"])
def test_a_member_whose_path_has_a_step_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    """Its rows would be missing: a name that begins with "." is hidden."""
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
        file.writestr("a.jsonl", '{"text": "a"}')
        file.writestr(name, '{"text": "b"}')
    with pytest.raises(ConfigError, match=f"got the member '{re.escape(name)}'"):
        read(f"zip://**::{tmp_path}/in.zip")


def test_a_member_with_such_a_step_refuses_only_listings_that_meet_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
        for name in ("./", "a/", "a/./", "a/a.txt", "b/./README", "./README"):
            file.writestr(name, "" if name.endswith("/") else "a\n")
    assert len(read(f"zip://a/a.txt::{tmp_path}/in.zip")) == 1
    assert len(read(f"zip://a/*.txt::{tmp_path}/in.zip")) == 1
    for pattern in ("b/*", "*/*.txt", "*.txt"):
        with pytest.raises(ConfigError, match=r"README'\. Write the zip file without such steps, or name one member"):
            read(f"zip://{pattern}::{tmp_path}/in.zip")


@pytest.mark.parametrize("path", ["", "d/", "d", "d/**", "**/*.jsonl", "d/b.jsonl", "/d/a.jsonl", "/d/b.jsonl"])
def test_a_member_whose_name_begins_with_a_slash_is_refused(tmp_path: Path, path: str) -> None:
    """fsspec opens ``d/b.jsonl`` for ``/d/b.jsonl``. A listing of ``d`` would leave it out."""
    for name in ("/d/a.jsonl", "/d/b.jsonl", "//d/a.jsonl"):
        with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
            file.writestr(name, '{"text": "a"}')
            file.writestr("d/b.jsonl", '{"text": "b"}')
        with pytest.raises(ConfigError, match=rf"got the member '{name}'\. Write the zip file without such steps$"):
            find_input(InputConfig(path=f"zip://{path}::{tmp_path}/in.zip"))


def test_a_folder_whose_name_begins_with_a_slash_has_no_rows(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
        for name in ("/", "/d/", "d/b.jsonl"):
            file.writestr(name, "" if name.endswith("/") else '{"text": "b"}')
    for path in ("", "d/", "**/*.jsonl"):
        assert len(find_input(InputConfig(path=f"zip://{path}::{tmp_path}/in.zip")).sources) == 1


@pytest.mark.parametrize("link", ["zip://", "zip::"])
@pytest.mark.parametrize("pattern", ["", "**/*.jsonl"])
@pytest.mark.usefixtures("in_process")
def test_a_member_that_fsspec_opens_by_another_name_is_refused(tmp_path: Path, pattern: str, link: str) -> None:
    """fsspec opens ``a.jsonl`` for ``zip://a.jsonl``. Its rows would be read twice, and others not."""
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
        file.writestr("a.jsonl", '{"text": "a"}')
        file.writestr(f"{link}a.jsonl", '{"text": "b"}')
    with pytest.raises(ConfigError, match=rf"got the member '{link}a\.jsonl'"):
        read(f"zip://{pattern}::{tmp_path}/in.zip")


_LIVE = "got a table of {} with .* in .*Export the table's live rows to Parquet"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("_delta_log/00000000000000000000.json", _LIVE.format("Delta Lake")),
        (".hoodie/hoodie.properties", _LIVE.format("Hudi")),
        ("_spark_metadata/0", _LIVE.format("Spark's streaming")),
        ("metadata/v3.metadata.json", _LIVE.format("Iceberg")),
        ("metadata/00002-5c9f.metadata.json", _LIVE.format("Iceberg")),
        ("metadata/00002-5c9f.gz.metadata.json", _LIVE.format("Iceberg")),
        ("_temporary/0/task_0/part-0.parquet", "expected a folder whose writer has ended, got _temporary in"),
    ],
)
@pytest.mark.parametrize("form", ["auto", "jsonl"])
@pytest.mark.parametrize("archive", [False, True])
def test_a_table_with_rows_that_are_not_live_is_refused(
    tmp_path: Path, name: str, error: str, form: Any, archive: bool
) -> None:
    """Its log says which files have live rows. Deleted and replaced rows are in its other files."""
    folder = tmp_path / "in"
    for file in (folder / "t" / name, folder / "t" / "data" / "a.jsonl", folder / "b.jsonl"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"text": "a"}\n')
    place = f"zip://{{}}::{_zipped(folder, folders=False)}" if archive else f"{folder}/{{}}"
    for refused in ("", "**/*.jsonl", "t/*/*", "t/"):
        with pytest.raises(ConfigError, match=error):
            find_input(InputConfig(path=place.format(refused), format=form))
    for path in ("*.jsonl", "t/data/*", "t/data/a.jsonl"):
        assert len(find_input(InputConfig(path=place.format(path), format=form)).sources) == 1


def test_names_like_those_of_tables_are_read(tmp_path: Path) -> None:
    for name in ("rows.metadata.json", "metadata/rows.metadata.json", "v1.metadata.json", "metadata/v1.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    assert len(find_input(InputConfig(path=str(tmp_path))).sources) == 4


@pytest.mark.usefixtures("in_process")
def test_a_folder_with_bytes_in_a_zip_file_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
        file.writestr("a.jsonl", '{"text": "a"}')
        file.writestr("d/x.jsonl/", '{"text": "b"}')
    with pytest.raises(ConfigError, match=r"got the folder 'd/x\.jsonl/' of 13 bytes"):
        read(f"zip://::{tmp_path}/in.zip")


def test_the_version_of_an_object_is_no_part_of_its_ending_or_key() -> None:
    s3, web = (fsspec.filesystem(scheme, skip_instance_cache=True) for scheme in ("s3", "https"))
    assert name_of(s3, "s3://b/10:30@rows.jsonl.gz?versionId=v1") == "s3://b/10:30@rows.jsonl.gz"
    assert name_of(web, "https://h/rows.jsonl.gz?versionId=v1") == "https://h/rows.jsonl.gz"
    for fs in (LocalFileSystem(), s3):
        for path in ("b/rows?versionId=1.jsonl", "b/https://u:v@h/rows?page=1.jsonl"):
            assert name_of(fs, path) == path


@pytest.mark.parametrize("begin", ["https://", "s3://", "in/https://", "a::https://"])
@pytest.mark.parametrize("name", ["e.com/rows?page=1", "e.com/rows#1", "k:v@b/rows", "b/rows?versionId=1", "b/r;s=1"])
@pytest.mark.usefixtures("in_process")
def test_a_member_whose_name_looks_like_a_url_is_read(tmp_path: Path, begin: str, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
        file.writestr(f"{begin}{name}.jsonl", '{"text": "a"}')
        file.writestr(f"{begin}{name}2.txt.gz", gzip.compress(b"b\n"))
        file.writestr(f"{begin}other.jsonl", '{"text": "c"}')
    found = {row.key: row.text for row in read(f"zip://::{tmp_path}/in.zip")}
    assert sorted(found.values()) == ["a", "b", "c"]


def test_a_name_that_looks_like_a_version_keeps_its_ending(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", "a")
    lines(tmp_path / "b?versionId=2.jsonl", "b")
    assert [row.text for row in read(str(tmp_path))] == ["a", "b"]
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as file:
        file.writestr("c?versionId=2.txt.gz", gzip.compress(b"c"))
    assert [row.text for row in read(f"zip://*::{tmp_path}/in.zip")] == ["c"]


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*", ""])
@pytest.mark.usefixtures("in_process")
def test_the_members_of_a_zip_file_are_not_listed_for_each_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """fsspec goes over all members at each call. Some thousand folders would take minutes."""
    listed = []
    of_fsspec, of_zip = ZipFileSystem.ls, zipfile.ZipFile.infolist
    monkeypatch.setattr(ZipFileSystem, "ls", lambda *args, **kwargs: listed.append(0) or of_fsspec(*args, **kwargs))
    monkeypatch.setattr(zipfile.ZipFile, "infolist", lambda file: listed.append(0) or of_zip(file))
    for i in range(20):
        if pattern == "*":
            saved(tmp_path / "in" / f"{i:02}", table("a"))
        else:
            lines(tmp_path / "in" / f"{i:02}" / "x.jsonl", "a")
    assert len(keys(f"zip://{pattern}::{_zipped(tmp_path / 'in', folders=True)}")) == 20
    assert len(listed) <= 2


@pytest.mark.usefixtures("in_process")
def test_a_zip_file_with_few_members_has_few_folders(tmp_path: Path) -> None:
    """Each folder takes as much memory as a member: a directory of 1 MiB could name 470,000 folders."""

    def path(folders: int, members: int) -> str:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
            for i in range(members):
                file.writestr(f"{i}/" + "a/" * (folders - 1) + "x.jsonl", '{"text": "a"}')
        return f"zip://**::{tmp_path}/a.zip"

    with pytest.raises(
        ConfigError, match="at most 1000 folders and 3 more for each of 5 files in a zip file, got more"
    ):
        read(path(250, 5))
    assert len(keys(path(250, 4))) == 4
    assert len(keys(path(3, 500))) == 500


def test_names_in_a_bucket_claim_few_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder costs a request: an S3 key of 1 KB could name 500 folders."""
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(folder_limits, "_LISTED", 1000)
    fs = MemoryFileSystem()

    def found(folders: int, files: int, name: str = "x.jsonl") -> int:
        names = [f"/in/{i}/" + "a/" * (folders - 1) + name for i in range(files)]
        monkeypatch.setattr(MemoryFileSystem, "store", dict.fromkeys(names, MemoryFile(fs, "")))
        return sum(kind == "file" for kind in listing._listed(fs, "/in", "**").values())

    message = "at most 1000 folders and 10 more for each of 4 files in /in, got more. Name a folder with fewer"
    for name in ("x.jsonl", "_SUCCESS"):
        with pytest.raises(ConfigError, match=message):
            found(250, 5, name)
    with pytest.raises(ConfigError, match="paths of at most 255 folders and 4096 characters in /in, got 256 folders"):
        found(300, 1)
    assert found(250, 4) == 4
    assert found(255, 1) == 1
    assert found(3, 400) == 400
    assert found(3, 400, "_SUCCESS") == 0


def test_folders_without_files_on_a_local_disk_are_read(tmp_path: Path) -> None:
    for i in range(1200):
        (tmp_path / f"{i:04}").mkdir()
    lines(tmp_path / "0000" / "x.jsonl", "a")
    for path in (tmp_path, tmp_path / "*" / "*.jsonl", f"file://{tmp_path}"):
        assert len(listing.find_input(InputConfig(path=str(path))).sources) == 1


def test_globs_match_as_those_of_fsspec() -> None:
    random = Random(0)

    def text(letters: str, most: int) -> str:
        return "/".join(
            "".join(random.choices(letters, k=random.randint(1, most))) for _ in range(random.randint(1, 4))
        )

    matched = 0
    for _ in range(2000):
        # fsspec's [!a] matches a slash, too. Names in a folder have none.
        steps = re.sub(r"\*\*+", "*", text("ab-.*?[]", 5)).split("/")
        steps = [random.choice((step, step, "*", "**")) for step in steps]
        of_fsspec = re.compile(glob_translate("/".join(steps))).match
        tests = listing._tests(steps)
        for name in (text("ab-.[", 3) for _ in range(20)):
            matched += (match := of_fsspec(name) is not None)
            assert listing._is_match(tests, name) == match, (steps, name)
    assert matched > 2000


@pytest.mark.parametrize("pattern", ["*-*-*-*-*.jsonl", "*[-]*?*-*-*.jsonl", "**/-/**/-/**/-/**/x"])
def test_a_glob_takes_time_in_proportion_to_a_name(pattern: str) -> None:
    def make(n: int) -> Callable[[], object]:
        name = ("-/" if "/" in pattern else "-") * n
        return lambda: listing._is_match(listing._tests(pattern.split("/")), f"b{name}z")

    check_linear(make, 40)


@pytest.mark.usefixtures("in_process")
def test_no_member_of_a_zip_file_is_left_out_because_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    for names, expected in {
        ("a//x.jsonl", "a//b/y.jsonl"): ["a//b/y:00000000", "a//x:00000000"],
        ("x.jsonl", "x.jsonl/y.jsonl"): "two keys x.jsonl",
    }.items():
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, '{"text": "a"}\n')
        if isinstance(expected, list):
            assert keys(f"zip://::{path}") == expected
        else:
            with pytest.raises(ConfigError, match=expected):
                read(f"zip://::{path}")
