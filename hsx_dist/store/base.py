"""The store's protocol: methods over whole objects, and helpers that all back ends share.

An object store is not a file system: objects appear whole or not at all, there are no folders, nothing is renamed.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from hsx_dist.config.redaction import redact_text
from hsx_dist.errors import NotFound, StoreError, Unavailable

T = TypeVar("T")

#: Bytes that a back end can send without copying: C-contiguous, of any item type and shape.
Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]

#: Ranges closer than this are fetched in one request: a round trip costs more than the bytes between.
COALESCE_GAP = 64 * 1024
#: Pieces of one upload that are in flight.
PIECES_AT_ONCE = 4
#: Limit of a request's time: ``PATIENCE_S`` plus its bytes at ``SLOWEST_BYTES_S``. The libraries limit only the
#: time without a byte: a server may send a byte a second, or never answer `Expect: 100-continue`.
PATIENCE_S = 60.0
SLOWEST_BYTES_S = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object: its name relative to the store's url, and its size in bytes."""

    name: str
    size: int


@runtime_checkable
class Store(Protocol):
    """Objects under one URL. Thread-safe.

    Names are relative to ``url``, with ``/`` between their parts. An empty or absolute name, or one with ``..``, raises
    ``ValueError``. In addition to the errors below, every method may raise ``Denied`` and ``Unavailable``.
    """

    @property
    def url(self) -> str:
        """URL of the store. It contains no credentials, so messages may show it."""

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Store the concatenation of ``buffers`` atomically. Replaces an object of that name.

        The buffers must not change until the call returns.
        """

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        """Store ``data``, or the concatenation of several buffers, if there is no object of that name.

        If there is one, raises ``AlreadyExists``. Of several concurrent calls exactly one succeeds.
        """

    def get(self, name: str, most: int | None = None) -> bytes:
        """Return the object's bytes, at most the first ``most`` (at least 1), in one request.

        Allocates memory for the bytes that exist, not for ``most``. Raises ``NotFound`` if there is no object.
        """

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes ``[start, stop)`` of each range, in the order of ``ranges``. Close ranges share a request.

        Raises ``NotFound`` if there is no object, and ``ValueError`` if a range is negative or ends past the object.
        """

    def head(self, name: str) -> ObjectInfo:
        """Return the name and size. Raises ``NotFound`` if there is no object."""

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix`` (any string), sorted by name, strictly after ``after``.

        Never uses a cache. An empty store yields nothing; a missing bucket raises ``NotFound``. In a large folder of
        some file systems (tmpfs) an object that is replaced during the call may be missing.
        """

    def delete(self, name: str) -> None:
        """Remove the object. Does nothing if it does not exist."""


@runtime_checkable
class Conditional(Protocol):
    """Optional methods of a store: deletes and puts that leave a newer object as it is.

    ``RetryStore`` has them for every store. They raise ``StoreError`` if the inner store has none.
    """

    def version(self, name: str) -> str:
        """Return a text that changes with every put of other bytes. Raises ``NotFound`` if there is no object."""

    def delete_version(self, name: str, version: str) -> bool:
        """Delete the object if ``version`` is still its version, in one step. Returns whether this call deleted it.

        A missing bucket raises ``NotFound``.
        """

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        """Replace the object if ``version`` is still its version, in one step. Returns whether this call stored it.

        A missing bucket raises ``NotFound``.
        """


@runtime_checkable
class Folders(Protocol):
    """Optional methods of a store whose objects are files in folders. ``RetryStore`` has them for every store.

    ``list`` raises ``Denied`` for a folder that this process may not read, and ``StoreError`` for another error. A
    caller that relies on the absence of an object must see all objects. These methods take a callback instead, for
    callers that judge each object alone.
    """

    def list_readable(self, unreadable: Callable[[str], None], after: str | None = None) -> Iterator[ObjectInfo]:
        """List all objects except those in folders, and behind links, that this process cannot read.

        ``unreadable`` is called with the name of each such folder (``.`` for the root) or link, possibly several times.
        It is also called for the second link to one folder, and for a file whose status cannot be read. Raises
        ``StoreError`` if the root cannot be read.
        """

    def unfinished(
        self, older_than: float = 0.0, unreadable: Callable[[str], None] | None = None
    ) -> Iterator[ObjectInfo]:
        """Yield the temporary files of unfinished puts that did not change within ``older_than`` seconds.

        Killed processes leave such files, but a live process may still write some of them. ``list`` does not show them;
        ``delete`` removes them. Without ``unreadable``, a folder that this process cannot read raises ``StoreError``.
        """


def replaces_conditionally(store: Store) -> bool:
    """Whether ``put_version`` works, tested with a probe object. Some servers ignore the condition.

    Raises:
        StoreError: the store's own errors, also if it has no conditional puts.
    """
    name = f".hsx-probe-{uuid.uuid4().hex}"
    if not isinstance(store, Conditional):
        return False
    try:
        store.put(name, [b"old"])
        old = store.version(name)
        store.put(name, [b"new"])
        spared = not store.put_version(name, [b"x"], old) and probed(store, name) == b"new"
        store.put_version(name, [b"newer"], store.version(name))  # also False if its response was lost
        return spared and probed(store, name) == b"newer"
    finally:
        with suppress(StoreError):
            store.delete(name)


def probed(store: Store, name: str) -> bytes:
    """Return the content of a probe object. The result of a probe is final, so other bytes raise ``Unavailable``."""
    found = store.get(name)
    if found not in (b"new", b"x", b"newer"):
        raise Unavailable(f"{store.url}/{name}: expected a probe object, got other bytes. Check that the store answers")
    return found


def explained_head(store: Store, name: str, head: Callable[[], T]) -> T:
    """Return ``head()``, the answer to a HEAD. After an error, get the first byte of the object to learn the reason.

    The answer to a HEAD has no body. So its status is the same for an expired token, another region and a bad request,
    and for the store's 404 and a gateway's. The error of the GET has the code with which the store's client renews its
    credentials or changes the region.

    Raises:
        NotFound: there is no object.
        Unavailable: a HEAD got 404 for an object that exists, or the call may succeed later.
        StoreError: the GET's error, or that of a second HEAD.
    """
    try:
        return head()
    except Unavailable:
        raise
    except NotFound:
        store.get(name, 1)
    except StoreError:
        store.get(name, 1)
        with suppress(NotFound):
            return head()
    raise Unavailable(
        f"head {store.url}/{name}: expected the store's answer to a HEAD, got 404 for an object that exists. Check the "
        "endpoint's address, the service, and the network to it"
    )


def version_of(store: Store, name: str) -> str | None:
    """Return ``Conditional.version``, or None if the store has no versions. Raises the store's other errors.

    None permits a delete without a condition. So an error such as ``Denied`` must not become None.
    """
    try:
        return store.version(name) if isinstance(store, Conditional) else None
    except NotConditional:
        return None


def stated_size(value: object, where: str) -> int:
    """Return an object's size as a service states it. Raises ``StoreError`` if it states none, or no number."""
    if re.fullmatch("[0-9]{1,18}", str(value)) is None:
        got = "none" if value is None else redact_text(repr(value))[:50]
        raise StoreError(f"{where}: expected the object's size, got {got}. Use a server that states it")
    return int(str(value))


