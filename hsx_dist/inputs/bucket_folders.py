"""Lists the folders of an input on S3 or GCS, with the checks of a store's listings.

s3fs and gcsfs silently end a listing at an answer that is no listing, such as a gateway's page, and where a store cuts
its listings. Rows would be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hsx_dist.config import public_url
from hsx_dist.errors import ConfigError, StoreError
from hsx_dist.inputs.file_systems import VERSION, file_info, innermost, schemes_of
from hsx_dist.store.base import ObjectInfo
from hsx_dist.store.pages import (
    Pages,
    items_of_gcs,
    listed,
    listed_by_gcs,
    name_below,
    named,
    pages_of_gcs,
    put_in_order,
)
from hsx_dist.text import head

#: Objects with what the service says about them, and folders with nothing.
_Entries = Iterator[tuple[ObjectInfo, Mapping[str, Any] | None]]


class BucketFolders:
    """A file system over S3 or GCS that lists each folder once."""

    def __init__(self, fs: Any) -> None:
        self._fs, self._bucket = fs, innermost(fs)
        self._is_s3 = "s3" in schemes_of(fs)
        self._entries = self._of_s3 if self._is_s3 else self._of_gcs
        self._pages = Pages()
        self._found: dict[str, list[dict[str, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def with_scheme(self, path: str) -> str:
        """Return the path of an object. With a version it begins with ``s3://``: elsewhere a name may end like one."""
        return f"s3://{path}" if self._is_s3 and VERSION in path else path

    def named(self, path: str, *, as_folder: bool) -> Any:
        """Return what fsspec says about the input's path. ``as_folder``: a slash ends it, so an object is not meant.

        fsspec returns an object also if a folder has the same name. The folder's rows would be missing.

        Raises:
            ConfigError: an object and a folder have the name.
            FileNotFoundError: neither has it.
        """
        key = self._bucket.split_path(path)[1]
        if as_folder and key:
            if not self._has_folder(path):
                raise FileNotFoundError(path)
            return {"name": path, "size": 0, "type": "directory"}
        info = file_info(self._fs, path)
        if key and info["type"] == "file" and self._may_have_folder(path):
            raise ConfigError(
                f"input.path: expected a file or a folder, got an object and a folder at {public_url(path)}. Put a "
                "slash at the end of the path to read the folder, or rename one"
            )
        return info

    def _may_have_folder(self, path: str) -> bool:
        """Return whether a folder exists. Credentials that may not list, and servers without listings, show none."""
        try:
            return self._has_folder(path)
        except (PermissionError, FileNotFoundError):
            return False
        except Exception as e:
            # gcsfs: an OSError for the status 403, and an error with a code for 401, which clients without credentials
            # get.
            if str(e).startswith("Forbidden") or getattr(e, "code", None) == 401:
                return False
            raise

    def _has_folder(self, path: str) -> bool:
        bucket, key, *_ = self._bucket.split_path(path.rstrip("/"))
        prefix, where = f"{key}/", f"input.path: listing of {public_url(f'{bucket}/{key}/')}"
        try:
            return any(info.name.startswith(prefix) for info, _ in self._entries(bucket, prefix, where))
        except StoreError as e:
            raise ConfigError(str(e)) from None

    def ls(self, folder: str, **_: Any) -> list[dict[str, Any]]:
        """Return the objects and folders in a folder, as fsspec describes them.

        Raises:
            ConfigError: names may be missing, or are repeated.
            FileNotFoundError: the folder has nothing in it.
        """
        path = folder.rstrip("/")
        if path not in self._found:
            bucket, key, *_ = self._bucket.split_path(path)
            if not bucket:  # all buckets
                return self._fs.ls(folder, detail=True)  # type: ignore[no-any-return]
            try:
                found = self._listed(bucket, f"{key}/" if key else "")
            except StoreError as e:
                raise ConfigError(str(e)) from None
            self._found[path] = found
            self._bucket.dircache[path] = found  # the sizes of these files take no more requests
        return self._found[path]

    def _listed(self, bucket: str, prefix: str) -> list[dict[str, Any]]:
        where = f"input.path: listing of {public_url(f'{bucket}/{prefix}')}"
        infos = dict[str, dict[str, Any]]()

        def objects() -> Iterator[ObjectInfo]:
            for info, said in self._entries(bucket, prefix, where):
                name_below(prefix, info.name, where)
                name = f"{bucket}/{info.name}"
                if self._bucket.split_path(name)[1].rstrip("/") != info.name.rstrip("/"):
                    raise ConfigError(
                        f"{where}: expected keys without a version, got the key {head(info.name, 200)!r}, for which "
                        "fsspec opens another object. Rename it"
                    )
                if prefix and info.name == prefix and info.size:
                    raise ConfigError(
                        f"{where}: expected an empty object as the marker of a folder, got one of {info.size} bytes. "
                        "Its rows would not be read: rename it, without a slash at the end"
                    )
                infos[info.name] = (
                    {"name": name.removesuffix("/"), "size": 0, "type": "directory", "StorageClass": "DIRECTORY"}
                    if said is None
                    else {**said, "name": name, "size": info.size, "type": "file"}
                )
                yield info

        found = [infos[info.name] for info in put_in_order(objects(), where)]
        if prefix and not found:
            raise FileNotFoundError(prefix)
        # A console stores an empty object as the marker of its folder.
        return [info for info in found if info["type"] == "directory" or info["size"] or info["name"][-1] != "/"]

    def _of_s3(self, bucket: str, prefix: str, where: str) -> _Entries:
        fs = self._bucket

        def ask(**page: Any) -> Mapping[str, Any]:
            return fs.call_s3("list_objects_v2", Bucket=bucket, Delimiter="/", **fs.req_kw, **page)  # type: ignore[no-any-return]

        for answer in self._pages.answers(ask, prefix, where):
            yield from ((listed(entry, where), entry) for entry in answer.get("Contents", ()))
            folders = (named(entry.get("Prefix"), where) for entry in answer.get("CommonPrefixes", ()))
            yield from ((ObjectInfo(name, 0), None) for name in folders)

    def _of_gcs(self, bucket: str, prefix: str, where: str) -> _Entries:
        def ask(**page: Any) -> Any:
            return self._bucket.call("GET", "b/{}/o", bucket, json_out=True, delimiter="/", **page)

        for page in pages_of_gcs(ask, prefix, where):
            yield from ((listed_by_gcs(item, where), item) for item in items_of_gcs(page, "items", where))
            yield from ((ObjectInfo(named(name, where), 0), None) for name in items_of_gcs(page, "prefixes", where))
