"""Paths and URLs that another program names, confined to the prefix that the user configured."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hsx_dist.config.urls import check_no_credentials, public_url
from hsx_dist.errors import ConfigError, StoreError
from hsx_dist.home import with_home
from hsx_dist.store.base import ObjectInfo, Store
from hsx_dist.store.folder_listing import UNFINISHED
from hsx_dist.store.folders import SAFELY, close, is_link
from hsx_dist.store.local import LocalStore
from hsx_dist.store.opening import open_store
from hsx_dist.store.retry import RetryStore

_LOCAL = ("file", "local")
#: In these stores the server percent-decodes a URL's path.
_DECODED = ("http", "https", "webdav", "webdavs")
#: Of these, the schemes of ``HttpStore``.
_QUOTED = ("http", "https")
#: Linux's longest path. Object stores take shorter names.
_MAX_PLACE = 4096


class ConfinedFolder(LocalStore):
    """A ``LocalStore`` that follows no link below its root. It reads, writes and deletes objects by name.

    Each call walks from the open root to the object's folder without following links, and opens the object relative to
    that folder. A folder or an object that another process swaps for a link at any moment raises ``StoreError``.
    """

    _own_links = False

    def head(self, name: str) -> ObjectInfo:
        with self._translating("head", name), self._reading(name) as fd:
            return ObjectInfo(name, os.fstat(fd).st_size)

    def _listed(self, *_args: object, **_kwargs: object) -> Iterator[ObjectInfo]:
        raise StoreError(f"list {self.url}: expected the name of an object in a confined folder, got none. Name it")

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        folder, last = self._split(name)
        with self._opened(folder) as parent:
            if is_link(parent, last):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            self._require_file(name, os.stat(last, dir_fd=parent, follow_symlinks=False))
            fd = os.open(last, os.O_RDONLY | SAFELY, dir_fd=parent)
        try:
            found = os.fstat(fd)
            self._require_file(name, found)
            self._root.saw(name, found, "last")
            yield fd
        finally:
            close(fd)


def open_within(prefix: str, place: object, storage_options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """Open the store at ``prefix``, and return the store and the name in it of ``place``, an object under ``prefix``.

    Schemes, hosts and buckets are compared as written, paths component by component. ``place`` may contain links to its
    folder. The returned name contains no links, and a ``ConfinedFolder`` follows none: a link that is made after the
    check has no effect. An HTTP server's redirect raises ``StoreError`` when the object is read.

    Raises:
        ConfigError: ``place`` is no text or not under ``prefix``; it has a component, a chain (``a::b``) or credentials
            that could lead out of ``prefix``; or an error of ``open_store``.
    """
    check_no_credentials(prefix)
    if not isinstance(place, str):
        raise ConfigError(f"{public_url(prefix)}: expected a path or URL under it, got a {type(place).__name__}")
    base, named = _local(prefix), _local(place)
    name = None
    if _is_clean(place) and (base is None) == (named is None):
        name = _name_in_url(prefix, place) if base is None or named is None else _name_in_folder(base, named)
    if name is None or not name.isprintable() or name.rpartition("/")[2].startswith(UNFINISHED):
        shown = repr(public_url(place)) if len(place) <= 200 else f"a text of {len(place)} characters"
        raise ConfigError(
            f"{public_url(prefix)}: expected a path or URL under it, got {shown}. Configure the folder "
            "or URL where the server stores, and trust no server that stores elsewhere"
        )
    if base is not None:
        return RetryStore(ConfinedFolder(base)), name
    if prefix.partition("://")[0].lower() in _QUOTED:
        storage_options = {**(storage_options or {}), "allow_redirects": False}  # to a place outside ``prefix``
    return open_store(prefix, storage_options), name


def _is_clean(place: str) -> bool:
    try:
        return len(os.fsencode(place)) <= _MAX_PLACE and "\0" not in place
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _local(text: str) -> str | None:
    """Return the path of a local file or folder; None for a URL or a chain of URLs."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text
    return rest if scheme.lower() in _LOCAL and rest.startswith("/") else None


def _name_in_folder(base: str, named: str) -> str | None:
    path = Path(named)
    if path.name in ("", "..") or ".." in path.parts:
        return None
    folder = Path(os.path.realpath(with_home(base)))
    found = Path(os.path.realpath(path.parent)) / path.name
    return found.relative_to(folder).as_posix() if folder in found.parents else None


def _name_in_url(prefix: str, place: str) -> str | None:
    scheme, _, rest = prefix.partition("://")
    named_scheme, _, named = place.partition("://")
    base, parts = rest.rstrip("/").split("/"), named.split("/")
    decoded = unquote(named) if scheme.lower() in _DECODED else named
    if "::" in place or any(c in place for c in "?#") or "\\" in place + decoded:  # some servers read \ as /
        return None
    if any(part in ("", ".", "..") for part in (*parts, *decoded.split("/"))):
        return None
    if scheme.lower() != named_scheme.lower() or len(parts) <= len(base) or parts[: len(base)] != base:
        return None
    name = "/".join(parts[len(base) :])
    return unquote(name) if scheme.lower() in _QUOTED else name  # the store quotes it again
