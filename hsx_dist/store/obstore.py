"""Objects through obstore: the fast back end for S3, GCS and Azure. A put sends the caller's buffers without a copy."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from hsx_dist.config.urls import public_url
from hsx_dist.errors import AlreadyExists, HsxError, NotFound, StoreError, Unavailable, is_error
from hsx_dist.store.base import (
    PATIENCE_S,
    PIECES_AT_ONCE,
    SLOWEST_BYTES_S,
    Buffer,
    ObjectInfo,
    as_buffers,
    as_bytes_view,
    check_name,
    check_ranges,
    coalesce,
    cut,
    explained_head,
    not_conditional,
    require_at_most,
)
from hsx_dist.store.faults import (
    NoBucket,
    Redactor,
    after_renewal,
    expired,
    past_the_end,
    redirected,
    shown_cause,
    translate,
    unless_missing,
)
from hsx_dist.store.local import LocalStore
from hsx_dist.store.obstore_connection import Connection, NotTranslated
from hsx_dist.store.obstore_options import connect
from hsx_dist.store.pages import name_below, put_in_order, without_markers

if TYPE_CHECKING:
    from hsx_dist.store.fsspec import FsspecStore

T = TypeVar("T")

#: Size of a piece of an upload. Smaller objects are uploaded in one request.
_PIECE = 8 << 20
#: Schemes whose conditional deletes and listings are fsspec's.
_CHECKED = ("s3", "s3a", "gs", "gcs")
#: Concurrent range requests of all reading threads.
_RANGES_AT_ONCE = 32
#: Sizes up to which a request is rounded for its time limit: 64 MiB to 1 TiB. There are few because each limit has a
#: client, which keeps a thread, descriptors and memory, and because receipts and headers may claim any size.
_SIZES = tuple((64 << 20) * 4**k for k in range(8))
_stores: weakref.WeakSet[ObstoreStore] = weakref.WeakSet()
#: In a forked process, the stores of its parent. Their destructors would use obstore's runtime too.
_inherited: list[ObstoreStore] = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_stores))


class ObstoreStore:
    """A ``Store`` over obstore, for ``s3``, ``gs`` and ``az``; ``file`` is for tests without a server.

    ``options`` are those of fsspec's file system for the scheme. Credentials, endpoint and region are resolved as by
    that file system. A request's limit is ``patience`` seconds, ten times that if the size is unknown, and a second for
    every MiB, rounded up to one of few sizes. A longer request raises ``Unavailable``.

    Only the process that made the store can use it (see ``require_own_obstore``). Calls in a forked process raise
    ``StoreError``.

    Raises:
        NotTranslated: obstore has no counterpart of an option, or changes a part of the URL's path; use fsspec.
        ConfigError: a package is missing, or an option has a wrong type.
        StoreError: the credentials cannot be resolved (``Denied``).
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, patience: float = PATIENCE_S):
        self._pid = os.getpid()
        self._scheme = url.partition("://")[0]
        self._url = public_url(url).rstrip("/")
        place = self._url.partition("://")[2]
        # For files the bucket is the folder's path. The first put makes the folder.
        self._bucket, _, root = (place, "", "") if self._scheme == "file" else place.partition("/")
        self._root = f"{root}/" if root else ""
        if self._scheme != "file" and not {"", ".", ".."}.isdisjoint(place.split("/")):
            raise NotTranslated("the URL has an empty part, '.' or '..', which only fsspec stores as written")
        self._options = dict(options or {})
        self._patience = patience
        self._redact = Redactor(self._options, os.environ)
        self._lock = threading.Lock()
        self._full_url = url
        self._slow: FsspecStore | None = None
        self._clients: dict[tuple[float, int], Any] = {}
        self._pool = ThreadPoolExecutor(_RANGES_AT_ONCE, thread_name_prefix="hsx-ranges")
        _stores.add(self)
        self._connection = self._connect()
        self._require_client()

    @property
    def url(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"ObstoreStore({self._url!r})"

    # -- the verbs -----------------------------------------------------------------------------------------------

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        path = self._path(name)
        views = [view for view in map(as_bytes_view, buffers) if view.nbytes]
        size = sum(v.nbytes for v in views)
        whole = size < 2 * _PIECE
        pieces = {"use_multipart": False} if whole else {"chunk_size": _PIECE, "max_concurrency": PIECES_AT_ONCE}
        self._call("put", name, lambda obs, client: obs.put(
            client, path, views, **pieces, **self._described()
        ), nbytes=size if whole else _PIECE)  # fmt: skip

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        path = self._path(name)
        views = [view for view in map(as_bytes_view, as_buffers(data)) if view.nbytes]
        size = sum(view.nbytes for view in views)
        # Without obstore's retries: if a response is lost, a retry would find this call's object and report it as
        # another writer's.
        self._call("put-if-absent", name, lambda obs, client: obs.put(
            client, path, views, mode="create", use_multipart=False, **self._described()
        ), nbytes=size, retries=0)  # fmt: skip

    def get(self, name: str, most: int | None = None) -> bytes:
        path = self._path(name)
        if most is not None:
            # Each time limit has a separate client with separate connections: small objects share those of ``head``.
            return self._call(
                "get",
                name,
                lambda obs, client: self._first_bytes(name, obs.get(client, path, options={"range": (0, most)}), most),
                nbytes=most if most > _PIECE else 0,
                past_end=b"",  # an empty object
            )
        return self._call(
            "get", name, lambda obs, client: obs.get(client, path).bytes().to_bytes(), nbytes=None
        )  # the size is unknown

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        path = self._path(name)
        check_ranges(name, ranges)
        spans = coalesce(ranges)
        largest = max((stop - start for start, stop in spans), default=0)

        def fetch(span: tuple[int, int]) -> memoryview:
            # One request per span: obstore's get_ranges would also fetch gaps of up to a MiB.
            return self._call(
                "get",
                name,
                lambda obs, client: memoryview(obs.get_range(client, path, start=span[0], end=span[1])),
                nbytes=largest,
                past_end=memoryview(b""),
            )

        contents = list(self._pool.map(fetch, spans)) if len(spans) > 1 else [fetch(span) for span in spans]
        return cut(f"{self.url}/{name}", ranges, spans, contents)

    def head(self, name: str) -> ObjectInfo:
        path = self._path(name)
        found = explained_head(self, name, lambda: self._call("head", name, lambda obs, client: obs.head(client, path)))
        return ObjectInfo(name, int(found["size"]))

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        if self._scheme in _CHECKED:
            # obstore takes any XML, and some pages of a gateway, for the last page of a listing.
            yield from self._through_fsspec().list(prefix, after)
            return
        where = f"list {self.url}/{prefix}"
        for info in put_in_order(without_markers(self._entries(prefix), self._is_marker), where):
            if info.name.startswith(prefix) and (after is None or info.name > after):
                yield info

    def delete(self, name: str) -> None:
        path = self._path(name)
        if self._scheme == "file":
            LocalStore(self._bucket).delete(name)  # obstore's delete follows links
            return
        with unless_missing():
            self._call("delete", name, lambda obs, client: obs.delete(client, path))

    def version(self, name: str) -> str:
        return self._through_fsspec().version(name)

    def delete_version(self, name: str, version: str) -> bool:
        return self._through_fsspec().delete_version(name, version)

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        """See ``Conditional``. Some servers ignore the condition: see ``replaces_conditionally``."""
        if self._scheme not in _CHECKED:
            raise not_conditional(self.url)
        path = self._path(name)
        views = [view for view in map(as_bytes_view, buffers) if view.nbytes]
        size = sum(view.nbytes for view in views)
        mode = {"e_tag": version} if self._scheme in ("s3", "s3a") else {"version": version}
        with suppress(AlreadyExists), unless_missing():
            # Without obstore's retries, as in ``put_if_absent``.
            self._call("put-version", name, lambda obs, client: obs.put(
                client, path, views, mode=mode, use_multipart=False, **self._described()
            ), nbytes=size, retries=0)  # fmt: skip
            return True
        return False

    # -- how -----------------------------------------------------------------------------------------------------

    def _through_fsspec(self) -> FsspecStore:
        """Return a ``FsspecStore`` of the same URL, for conditional deletes and checked listings."""
        if self._scheme not in _CHECKED:
            raise not_conditional(self.url)
        from hsx_dist.store.fsspec import FsspecStore

        self._require_process()
        with self._lock:
            if self._slow is None:
                # obstore ignores the option. Of an asynchronous file system each call of ``FsspecStore`` fails.
                options = {**self._options, "asynchronous": False}
                self._slow = FsspecStore(self._full_url, options, patience=self._patience)
            return self._slow

    def _connect(self, region: str | None = None) -> Connection:
        try:
            return connect(self._scheme, self._bucket, self._options, region)
        except (NotTranslated, HsxError):
            raise
        except Exception as e:  # noqa: BLE001 - each library that resolves credentials has its own errors
            raise translate(e, f"open {self._url}", self._bucket, self._redact) from shown_cause(e, self._redact)

    def _require_client(self) -> None:
        """Make the client of most calls. Raises ``NotTranslated`` for a setting that obstore refuses."""
        if self._scheme == "file":
            return  # obstore makes the folder
        try:
            self._client(self._seconds(0), self._connection.max_retries)
        except BaseException as e:
            if not is_error(e):
                raise
            why = translate(e, f"open {self._url}", self._bucket, self._redact)
            raise NotTranslated(f"obstore refuses the settings: {why}") from shown_cause(e, self._redact)

    def _client(self, seconds: float, retries: int) -> Any:
        """Return the client for a time limit: obstore's time-outs belong to a client."""
        with self._lock:
            client = self._clients.get((seconds, retries))
            if client is None:
                options = {"timeout": timedelta(seconds=seconds), **self._connection.client_options}
                # Few quick retries: RetryStore does the long ones, with a time limit.
                retry = {
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=self._patience / 2),
                    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2)},
                }
                client = self._clients[seconds, retries] = self._connection.make(options, retry)
            return client

    def _first_bytes(self, name: str, answer: Any, most: int) -> bytes:
        """Return an answer's body. Raises ``StoreError`` at the first byte too many: the body may be of any length."""
        pieces: list[bytes] = []
        size = 0
        for piece in answer.stream(min_chunk_size=min(most, _PIECE)):
            pieces.append(piece)
            size += len(piece)
            require_at_most(f"{self.url}/{name}", most, size)
        start, stop = answer.range
        if size != stop - start:  # the resumption of a broken download may state no length
            raise Unavailable(
                f"{self.url}/{name}: expected the {stop - start} bytes that the answer states, got {size}. Try again"
            )
        return b"".join(pieces)

    def _seconds(self, nbytes: int | None) -> float:
        if nbytes is None:
            return 10 * self._patience
        if nbytes <= SLOWEST_BYTES_S:
            return self._patience
        return self._patience + next((n for n in _SIZES if nbytes <= n), _SIZES[-1]) / SLOWEST_BYTES_S

    def _require_process(self) -> None:
        if self._pid != os.getpid():
            raise StoreError(
                f"{self._url}: expected the process that opened the store, got a process forked from it. Open the "
                "store again in this process, or start processes with spawn"
            )

    def _path(self, name: str) -> str:
        self._require_process()
        return self._root + check_name(name)

    def _described(self) -> dict[str, Any]:
        c = self._connection
        return {
            **({"attributes": dict(c.attributes)} if c.attributes else {}),
            **({"tags": dict(c.tags)} if c.tags else {}),
        }

    def _entries(self, prefix: str) -> Iterator[ObjectInfo]:
        where = f"list {self.url}/{prefix}"
        folder = (self._root + prefix).rpartition("/")[0]  # obstore's prefixes are complete components
        stream = self._call("list", prefix, lambda obs, client: obs.list(client, prefix=folder or None), nbytes=None)
        # One call per page: the error of any page is translated.
        while (page := self._call("list", prefix, lambda *_: next(stream, None))) is not None:
            for entry in page:
                path = str(entry["path"])
                if path != folder:  # the folder's own marker
                    yield ObjectInfo(name_below(self._root, path, where), int(entry["size"]))

    def _is_marker(self, name: str) -> bool:
        """Whether a listed name without bytes is a console's folder marker: obstore drops the slash at its end."""
        try:
            self.head(name)
        except NoBucket:
            raise
        except NotFound:
            return True
        return False

    def _call(
        self,
        verb: str,
        name: str,
        call: Callable[[Any, Any], T],
        *,
        nbytes: int | None = 0,
        retries: int | None = None,
        past_end: T | None = None,
    ) -> T:
        """Return ``call(obstore, client)``. Translates its errors into the store's."""
        self._require_process()
        import obstore

        connection = self._connection
        try:
            client = self._client(self._seconds(nbytes), connection.max_retries if retries is None else retries)
            return call(obstore, client)
        except HsxError:
            raise
        except BaseException as e:
            if not is_error(e):
                raise
            if past_end is not None and past_the_end(e, f"{verb} {self.url}/{name}"):
                return past_end
            self._redact.learn(connection.secrets)
            # Do not keep the error in a variable: its frame would refer to it until the garbage collector runs, and the
            # error keeps the buffers of the put.
            raise self._translated(e, verb, name, connection) from shown_cause(e, self._redact)

    def _translated(self, error: BaseException, verb: str, name: str, connection: Connection) -> HsxError:
        """Translate a back end's error into the store's."""
        where = f"{verb} {self.url}/{name}"
        result = translate(error, where, self._bucket, self._redact)
        if verb not in ("put-if-absent", "put-version") and isinstance(result, AlreadyExists):
            result = StoreError(f"{where}: {self._redact(str(error).splitlines()[0])}")
        return after_renewal(result, lambda: self._mended(error, where, connection))

    def _mended(self, error: BaseException, where: str, failed: Connection) -> bool:
        """Look up the region or the credentials again. Returns whether a retry of the call may succeed."""
        region = None
        if redirected(error, where):
            region = failed.region()
            if region is None:
                return False
        elif not (expired(error, where) and failed.renewable):
            return False
        with self._lock:
            if self._connection is failed:
                self._connection = self._connect(region)
                self._clients.clear()
                self._slow = None
        return True
