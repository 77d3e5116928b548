"""Limits the folders of an input. A name in a zip file or an object store may claim any number of them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fsspec.implementations.zip import ZipFileSystem

from hsx_dist.errors import ConfigError

#: Limit of the folders of a path, and of its characters. All beginnings of a zip file's path are kept, and each folder
#: of an object store is listed.
_DEEPEST, _LONGEST_PATH = 255, 4096
#: Limit of the different folders, for all files together and for each file.
_FOLDERS, _FOLDERS_OF_FILE = 1000, 3


def check_path(path: str, shown: str) -> None:
    """Raise ConfigError if a path below ``shown`` has too many folders or characters."""
    depth = path.count("/")
    if depth > _DEEPEST or len(path) > _LONGEST_PATH:
        raise ConfigError(
            f"input.path: expected paths of at most {_DEEPEST} folders and {_LONGEST_PATH} characters in {shown}, got "
            f"{depth} folders and {len(path)} characters. Rename the files, or write the zip file again"
        )


def check_count(folders: int, files: int, shown: str) -> None:
    """Raise ConfigError if ``shown`` has too many folders for its files. A zip file's members are its files."""
    if folders > _FOLDERS + _FOLDERS_OF_FILE * files:
        raise ConfigError(
            f"input.path: expected at most {_FOLDERS} folders and {_FOLDERS_OF_FILE} more for each of {files} files "
            f"in {shown}, got more. Remove folders without files, or write the zip file with its folders as members"
        )


class ZipFolders:
    """A ``ZipFileSystem`` whose folders are found once: its own ``ls`` goes over all members of the file each time."""

    def __init__(self, fs: ZipFileSystem) -> None:
        self._fs = fs
        #: The members of each folder. A name that is a file and a folder is there twice.
        self._members = defaultdict[str, list[dict[str, str]]](list)
        seen = set[tuple[str, str]]()
        members = fs.zip.infolist()
        for member in members:
            name, kind = member.filename.rstrip("/"), "directory" if member.is_dir() else "file"
            check_path(name, "a zip file")
            while name and (name, kind) not in seen:
                seen.add((name, kind))
                folder = name.rpartition("/")[0].rstrip("/")
                self._members[folder].append({"name": name, "type": kind})
                name, kind = folder, "directory"  # a zip file need not name its folders
            check_count(len(self._members), len(members), "a zip file")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def ls(self, folder: str, **_: Any) -> list[dict[str, str]]:
        """Return the members of a folder. Raises FileNotFoundError if there is no such folder."""
        members = self._members.get(folder.rstrip("/"), [])
        if folder and not members:
            self._fs.info(folder)
        return members
