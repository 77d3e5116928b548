"""Limits the folders of an input. A name in a zip file or a bucket may claim many of them without any cost."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.zip import ZipFileSystem

from hsx_dist.errors import ConfigError
from hsx_dist.text import head

#: Limit of the folders of a path, and of its characters. All beginnings of a zip file's path are kept, and each folder
#: of an object store is listed.
_DEEPEST, _LONGEST_PATH = 255, 4096
#: Limit of the different folders of a zip file, for all members together and for each member.
_FOLDERS, _FOLDERS_OF_MEMBER = 1000, 3
#: Limit of the folders that a listing of a bucket visits, for all files together and for each file. Each costs a
#: request. Healthy inputs have folders without files, such as those of jobs without output.
_LISTED, _LISTED_OF_FILE = 100_000, 10


def check_path(path: str, shown: str) -> None:
    """Raise ConfigError if a path below ``shown`` has too many folders or characters."""
    depth = path.count("/")
    if depth > _DEEPEST or len(path) > _LONGEST_PATH:
        raise ConfigError(
            f"input.path: expected paths of at most {_DEEPEST} folders and {_LONGEST_PATH} characters in {shown}, got "
            f"{depth} folders and {len(path)} characters. Rename the files, or write the zip file again"
        )


def check_listed(fs: Any, folders: int, files: int, shown: str) -> None:
    """Raise ConfigError if a listing visits too many folders for the files that it has found.

    A folder on a local disk costs its owner a folder, and a zip file's folders are checked before.
    """
    if isinstance(fs, LocalFileSystem | ZipFolders) or folders <= _LISTED + _LISTED_OF_FILE * files:
        return
    raise ConfigError(
        f"input.path: expected at most {_LISTED} folders and {_LISTED_OF_FILE} more for each of {files} files in "
        f"{shown}, got more. Name a folder with fewer folders below it, or use a glob that matches fewer folders"
    )


class ZipFolders:
    """A ``ZipFileSystem`` whose folders are found once: its own ``ls`` goes over all members of the file each time."""

    def __init__(self, fs: ZipFileSystem) -> None:
        self._fs = fs
        #: The members of each folder. A name that is a file and a folder is there twice.
        self._members = defaultdict[str, list[dict[str, str]]](list)
        #: Folder → a file below it, whose next step from there is no name.
        self._nameless = dict[str, str]()
        seen = set[tuple[str, str]]()
        members = fs.zip.infolist()
        for member in members:
            name, kind = member.filename.rstrip("/"), "directory" if member.is_dir() else "file"
            check_path(name, "a zip file")
            steps = name.split("/")
            if kind == "directory" and member.file_size:
                raise ConfigError(
                    "input.path: expected folders without bytes in a zip file, got the folder "
                    f"{head(member.filename, 200)!r} of {member.file_size} bytes. Write it as a file"
                )
            if name.startswith("/") and kind == "file":  # no path names it: fsspec drops the slash
                raise _no_name(name, "")
            no_name = next((i for i, step in enumerate(steps) if step in (".", "..")), None)
            if name.startswith(("/", "zip://", "zip::")):
                no_name = 0  # fsspec opens the member without this beginning
            if no_name is not None:
                folder = "/".join(steps[:no_name]).rstrip("/")
                if kind == "file":
                    self._nameless.setdefault(folder, name)
                name, kind = folder, "directory"
            while name and (name, kind) not in seen:
                seen.add((name, kind))
                folder = name.rpartition("/")[0].rstrip("/")
                self._members[folder].append({"name": name, "type": kind})
                name, kind = folder, "directory"  # a zip file need not name its folders
            if len(self._members) > _FOLDERS + _FOLDERS_OF_MEMBER * len(members):
                raise ConfigError(
                    f"input.path: expected at most {_FOLDERS} folders and {_FOLDERS_OF_MEMBER} more for each of "
                    f"{len(members)} files in a zip file, got more. Remove folders without files, or write the zip "
                    "file with its folders as members"
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def named(self, path: str, *, as_folder: bool) -> Any:
        """Return what fsspec says about the input's path. ``as_folder``: a slash ends it, so a file is not meant.

        fsspec returns only one of a file and a folder of one name. The rows of the other would be missing.

        Raises:
            ConfigError: a file and a folder have the name.
            FileNotFoundError: neither has it.
        """
        name = path.rstrip("/")
        siblings = self._members.get(name.rpartition("/")[0].rstrip("/"), [])
        if len({member["type"] for member in siblings if member["name"] == name}) < 2:
            return self._fs.info(path)
        if as_folder:
            return {"name": path, "size": 0, "type": "directory"}
        raise ConfigError(
            f"input.path: expected a file or a folder, got both with the name {head(name, 200)!r} in the zip file. Put "
            "a slash at the end of the name to read the folder, or rename one"
        )

    def ls(self, folder: str, **_: Any) -> list[dict[str, str]]:
        """Return the members of a folder.

        Raises:
            ConfigError: a file below the folder cannot be found by the names of its folders.
            FileNotFoundError: there is no such folder.
        """
        if (name := self._nameless.get(folder.rstrip("/"))) is not None:
            raise _no_name(name, ", or name one member")
        members = self._members.get(folder.rstrip("/"), [])
        if folder and not members:
            self._fs.info(folder)
        return members


def _no_name(member: str, more: str) -> ConfigError:
    return ConfigError(
        f"input.path: expected names of files and folders in a zip file, got the member {head(member, 200)!r}. Write "
        f"the zip file without such steps{more}"
    )
