"""Places that another program names, confined to the prefix that the user configured."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from hsx_dist.config.secrets import public_url
from hsx_dist.errors import ConfigError

_LOCAL = ("file", "local")
#: A name in these stores is a path that a server decodes.
_DECODED = ("http", "https", "webdav", "webdavs")


def place_within(prefix: str, place: object) -> str:
    """``place``, an object or folder under ``prefix``, as it may be opened: a local one without links.

    Schemes, hosts and buckets are compared as they are written, paths component by component. A local place may pass
    links that stay under the prefix, but must not be one itself: a store deletes the link's name.

    Raises:
        ConfigError: ``place`` is no text, not under ``prefix``, or has a component, a chain (``a::b``) or credentials
            that could lead out of it.
    """
    if not isinstance(place, str):
        raise ConfigError(f"{public_url(prefix)}: expected the name of a place under it, got a {type(place).__name__}")
    base, named = _local(prefix), _local(place)
    if base is not None and named is not None:
        found = _resolved(base, named)
    elif base is None and named is None:
        found = place if _url_within(prefix, place) else None
    else:
        found = None
    if found is None:
        raise ConfigError(
            f"{public_url(prefix)}: expected a place under it, got {public_url(place)[:200]!r}. Configure the folder "
            "or URL where the server stores, and trust no server that stores elsewhere"
        )
    return found


def _local(text: str) -> str | None:
    """The path of a local place; None for a URL or a chain of them."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text
    return rest if scheme.lower() in _LOCAL and rest.startswith("/") else None


def _resolved(base: str, named: str) -> str | None:
    root = Path(base).expanduser()
    path = Path(named)
    if "\0" in named or path.name in ("", "..") or ".." in path.parts:
        return None
    folder = Path(os.path.realpath(root))
    found = Path(os.path.realpath(path.parent)) / path.name
    if found.is_symlink() or found == folder or not found.is_relative_to(folder):
        return None
    return str(found)


def _url_within(prefix: str, place: str) -> bool:
    scheme, _, rest = prefix.partition("://")
    named_scheme, _, named = place.partition("://")
    base, parts = rest.rstrip("/").split("/"), named.split("/")
    if "::" in place or any(c in place for c in "?#\\") or not place.isprintable():
        return False
    decoded = unquote(named).split("/") if scheme.lower() in _DECODED else parts
    if any(part in ("", ".", "..") for part in (*parts, *decoded)):
        return False
    return scheme.lower() == named_scheme.lower() and len(parts) > len(base) and parts[: len(base)] == base
