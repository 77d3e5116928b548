"""From a url to a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsx_dist.config.secrets import public_url, url_password
from hsx_dist.errors import ConfigError
from hsx_dist.store.base import Store
from hsx_dist.store.local import LocalStore
from hsx_dist.store.retry import RetryPolicy, RetryStore

_LOCAL = ("file", "local")


def open_store(url: str, storage_options: Mapping[str, Any] | None = None, *, retry_seconds: float = 120.0) -> Store:
    """The store at ``url``: a folder's path, ``file:///…``, ``s3://bucket/prefix``, ``gs://…``, or what fsspec speaks.

    ``storage_options`` are fsspec's for that scheme (unused for files). Calls that fail with ``Unavailable`` are
    repeated for ``retry_seconds``. Nothing is contacted yet, as far as the back end's library allows.

    Raises:
        ConfigError: the url is empty, holds a password, or has a scheme that is unknown or whose package is missing.
    """
    if not url:
        raise ConfigError("expected the url of a store or the path of a folder, came an empty one; set it")
    if url_password(url):
        raise ConfigError(
            f"{public_url(url)}: expected a url without a password, came one with it; give credentials by the "
            "environment or storage_options"
        )
    if retry_seconds < 0:
        raise ConfigError(f"retry_seconds: expected 0 or more, came {retry_seconds}; set 0 for no repetition")
    return RetryStore(_open(url, storage_options), RetryPolicy(seconds=retry_seconds))


def _open(url: str, options: Mapping[str, Any] | None) -> Store:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStore(url)
    if scheme in _LOCAL:
        if not rest.startswith("/"):
            raise ConfigError(f"{url}: expected file:///absolute/path, came a relative one; add the leading slash")
        return LocalStore(rest)
    # Loaded here: reading from a folder needs no fsspec.
    from hsx_dist.store.fsspec import FsspecStore

    if scheme != "memory" and not rest.strip("/"):
        raise ConfigError(f"{url}: expected a bucket behind {scheme}://, came none; add it")
    return FsspecStore(url, options)
