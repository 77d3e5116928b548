"""Opening a store by its URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from hsx_dist.config.urls import check_no_credentials, public_url
from hsx_dist.errors import ConfigError, Unavailable
from hsx_dist.logger import get_logger
from hsx_dist.store.base import Store
from hsx_dist.store.forks import require_own_obstore
from hsx_dist.store.local import LocalStore
from hsx_dist.store.options import LOCAL, checked_options
from hsx_dist.store.retry import RetryPolicy, RetryStore

log = get_logger(__name__)

Backend = Literal["auto", "fsspec", "obstore"]
#: Schemes for which obstore is tried first.
_FAST = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
#: Schemes of archives. A small archive may have huge objects, and limits count the bytes of objects.
ARCHIVE_SCHEMES = frozenset({"zip", "tar", "libarchive", "reference"})
#: Schemes of caches that keep a list of their files in the cache's folder. fsspec before 2026.6 unpickles that list.
LISTED_CACHES = frozenset({"filecache", "blockcache", "cached"})


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    backend: Backend = "auto",
    retry_seconds: float = 120.0,
    on_retry: Callable[[Unavailable], None] = lambda _: None,
) -> Store:
    """Open the store at ``url``: a folder's path, ``file:///…``, ``s3://bucket/prefix``, ``gs://…`` or another URL of
    fsspec.

    Does not connect, unless the back end's library does so when it opens. A store of a folder looks at the folder.

    Args:
        storage_options: fsspec's options for the scheme, with every ``backend``.
        backend: ``auto`` takes obstore if it behaves as fsspec does with these options and this environment, and this
            process was not forked from a process that had loaded obstore. Otherwise it logs the reason and takes
            fsspec. Files always use ``LocalStore``, which has no options: only it syncs files to the disk, and its
            listings are complete.
        retry_seconds: how long calls that raise ``Unavailable`` are retried.
        on_retry: called with the error before each retry.

    Raises:
        ConfigError: the URL is empty, of an archive or a cache, or contains a credential. Or its scheme is unknown, or
            the scheme's package is missing. Or ``backend`` is obstore, and an option or the URL has no
            counterpart there.
    """
    if not url:
        raise ConfigError("expected the url of a store or the path of a folder, got an empty one. Set it")
    check_no_credentials(url)
    _check_scheme(url)
    storage_options = checked_options(url, storage_options)
    if retry_seconds < 0:
        raise ConfigError(f"retry_seconds: expected 0 or more, got {retry_seconds}. Set 0 for no retries")
    return RetryStore(_open(url, storage_options, backend), RetryPolicy(seconds=retry_seconds), on_retry=on_retry)


def _check_scheme(url: str) -> None:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in LOCAL:
        if separator and not rest.startswith("/"):
            raise ConfigError(f"{url}: expected file:///absolute/path, got a relative one. Add the leading slash")
        return
    if not ARCHIVE_SCHEMES.isdisjoint(link.partition("://")[0] for link in url.split("::")):
        raise ConfigError(
            f"{public_url(url)}: expected a folder or an object store, got an archive. Extract the archive to a folder"
        )
    if scheme in LISTED_CACHES:
        raise ConfigError(f"{public_url(url)}: expected a folder or an object store, got a cache. Name what it caches")
    if scheme != "memory" and not rest.strip("/"):
        raise ConfigError(f"{url}: expected a bucket behind {scheme}://, got none. Add it")


def _open(url: str, options: Mapping[str, Any] | None, backend: Backend) -> Store:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in LOCAL:
        return LocalStore(rest if separator else url)
    if backend == "obstore" or (backend == "auto" and scheme in _FAST):
        fast = _open_obstore(url, options, must=backend == "obstore")
        if fast is not None:
            return fast
    # Imported here: reading from a folder needs no fsspec.
    from hsx_dist.store.fsspec import FsspecStore
    from hsx_dist.store.http_store import HttpStore

    return (HttpStore if scheme in ("http", "https") else FsspecStore)(url, options)


def _open_obstore(url: str, options: Mapping[str, Any] | None, *, must: bool) -> Store | None:
    """Open the store with obstore. Logs the reason and returns None if fsspec must be used."""
    from hsx_dist.store.obstore import ObstoreStore
    from hsx_dist.store.obstore_connection import NotTranslated

    try:
        require_own_obstore()
        return ObstoreStore(url, options)
    except NotTranslated as e:
        if must:
            raise ConfigError(
                f"store.backend: expected a URL and options that obstore has too, got another: {e}. Set fsspec or auto"
            ) from e
        log.warning("%s uses fsspec, which is slower than obstore: %s", public_url(url), e)
    except ConfigError as e:
        if must:
            raise
        log.info("%s uses fsspec: %s", public_url(url), e)
    return None
