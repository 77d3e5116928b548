"""Objects through fsspec: every scheme except files (``LocalStore``). Tests cover S3, GCS and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import fsspec

from hsx_dist.config.redaction import redact_text
from hsx_dist.config.urls import PROFILES_ENDPOINT, check_endpoint, public_url
from hsx_dist.errors import AlreadyExists, ConfigError, HsxError, NotFound, StoreError, Unavailable, install_extra
from hsx_dist.store.base import (
    PATIENCE_S,
    PIECES_AT_ONCE,
    SLOWEST_BYTES_S,
    Buffer,
    Gathered,
    ObjectInfo,
    as_bytes_view,
    check_name,
    check_ranges,
    coalesce,
    cut,
    explained_head,
    not_conditional,
    require_at_most,
    stated_size,
)
from hsx_dist.store.faults import (
    NoBucket,
    Redactor,
    after_renewal,
    expired,
    outdated,
    past_the_end,
    shown_cause,
    translate,
    unless_missing,
)
from hsx_dist.store.pages import Pages, in_order, name_below, objects_of_gcs, put_in_order, sorts_by_name
from hsx_dist.store.upload_answers import require_stored
from hsx_dist.store.web_answers import bounding_answers
from hsx_dist.text import text_of

T = TypeVar("T")

#: Size of a piece of an upload to S3.
_PIECE = 16 * 1024 * 1024
_MEMORY_LOCK = threading.Lock()
#: Schemes with create-only writes. Other file systems take ``mode="create"`` too, but ignore it (HTTP), or look for
#: the object and then write: two writers may both find none.
_CREATING = frozenset({"memory", "s3", "s3a", "gs", "gcs"})
#: S3's limit. A larger size in a request adds no time to the call's limit.
_LARGEST_OBJECT = 5 << 40


class FsspecStore:
    """A ``Store`` over one of fsspec's file systems.

    ``options`` are the file system's arguments. A call's limit is ``patience`` seconds, ten times that if the size is
    unknown, and a second for every MiB. A longer call raises ``Unavailable``. Errors of every library are translated to
    ``hsx_dist.errors``.

    Raises:
        ConfigError: the scheme is unknown, its package is missing, or the file system does not take the options.
        StoreError: the file system cannot be made (``Denied`` for unusable credentials).
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, patience: float = PATIENCE_S):
        self._scheme = url.partition("://")[0]
        self._url = public_url(url).rstrip("/")
        self._options = dict(options or {})
        self._patience = patience
        self._redact = Redactor(self._options, os.environ)
        self._lock = threading.Lock()
        self._full_url = url
        self._bucket = self._url.partition("://")[2].partition("/")[0]
        self._fs, self._root = self._connect()
        self._s3 = self._scheme in ("s3", "s3a")
        self._gcs = self._scheme in ("gs", "gcs")
        self._pages = Pages()

    @property
    def url(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"FsspecStore({self._url!r})"

    # -- the verbs -----------------------------------------------------------------------------------------------

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        path = self._path(name)
        pieces = [as_bytes_view(b) for b in buffers]
        size = sum(p.nbytes for p in pieces)
        data: Any
        if self._s3 and size >= 2 * _PIECE:
            # s3fs cuts slices and sends several at once: only those are copied, never the whole object.
            data, how = Gathered(pieces), {"chunksize": _PIECE, "max_concurrency": PIECES_AT_ONCE}
        else:
            data = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
            how = {"chunksize": 2 * _PIECE} if self._s3 else {}
        answer = self._call("put", name, lambda: self._pipe(path, data, **how))
        require_stored(self, name, answer, size)

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        path = self._path(name)
        data = data if isinstance(data, bytes) else b"".join(map(as_bytes_view, data))
        # In one request: s3fs and gcsfs split larger ones, and gcsfs's multipart uploads are not create-only.
        whole = {"chunksize": len(data) + 1} if self._s3 or self._gcs else {}
        if self._scheme not in _CREATING:
            raise StoreError(
                f"put {self.url}/{name}: expected a back end with create-only writes, got fsspec's "
                f"{type(self._fs).__name__}. Use a folder, s3 or gs"
            )
        answer = self._call("put-if-absent", name, lambda: self._pipe(path, data, mode="create", **whole))
        require_stored(self, name, answer, len(data))

    def get(self, name: str, most: int | None = None) -> bytes:
        path = self._path(name)
        if most is not None:
            limit = self._limit(min(most, _LARGEST_OBJECT))
            found = self._call("get", name, lambda: self._fs.cat_file(path, start=0, end=most, **limit), past_end=b"")
            require_at_most(f"{self.url}/{name}", most, len(found))
            return bytes(found)
        longest = self._limit(patience=10 * self._patience)  # the size is unknown
        return bytes(self._call("get", name, lambda: self._fs.cat_file(path, **longest)))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        path = self._path(name)
        check_ranges(name, ranges)
        spans = coalesce(ranges)
        contents: list[bytes] = []
        limit = self._limit(min(sum(stop - start for start, stop in spans), _LARGEST_OBJECT))
        if len(spans) == 1:
            start, stop = spans[0]
            contents = [
                self._call("get", name, lambda: self._fs.cat_file(path, start=start, end=stop, **limit), past_end=b"")
            ]
        elif spans:
            answers = self._call("get", name, lambda: self._fs.cat_ranges(
                [path] * len(spans), [s for s, _ in spans], [s for _, s in spans], on_error="return", **limit
            ))  # fmt: skip
            for answer in answers:
                # An element may be an exception instead of bytes.
                contents.append(self._call("get", name, partial(_content, answer), past_end=b""))
        return cut(f"{self.url}/{name}", ranges, spans, contents)

    def head(self, name: str) -> ObjectInfo:
        path = self._path(name)
        if self._s3:
            # s3fs's info() lists the name as a folder if it is missing: another request.
            return ObjectInfo(name, stated_size(self._head_s3(name).get("ContentLength"), f"head {self.url}/{name}"))
        info = self._call("head", name, lambda: self._fs.info(path, **self._limit()))
        if info["type"] != "file":
            raise NotFound(f"head {self.url}/{name}: there is no such object")
        return ObjectInfo(name, stated_size(info.get("size"), f"head {self.url}/{name}"))

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        lists = self._list_s3 if self._s3 else self._list_gcs if self._gcs else self._list_any
        for info in lists(prefix, after):
            if info.name and info.name.startswith(prefix) and (after is None or info.name > after):
                yield info

    def delete(self, name: str) -> None:
        path = self._path(name)
        with unless_missing():
            self._call("delete", name, lambda: self._fs.rm_file(path, **self._limit()))

    def version(self, name: str) -> str:
        """See ``Conditional``: S3's ETag, GCS's generation."""
        found = None
        if self._s3:
            found = self._head_s3(name).get("ETag")
        elif self._gcs:
            info = self._call("head", name, lambda: self._fs.info(self._path(name), **self._limit()))
            found = info.get("generation")
        if not found:
            raise not_conditional(self.url)
        return str(found)

    def delete_version(self, name: str, version: str) -> bool:
        """See ``Conditional``. Some servers ignore the condition: test with a probe object first."""
        bucket, key, *_ = self._fs.split_path(self._path(name)) if self._s3 or self._gcs else ("", "")
        with suppress(AlreadyExists), unless_missing():
            if self._s3:
                self._call("delete-version", name, lambda: self._fs.call_s3(
                    "delete_object", Bucket=bucket, Key=key, IfMatch=version, **self._limit()
                ))  # fmt: skip
            elif self._gcs:
                self._call("delete-version", name, lambda: self._fs.call(
                    "DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=version, **self._limit()
                ))  # fmt: skip
            else:
                raise not_conditional(self.url)
            return True
        return False

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        """See ``Conditional``. Some servers ignore the condition: see ``replaces_conditionally``."""
        bucket, key, *_ = self._fs.split_path(self._path(name)) if self._s3 or self._gcs else ("", "")
        data = b"".join(map(as_bytes_view, buffers))
        with suppress(AlreadyExists), unless_missing():
            if self._s3:
                answer = self._call("put-version", name, lambda: self._fs.call_s3(
                    "put_object", Bucket=bucket, Key=key, Body=data, IfMatch=version, **self._limit(len(data))
                ))  # fmt: skip
            elif self._gcs:
                answer = self._call("put-version", name, lambda: self._fs.call(
                    "POST",
                    f"{self._fs._location}/upload/storage/v1/b/{{}}/o",
                    bucket,
                    uploadType="media",
                    name=key,
                    ifGenerationMatch=version,
                    headers={"Content-Type": "application/octet-stream"},
                    data=data,
                    json_out=True,
                    **self._limit(len(data)),
                ))  # fmt: skip
            else:
                raise not_conditional(self.url)
            require_stored(self, name, answer, len(data))
            return True
        return False

    # -- calls of the file system --------------------------------------------------------------------------------

    def _connect(self) -> tuple[Any, str]:
        try:
            cls = fsspec.get_filesystem_class(self._scheme)
            if self._scheme in ("s3", "s3a"):
                from hsx_dist.store.s3_answers import CheckedS3 as cls  # noqa: N813 - part of an extra
            elif self._scheme in ("gs", "gcs"):
                from hsx_dist.store.gcs_json import JsonGcs as cls  # noqa: N813 - part of an extra
        except ImportError as e:
            extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(self._scheme)
            what = install_extra(extra) if extra else "Install the package that fsspec names"
            raise ConfigError(f"{self._url}: expected the package for {self._scheme}://, got none ({e}). {what}") from e
        except ValueError as e:
            raise ConfigError(
                f"{self._url}: expected a scheme that fsspec knows, such as s3, got {self._scheme!r}. Correct the url"
            ) from e
        try:
            fs = cls(**{**bounding_answers(self._full_url, self._options), **self._defaults()})
            root = str(cls._strip_protocol(self._full_url)).rstrip("/")
        except TypeError as e:
            why = redact_text(self._redact(str(e)))
            raise ConfigError(f"{self._url}: {cls.__name__} refuses storage_options: {why}. Correct them") from e
        except Exception as e:  # noqa: BLE001 - every library has its own
            raise translate(e, f"open {self._url}", self._bucket, self._redact) from shown_cause(e, self._redact)
        if self._scheme in ("s3", "s3a"):
            fs.retries = 1
        self._unchecked = True
        return fs, root

    def _defaults(self) -> dict[str, Any]:
        # Listings and settings that other code in this process cached must not be used.
        defaults: dict[str, Any] = {"use_listings_cache": False}
        if self._scheme != "memory":
            defaults["skip_instance_cache"] = True
        if self._scheme in ("s3", "s3a"):
            # Few quick retries: RetryStore does the long ones, with a time limit.
            quick = {"retries": {"total_max_attempts": 3, "mode": "standard"}}
            defaults["config_kwargs"] = {**quick, **(self._options.get("config_kwargs") or {})}
        return defaults

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _head_s3(self, name: str) -> Mapping[str, Any]:
        bucket, key, _ = self._fs.split_path(self._path(name))
        return explained_head(self, name, lambda: self._call("head", name, lambda: self._fs.call_s3(
            "head_object", Bucket=bucket, Key=key, **self._limit()
        )))  # fmt: skip

    def _pipe(self, path: str, data: bytes | Gathered, **how: Any) -> object:
        if self._scheme == "memory":
            with _MEMORY_LOCK:  # fsspec's check and its write are two steps
                return self._fs.pipe_file(path, data, **how)
        return self._fs.pipe_file(path, data, **how, **self._limit(len(data)))

    def _limit(self, nbytes: int = 0, patience: float | None = None) -> dict[str, float]:
        """Return the time-out argument of a call; empty if the file system takes none."""
        seconds = self._patience if patience is None else patience
        return {"timeout": seconds + nbytes / SLOWEST_BYTES_S} if getattr(self._fs, "async_impl", False) else {}

    def _list_s3(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        bucket, root, _ = self._fs.split_path(self._root)
        root = f"{root}/" if root else ""
        self._call("list", prefix, lambda: self._fs.connect(**self._limit()))
        where, sorts = f"list {self.url}/{prefix}", self._sorts()
        start = {"StartAfter": root + after} if sorts and after is not None else {}

        def ask(**page: Any) -> Mapping[str, Any]:
            return self._call("list", prefix, lambda: self._fs.call_s3(
                "list_objects_v2", Bucket=bucket, **start, **page, **self._limit()
            ))  # fmt: skip

        objects = self._pages.objects(ask, root + prefix, where)
        found = (ObjectInfo(name_below(root, info.name, where), info.size) for info in objects)
        yield from (in_order if sorts else put_in_order)(found, where)

    def _sorts(self) -> bool:
        endpoint = self._fs._location if self._gcs else self._fs.s3.meta.endpoint_url
        return sorts_by_name(endpoint) and not self._bucket.endswith("--x-s3")  # directory buckets list in any order

    def _list_gcs(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        bucket, root, _ = self._fs.split_path(f"{self._root}/")
        where, start = f"list {self.url}/{prefix}", {} if after is None else {"startOffset": root + after}

        def ask(**page: Any) -> Mapping[str, Any]:
            # Not gcsfs's ``find``: it takes any JSON for an empty listing.
            return self._call("list", prefix, lambda: self._fs.call(
                "GET", "b/{}/o", bucket, json_out=True, **start, **page, **self._limit()
            ))  # fmt: skip

        objects = objects_of_gcs(ask, root + prefix, where)
        found = (ObjectInfo(name_below(root, info.name, where), info.size) for info in objects)
        yield from (in_order if self._sorts() else put_in_order)(found, where)

    def _list_any(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:  # noqa: ARG002
        folder = prefix.rpartition("/")[0]
        start = f"{self._root}/{folder}" if folder else self._root
        self._fs.invalidate_cache()
        found = {str(info["name"]): info for info in self._walk(prefix, start)}
        where, root = f"list {self.url}/{prefix}", self._root
        names = [(name_below(f"{root}/", str(path), where), info) for path, info in found.items() if path != root]
        for name, info in sorted(names, key=lambda item: item[0]):
            if info["type"] == "file" and not name.endswith("/"):
                # Listings of some file systems have no sizes, such as an HTTP server's page of links.
                if info.get("size") is not None:
                    yield ObjectInfo(name, stated_size(info["size"], where))
                    continue
                with unless_missing():  # deleted since
                    yield self.head(name)

    def _walk(self, prefix: str, start: str) -> Iterator[Mapping[str, Any]]:
        """Yield every file below the folder ``start``, except in folders that no name with ``prefix`` is in.

        fsspec's ``find`` and ``walk`` silently omit a folder whose listing fails; no argument prevents it.
        """
        todo = [(start, "")]
        while todo:
            folder, above = todo.pop()
            for info in self._ls(prefix, folder, above):
                path = str(info["name"]).rstrip("/")
                name_below(f"{folder}/", f"{path}/", f"list {self.url}/{prefix}")
                if info["type"] == "link":
                    raise StoreError(
                        f"list {self.url}/{prefix}: expected files and folders, got the symbolic link {path}: fsspec "
                        "does not report its target. Remove it"
                    )
                if info["type"] != "directory":
                    yield info
                elif path != folder and f"{path}/".startswith(f"{self._root}/{prefix}"[: len(path) + 1]):
                    todo.append((path, folder))

    def _ls(self, prefix: str, folder: str, above: str) -> Sequence[Mapping[str, Any]]:
        """List ``folder``. Returns nothing if neither it nor its entry in the parent folder ``above`` exists."""
        try:
            return self._listed(prefix, folder)
        except NotFound as e:
            if isinstance(e, NoBucket):
                raise
            missing = e
        above = above or folder.rpartition("/")[0]
        beside: Sequence[Mapping[str, Any]] = ()
        with unless_missing():
            beside = self._listed(prefix, above) if above else ()
        if any(str(info["name"]).rstrip("/") == folder for info in beside):
            raise Unavailable(
                f"list {self.url}/{prefix}: expected to read {folder}, which its parent lists, got: {missing}"
            )
        return ()

    def _listed(self, prefix: str, folder: str) -> Sequence[Mapping[str, Any]]:
        longest = self._limit(patience=10 * self._patience)
        found: Sequence[Mapping[str, Any]] = self._call(
            "list", prefix, lambda: self._fs.ls(folder, detail=True, **longest)
        )
        return found

    @contextmanager
    def _translating(self, verb: str, name: str) -> Iterator[None]:
        """Translate every library's errors into the store's."""
        fs = self._fs
        try:
            yield
        except HsxError:
            raise
        except Exception as e:  # noqa: BLE001 - every library has its own
            # Do not keep the error in a variable: its frame would refer to it until the garbage collector runs.
            raise self._translated(e, verb, name, fs) from shown_cause(e, self._redact)

    def _translated(self, error: Exception, verb: str, name: str, fs: Any) -> HsxError:
        """Translate a back end's error. ``fs``: the file system that raised it."""
        result = translate(error, f"{verb} {self.url}/{name}", self._bucket, self._redact)
        if verb not in ("put-if-absent", "put-version", "delete-version") and isinstance(result, AlreadyExists):
            result = StoreError(f"{verb} {self.url}/{name}: {self._redact(text_of(error))}")
        return after_renewal(result, lambda: outdated(error) and not self._given_token() and self._renew(fs, error))

    def _call(self, verb: str, name: str, call: Callable[[], T], past_end: T | None = None) -> T:
        with self._translating(verb, name):
            self._check_profile()
            try:
                return call()
            except Exception as e:
                if past_end is not None and past_the_end(e, f"{verb} {self.url}/{name}"):
                    return past_end
                raise

    def _check_profile(self) -> None:
        """Check the endpoint that a profile names. Only the client knows it, and to make one may take requests."""
        if self._s3 and self._unchecked:
            self._fs.connect(**self._limit())
            check_endpoint(str(self._fs.s3.meta.endpoint_url), PROFILES_ENDPOINT)
            self._unchecked = False

    def _given_token(self) -> bool:
        """Whether the options contain a temporary token, which cannot be renewed."""
        more = self._options.get("client_kwargs") or {}
        return bool(self._options.get("token") or more.get("aws_session_token"))

    def _renew(self, fs: Any, error: Exception) -> bool:
        """Look up credentials again at the next call. Returns whether a retry may succeed: not if there were none."""
        with self._lock:
            if self._fs is fs:
                self._fs, self._root = self._connect()
        return expired(error)


def _content(answer: bytes | Exception) -> bytes:
    if isinstance(answer, Exception):
        raise answer
    return answer
