"""Refuses what a web server sends in place of a file of rows: a page of links, or a list of files."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from hsx_dist.errors import ConfigError

#: Types of pages and of lists of files. Web servers and object stores send them for a folder.
_PAGES = ("text/html", "application/xhtml+xml", "text/xml", "application/xml")


def is_web(path: str) -> bool:
    """Whether ``path`` of a file system is a URL of a web server."""
    return path.startswith(("http://", "https://"))


def check_web_file(info: dict[str, Any], shown: str) -> None:
    """Raise ConfigError for a folder or a page: its lines would become rows, in place of the rows of its files.

    fsspec calls everything on a web server a file. ``info``: of the last answer, after redirects.
    """
    kind, url = str(info.get("mimetype")).strip().lower(), urlsplit(str(info.get("url") or info["name"]))
    if kind in _PAGES:
        raise no_web_file(shown, f"a page of type {kind}")
    if not url.query and (not url.path or url.path.endswith("/")):
        raise no_web_file(shown, "a folder")


def no_web_file(shown: str, got: str) -> ConfigError:
    """Return the error for ``shown``, which is ``got`` instead of a file."""
    return ConfigError(
        f"input.path: expected the URL of a file on a web server, got {got} at {shown}. Name one file, or copy the "
        "files to a folder"
    )