class NotConditional(StoreError):
    """The store or server has no conditional deletes."""


def not_conditional(url: str) -> NotConditional:
    """The error for a store or server without conditional deletes."""
    return NotConditional(
        f"{url}: expected a store with conditional deletes (S3's If-Match, GCS's ifGenerationMatch, a file system with "
        "locks), got one without: a delete could remove an object that a server has just stored anew. Use the bucket's "
        "lifecycle rules, or stop the servers and delete with the store's own tools"
    )


def as_buffers(data: bytes | Sequence[Buffer]) -> Sequence[Buffer]:
    """Return ``data`` as a sequence of buffers."""
    return [data] if isinstance(data, bytes) else data


def as_bytes_view(data: Buffer) -> memoryview:
    """Return ``data`` as a flat memoryview of bytes, without a copy. Raises ``ValueError`` if it is not contiguous."""
    view = _view(data)
    if not view.c_contiguous:
        raise ValueError("expected a C-contiguous buffer, got a strided one. Copy it with np.ascontiguousarray")
    if view.nbytes == 0:
        return memoryview(b"")  # a shape with a zero cannot be cast
    return view.cast("B")


class Gathered:
    """Several buffers as one sequence of bytes. Only slices are copied."""

    def __init__(self, pieces: Sequence[memoryview]):
        self._pieces = pieces
        self._size = sum(piece.nbytes for piece in pieces)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, which: slice) -> bytes:
        start, stop, _ = which.indices(self._size)
        parts: list[memoryview] = []
        at = 0
        for piece in self._pieces:
            if at + piece.nbytes > start and at < stop:
                parts.append(piece[max(0, start - at) : stop - at])
            at += piece.nbytes
        return b"".join(parts)


