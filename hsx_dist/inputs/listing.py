"""Finds the input's files: one file, or those of a folder, a glob or a saved data set."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import translate
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.zip import ZipFileSystem

from hsx_dist.config import HIDDEN, InputConfig, public_url
from hsx_dist.config.secrets import hide_secrets
from hsx_dist.errors import ConfigError
from hsx_dist.format.names import MAX_LABEL
from hsx_dist.inputs.bucket_folders import BucketFolders
from hsx_dist.inputs.file_systems import file_info, in_bucket, is_web, name_of
from hsx_dist.inputs.folder_limits import ZipFolders, check_listed, check_path
from hsx_dist.inputs.row_values import kind_of
from hsx_dist.inputs.sources import (
    ARCHIVES,
    COMPRESSED,
    LINES,
    Format,
    Input,
    InputSource,
    check_file,
    ending,
    file_system,
    with_config_errors,
)
from hsx_dist.inputs.web import check_web_file, no_web_file
from hsx_dist.text import head

#: Limit in bytes of a saved data set's list of its files.
_LARGEST_LIST = 4 << 20

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text", ".text": "text",
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip
#: Endings of files that accompany or back up a file of rows: ``rows.jsonl.md5``. Also Windows' marks of downloads
#: (``rows.jsonl:Zone.Identifier``), and Hadoop's marks of folders in a bucket (``rows.parquet_$folder$``).
_NO_ROWS = re.compile(
    r"\.((md5|sha\d+)(sum)?|b2|blake3|crc(32c?)?|sum|sig|asc|lock|idx|index|offsets|meta|metadata|schema|stats|info|dvc|license|"
    r"md|log|html|xml|ya?ml|toml|pdf|png|svg|py|bak|backup|old|orig|save|sw[op]|te?mp|identifier|.*~|.*_\$folder\$)",
    re.IGNORECASE,
)
#: An ending of ``_FORMATS`` anywhere in a path, as in Beam's ``rows.jsonl-00000-of-00002`` and Hadoop's
#: ``rows.jsonl/part-0``.
_MAY_HAVE_ROWS = re.compile(rf"({'|'.join(map(re.escape, _FORMATS))})(?![a-z])", re.IGNORECASE)
_REFUSED = re.compile(rf"({'|'.join(map(re.escape, ARCHIVES))})$", re.IGNORECASE)
_WILDCARD = re.compile(r"[*?\[]")
#: Files that Hugging Face's ``Dataset.save_to_disk`` and ``DatasetDict.save_to_disk`` write into their folders.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
#: Folders of tables whose log says which files have live rows, and of a write that has not ended.
_TABLES = {"_delta_log": "Delta Lake", ".hoodie": "Hudi", "_spark_metadata": "Spark's streaming"}
_UNFINISHED = "_temporary"
#: Iceberg's list of a table's files.
_ICEBERG = re.compile(r"(.*/)?metadata/(v\d+|\d{5,}-[^/]*)(\.gz)?\.metadata\.json(\.gz)?")


def find_input(config: InputConfig) -> Input:
    """Return the files of ``config.path``, ordered by name. Reads only names, and a saved data set's list of files.

    Raises:
        ConfigError: there are none, or they cannot be reached.
    """
    if not config.path:
        raise ConfigError("input.path: expected a file, a folder or a glob, a local path or URL, got nothing. Set it")
    shown = public_url(config.path)
    return with_config_errors(lambda: _find(config, shown), shown)


def _find(config: InputConfig, shown: str) -> Input:
    fs, path = file_system(config, shown)
    if is_web(fs) and hide_secrets(name_of(fs, path)) == HIDDEN:
        raise ConfigError(
            "input.path: expected a file whose name has no credential, got a URL whose path seems to have one, such as "
            "a token as its last step. Keys of rows begin with that name. Copy the file to a folder"
        )
    if isinstance(fs, ZipFileSystem):
        fs = ZipFolders(fs)
    elif in_bucket(fs):
        fs = BucketFolders(fs)
    fs.invalidate_cache()  # files may have grown or been added since an earlier call in this process
    try:
        # First without globbing: * and [ may be letters of a name, and ? begins the query of an http URL.
        if isinstance(fs, BucketFolders):
            info = fs.named(path, as_folder=config.path.endswith("/"))
        elif isinstance(fs, ZipFolders):
            info = fs.named(path, as_folder=config.path.partition("::")[0].endswith("/"))
        else:
            info = file_info(fs, path)
    except FileNotFoundError:
        if is_web(fs):
            # In an IPv6 address and a query, other characters of globs are usual.
            if "*" in shown:
                raise no_web_file(shown, "a glob") from None
            raise
        base, pattern = _glob(fs, path)
        if not pattern:
            raise
        _refuse_split(config)
        _check_pattern(pattern, shown)
        found = _listed(fs, base, pattern)
        if pattern.rpartition("/")[2] == "**":  # matches the files of the folders, too
            found = {name: kind for name, kind in found.items() if kind != "directory"}
        sources = _of_many(config, fs, found, base)
    else:
        if is_web(fs):
            check_web_file(info, shown)
        if info["type"] == "directory":
            sources = _of_folder(config, fs, path)
        elif config.format == "dataset":
            raise ConfigError(
                f"input.path: expected the folder of a saved data set, got the file {shown}. Name its folder, or "
                "another input.format"
            )
        else:
            _refuse_split(config)
            path = fs.with_scheme(path) if isinstance(fs, BucketFolders) else path
            name = name_of(fs, path)
            form = (_format(name, "auto") or "jsonl") if config.format == "auto" else config.format
            sources = [InputSource(stem(name), (path,), form)]
    if not sources:
        raise ConfigError(
            f"input.path: expected files of rows at {shown}, got none. Name them (jsonl, txt, parquet, arrow; or "
            "set input.format)"
        )
    # As in the keys of refused rows, where invalid bytes of a name are escaped.
    labels = Counter(s.label.encode("utf-8", "backslashreplace").decode() for s in sources)
    if (longest := max(map(len, labels))) > MAX_LABEL:
        raise ConfigError(
            f"input.path: expected file names of at most {MAX_LABEL} characters at {shown}, got one of {longest}. "
            "Rename the file"
        )
    if twice := sorted(label for label, count in labels.items() if count > 1):
        raise ConfigError(
            f"input.path: expected files of different names, got several {twice[0]!r} at {shown}, whose rows would "
            "have the same keys. Name one kind of them (a glob such as *.jsonl), or rename some (rows-1.jsonl)"
        )
    return Input(tuple(sources), shown, fs, config)


def _of_folder(config: InputConfig, fs: Any, folder: str) -> list[InputSource]:
    if config.format in ("auto", "dataset"):
        # Not by fs.exists: it is false after any error, and a wrong answer changes which rows are read.
        if _listed(fs, folder, _SPLITS):
            splits = _names(_json(fs, f"{folder}/{_SPLITS}", "splits")["splits"], folder)
            if config.split is not None and config.split not in splits:
                known = head(", ".join(splits), 400)
                raise ConfigError(f"input.split: expected one of {known}, got {config.split!r}. Choose one")
            wanted = splits if config.split is None else [config.split]
            paths = _within(fs, folder, wanted)
            return [_saved(fs, path, split) for path, split in zip(paths, wanted, strict=True)]
        _refuse_split(config)
        if _listed(fs, folder, _STATE):
            return [_saved(fs, folder, posixpath.basename(folder.rstrip("/")))]
        if config.format == "dataset":
            raise ConfigError(
                f"input.path: expected the folder of a saved data set, with {_STATE} or {_SPLITS}, got one without at "
                f"{public_url(config.path)}. Save it with save_to_disk, or set another input.format"
            )
    _refuse_split(config)
    found = _listed(fs, folder, "**")
    below = next((p for p in found if config.format == "auto" and posixpath.basename(p) in (_STATE, _SPLITS)), None)
    if below is not None:  # its folder may have more files of rows, such as caches of datasets
        raise ConfigError(
            f"input.path: expected files of rows, got a saved data set with {public_url(below)}. Name its folder, or "
            "use a glob that matches the folders of saved data sets (FOLDER/*)"
        )
    return _of_many(config, fs, {path: kind for path, kind in found.items() if kind != "directory"}, folder)


def _refuse_split(config: InputConfig) -> None:
    if config.split is not None:
        raise ConfigError(
            f"input.split: expected the folder of a saved data set with {_SPLITS}, got {public_url(config.path)}. "
            "Name that folder, or remove input.split"
        )


def _glob(fs: Any, path: str) -> tuple[str, str]:
    """Return the folder in which to search for a glob, and the glob in it. It is empty if ``path`` is no glob.

    ``path`` does not exist. Its first folders that exist are names, not patterns: the working folder, which a relative
    path does not show, may be named ``run[1]``.
    """
    steps = path.split("/")
    for at in (i for i, step in enumerate(steps) if _WILDCARD.search(step)):
        folder = "/".join(steps[: at + 1])
        with suppress(FileNotFoundError):
            if folder != path and file_info(fs, folder)["type"] == "directory":
                continue
        return "/".join(steps[:at]) or path[: path.startswith("/")], "/".join(steps[at:]).strip("/")
    return path, ""


def _check_pattern(pattern: str, shown: str) -> None:
    if any("**" in step and step != "**" for step in pattern.split("/")):
        raise ConfigError(
            f"input.path: expected ** as a whole name between slashes (FOLDER/**/*.jsonl), got {shown}. Put a slash on "
            "each side of **"
        )


def _tests(steps: Sequence[str]) -> list[Callable[[str], object] | None]:
    """Return a test of a name for each step of a glob, or None for ``**``.

    Not by fsspec's or Python's translation of a whole glob: there a name of 250 bytes can take hours. For one step,
    ``fnmatch`` never goes back to an earlier star.
    """
    # As in fsspec, ** at the end stands for one name or more, and * for a name that is not empty.
    steps = [*steps, "*"] if steps[-1] == "**" else steps
    return [None if s == "**" else re.compile(translate("?*" if s == "*" else s)).match for s in steps]


def _is_match(tests: Sequence[Callable[[str], object] | None], path: str) -> bool:
    names = path.split("/")
    # How many names the steps so far may have matched.
    counts: Sequence[int] = [0]
    for test in tests:
        if test is None:
            counts = range(min(counts, default=len(names)), len(names))
        else:
            counts = [i + 1 for i in counts if i < len(names) and test(names[i])]
    return len(names) in counts


def _listed(fs: Any, base: str, pattern: str) -> dict[str, str]:
    """Return the types of the files and folders below ``base`` that match a glob, by path.

    Names that begin with ``.`` or ``_`` are left out: other programs add them (_SUCCESS, .crc, .ipynb_checkpoints).
    Those of ``_refuse_tables`` are an error.
    Not by ``fs.find`` or ``fs.glob``: they silently omit a folder whose listing fails.

    Raises:
        ConfigError: a folder cannot be listed, or is one of a table. Or a link leads to a folder, or a bucket has too
            many folders.
    """
    steps = pattern.split("/")
    # Level i of the folders is compared with the first i steps, up to the first ``**``.
    plain = next((i for i, step in enumerate(steps) if "**" in step), len(steps))
    tests = _tests(steps)
    found, todo = dict[str, str](), [(base, 0)]
    folders = files = 0
    while todo:
        folder, level = todo.pop()
        folders += 1
        check_listed(fs, folders, files, public_url(base))
        shown = public_url(folder)
        for info in with_config_errors(partial(fs.ls, folder, detail=True), shown):
            files += info["type"] != "directory"  # also files that are left out
            path = info["name"].rstrip("/")
            name = path.removeprefix(base).strip("/")
            is_prefix = "DIRECTORY" in (info.get("StorageClass"), info.get("storageClass"))  # of s3fs, gcsfs
            if (path == folder and is_prefix) or found.get(path, info["type"]) != info["type"]:
                raise ConfigError(
                    f"input.path: expected names that differ from their folders', got two keys {public_url(path)}, "
                    "with and without a slash at the end. Rename them"
                )
            if path in (folder, base) or path in found:
                continue
            _refuse_tables(path, shown)
            if name.rpartition("/")[2].startswith((".", "_")):
                continue
            check_path(name, public_url(base))
            is_folder, is_match = info["type"] == "directory", _is_match(tests, name)
            deeper = level >= plain or (level + 1 < len(steps) and _is_match(tests[: level + 1], name))
            is_link = info.get("islink") or info["type"] not in ("file", "directory")
            # Not by fs.isdir, which is false after any error.
            if is_link and (is_match or deeper) and _kind_of_target(fs, path) == "directory":
                raise ConfigError(
                    f"input.path: expected files and folders in {shown}, got {public_url(path)}, a link to a folder. "
                    "Replace the link by its folder, or use a glob that does not match it"
                )
            if is_match:
                found[path] = info["type"]
            if is_folder and deeper:
                todo.append((path, level + 1))
    return found


def _refuse_tables(path: str, shown: str) -> None:
    """Raise ConfigError if a path in the listed folder ``shown`` is the mark of a table or of an unfinished write."""
    name = posixpath.basename(path)
    if name == _UNFINISHED:
        raise ConfigError(
            f"input.path: expected a folder whose writer has ended, got {name} in {shown}, of a job of Spark or Hadoop "
            "that runs or failed. Wait for the job or repeat it, then remove the folder"
        )
    if (kind := "Iceberg" if _ICEBERG.fullmatch(path) else _TABLES.get(name)) is not None:
        raise ConfigError(
            f"input.path: expected files whose rows are all live, got a table of {kind} with {head(name, 200)} in "
            f"{shown}. Its files also have deleted and replaced rows. Export the table's live rows to Parquet"
        )


def _kind_of_target(fs: Any, path: str) -> Any:
    return with_config_errors(partial(fs.info, path), public_url(path))["type"]


def _of_many(config: InputConfig, fs: Any, found: dict[str, str], base: str) -> list[InputSource]:
    sources = []
    for path, kind in sorted(found.items()):
        name = name_of(fs, path).removeprefix(name_of(fs, base)).strip("/")
        if kind == "directory":
            if config.format not in ("auto", "dataset") or not _listed(fs, path, _STATE):
                raise ConfigError(
                    f"input.path: expected files and saved data sets, got the folder {public_url(path)}. Use a glob "
                    "for its files (FOLDER/**), or a glob that does not match it (*.jsonl)"
                )
            sources.append(_saved(fs, path, name))
        elif (form := _format(name, config.format)) is not None:
            sources.append(InputSource(COMPRESSED.sub("", name).removesuffix(_suffix(name)) or name, (path,), form))
        elif config.format == "auto":
            _check_no_rows(name)
    return sources


def _saved(fs: Any, folder: str, label: str) -> InputSource:
    """Return the source of a ``Dataset.save_to_disk`` folder, whose state names Arrow files in the order of rows."""
    state = _json(fs, f"{folder}/{_STATE}", "_data_files")
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"input.path: expected a saved data set with its rows in order, got a table of indices in "
            f"{public_url(folder)}, of an old version of datasets. Load it, call flatten_indices, and save it again"
        )
    names = _names([x.get("filename") if isinstance(x, dict) else None for x in state["_data_files"]], folder)
    if not names:
        raise ConfigError(
            f"input.path: expected a saved data set that names its files, got an empty list in {public_url(folder)}. "
            "Save the data set again, or name its files yourself (a glob such as *.arrow)"
        )
    return InputSource(label, tuple(_within(fs, folder, names)), "arrow")


def _names(names: list[Any], folder: str) -> list[str]:
    """Return ``names``, which a saved data set gives to files or splits directly in ``folder``.

    Called before files are read: repeating a name is cheap.

    Raises:
        ConfigError: one is no such name, or repeats.
    """
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0?#%]|::", name):
            got = repr(head(name, 200)) if isinstance(name, str) else kind_of(name)
            raise ConfigError(
                f"input.path: expected names of files in {public_url(folder)}, got {got} in the saved data set's JSON. "
                "Save the data set again, or name its files yourself (a glob such as *.arrow)"
            )
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"input.path: expected different names of splits and files in {public_url(folder)}, got "
                f"{head(name, 200)!r} {count} times in the saved data set's JSON. Save the data set again"
            )
    return names


def _within(fs: Any, folder: str, names: Sequence[str]) -> list[str]:
    """Return the paths of ``names`` in ``folder``. Raises ConfigError for a link that leads out of the folder."""
    paths = [f"{folder}/{name}" for name in names]
    if isinstance(fs, LocalFileSystem):
        real = Path(folder).resolve()  # once: it visits each folder above
        for link in filter(os.path.islink, paths):
            if Path(link).resolve().parent != real:
                raise ConfigError(
                    f"input.path: expected {head(posixpath.basename(link), 200)!r} within {folder}, got a link to "
                    "another folder. Copy the data set with its files (cp -rL), or name them yourself (a glob such as "
                    "*.arrow)"
                )
    return paths


def _json(fs: Any, path: str, member: str) -> dict[str, Any]:
    """Return the object in a JSON file, if its ``member`` is a list."""
    check_file(fs, path)
    with fs.open(path, "rb") as file:
        data = file.read(_LARGEST_LIST + 1)
    try:
        if len(data) > _LARGEST_LIST:
            raise ValueError(f"more than {_LARGEST_LIST} bytes")
        found = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"input.path: expected JSON in {public_url(path)}, got {e}. Save the data set again") from e
    if not isinstance(found, dict) or not isinstance(found.get(member), list):
        raise ConfigError(
            f"input.path: expected the list {member} in {public_url(path)}, got none. Save the data set again"
        )
    return found


def _format(name: str, asked: str) -> Format | None:
    """Return the format of a file, or None for a file that is not part of the input.

    ``rows.jsonl.lz4`` has the format of ``rows.jsonl``: opening it raises an error that names the known compressions.
    """
    known = _FORMATS.get(_suffix(_REFUSED.sub("", COMPRESSED.sub("", name))))
    if asked == "auto":
        return known
    if asked == "dataset" or (_accompanies(name) and _MAY_HAVE_ROWS.search(posixpath.basename(name))):
        return None
    # A file whose name ends with another format's suffix is left out. A file without a known suffix is read.
    return asked if known in (None, asked) or (known in LINES and asked in LINES) else None  # type: ignore[return-value]


def _check_no_rows(name: str) -> None:
    """Raise ConfigError for a file that is not read and may have rows: an archive, or ``rows.jsonl.part.0``."""
    if (_suffix(name) in ARCHIVES or _MAY_HAVE_ROWS.search(name)) and not _accompanies(name):
        raise ConfigError(
            "input.path: expected files of rows, plain or compressed as .gz, .zst, .xz or .bz2, got "
            f"{head(name, 400)!r}. Extract, rename or convert it, use a glob that does not match it, or set "
            "input.format to read it as it is"
        )


def _accompanies(name: str) -> bool:
    return _NO_ROWS.fullmatch(_suffix(name)) is not None


def _suffix(name: str) -> str:
    return ending(COMPRESSED.sub("", name))


def stem(path: str) -> str:
    """Return a file's name without folder and known endings: ``train`` for ``a/train.jsonl.zst``."""
    name = COMPRESSED.sub("", path.rstrip("/").rpartition("/")[2])
    root, suffix = posixpath.splitext(name)
    return (root if suffix.lower() in _FORMATS else name) or name
