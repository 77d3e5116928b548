"""What a file system of fsspec reads: a web server, a bucket, or a zip file.

Decided by the file system alone. A member of a zip file, or a key of a bucket, may have a name that looks like a URL.
"""

from __future__ import annotations

from typing import Any

from fsspec.implementations.local import LocalFileSystem

from hsx_dist.config.urls import public_url, web_path
from hsx_dist.errors import Unavailable
from hsx_dist.regular_files import open_regular

#: Separates the name of an object of S3 from its version.
VERSION = "?versionId="


class RegularFiles(LocalFileSystem):
    """Local files. A FIFO or a device is an error when it is opened, also if it replaced a regular file before."""

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
        return open(path, mode, opener=open_regular)


def innermost(fs: Any) -> Any:
    """Return the file system that caches and other file systems wrap, or the first of them that reads a zip file."""
    while not hasattr(fs, "zip"):
        inner = getattr(fs, "fs", None) or getattr(fs, "sync_fs", None)
        if inner is None:
            break
        fs = inner
    return fs


def schemes_of(fs: Any) -> set[str]:
    """Return the schemes of the URLs that a file system reads, perhaps behind a cache."""
    schemes = getattr(innermost(fs), "protocol", ())
    return {schemes} if isinstance(schemes, str) else set(schemes)


def is_web(fs: Any) -> bool:
    """Whether a file system, perhaps behind a cache, reads web servers. Its paths are URLs."""
    return "https" in schemes_of(fs)


def in_bucket(fs: Any) -> bool:
    """Whether a file system, perhaps behind a cache, reads S3 or GCS."""
    return not schemes_of(fs).isdisjoint(("s3", "gs"))


def name_of(fs: Any, path: str) -> str:
    """Return the path of a file of ``fs``, without the query of a URL and the version of an object of S3.

    A URL may be signed or have a password, and keys must not have them. All other paths are names.
    """
    if is_web(fs):
        return web_path(path)
    return path.partition(VERSION)[0] if path.startswith("s3://") and in_bucket(fs) else path


def with_store_checks(found: Any) -> Any:
    """Return a file system with ``CheckedS3`` in place of s3fs's file system, which it may wrap.

    s3fs takes a gateway's page for an object: its length for the object's size, and its bytes for any range. gcsfs's
    file system for gRPC becomes ``JsonGcs`` unless it reads from Google.
    """
    if type(found).__name__ == "S3FileSystem" and "s3" in schemes_of(found):
        from hsx_dist.store.s3_answers import CheckedS3  # part of an extra

        checked = CheckedS3(*found.storage_args, **found.storage_options)
        checked.requires_objects = True
        return checked
    if type(found).__name__ == "ExtendedGcsFileSystem" and not found.on_google:
        from hsx_dist.store.gcs_json import JsonGcs  # part of an extra

        return JsonGcs(*found.storage_args, **found.storage_options)
    if (inner := getattr(found, "fs", None)) is not None:  # of a cache
        found.fs = with_store_checks(inner)
    return found


def file_info(fs: Any, path: str) -> Any:
    """Return what fsspec says about a file or folder. A cache lists the folder, which a web server may not do.

    Raises:
        Unavailable: the answer for an object of GCS is another service's. gcsfs takes it for an object of 0 bytes.
    """
    info = (innermost(fs) if is_web(fs) else fs).info(path)
    if info["type"] == "file" and "gs" in schemes_of(fs) and not info.get("generation"):
        raise Unavailable(
            f"head {public_url(path)}: expected an answer with an object's generation, got another. Check that the "
            "endpoint is the store, and no proxy"
        )
    return info