def _view(data: Buffer) -> memoryview:
    return data.data if isinstance(data, np.ndarray) else memoryview(data)


def check_name(name: str) -> str:
    """Return ``name`` if it cannot leave the store, and a file can have it. Raises ``ValueError`` otherwise."""
    try:
        usable = b"\x00" not in os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        usable = False
    if not name or not usable or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(
            f"expected a relative object name such as 'data/a.bin', got {name!a}: no empty, '.' or '..' parts, and no "
            "NUL or half of a surrogate pair"
        )
    return name


def check_ranges(name: str, ranges: Sequence[tuple[int, int]]) -> None:
    """Raise ``ValueError`` unless every range has ``0 <= start <= stop``."""
    for start, stop in ranges:
        if not 0 <= start <= stop:
            raise ValueError(f"{name}: expected byte ranges with 0 <= start <= stop, got [{start}, {stop})")


def coalesce(ranges: Sequence[tuple[int, int]], gap: int = COALESCE_GAP) -> list[tuple[int, int]]:
    """Return the spans that cover all non-empty ``ranges``. Ranges at most ``gap`` bytes apart share a span."""
    spans: list[tuple[int, int]] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if spans and start - spans[-1][1] <= gap:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return spans


def require_at_most(name: str, most: int, got: int) -> None:
    """Raise ``StoreError`` if the answer to a range request has more bytes than the range.

    Such a server ignores the range and sends the whole object. Readers must not take the object for a damaged one.
    """
    if got > most:
        raise StoreError(
            f"get {name}: expected at most {most} bytes, got at least {got}: the server ignores range requests. Use a "
            "server that supports them, or copy the objects to a folder"
        )


def cut(
    name: str, ranges: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], contents: Sequence[Buffer]
) -> list[memoryview]:
    """Return ``ranges`` as views into the fetched ``contents`` of ``spans`` (sorted, from ``coalesce``).

    Raises ``ValueError`` if a content is shorter than its span: the object ends before the range does. Raises
    ``StoreError`` as ``require_at_most``.
    """
    views = [_view(content) for content in contents]
    for (start, stop), view in zip(spans, views, strict=True):
        require_at_most(name, stop - start, view.nbytes)
        if view.nbytes != stop - start:
            raise ValueError(
                f"{name}: expected {stop - start} bytes at [{start}, {stop}), got {view.nbytes}: the object is shorter"
            )
    found: list[memoryview] = []
    for start, stop in ranges:
        if start == stop:
            found.append(memoryview(b""))
            continue
        k = next(k for k, (a, b) in enumerate(spans) if a <= start and stop <= b)
        found.append(views[k][start - spans[k][0] : stop - spans[k][0]])
    return found
