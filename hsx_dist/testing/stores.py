"""A store for tests: objects in this process's memory, and counts of reads."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence

from hsx_dist.errors import AlreadyExists, NotFound
from hsx_dist.store.base import Buffer, ObjectInfo, as_bytes_view, check_name, check_ranges, coalesce, cut


class MemoryStore:
    """A ``Store`` in a dict. ``requests`` and ``bytes_read`` count reads, one request for each coalesced span."""

    def __init__(self, url: str = "test://memory"):
        self.url = url
        self.objects: dict[str, bytes] = {}
        self.requests = 0
        self.bytes_read = 0
        self._lock = threading.Lock()

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        content = b"".join(as_bytes_view(b) for b in buffers)
        with self._lock:
            self.objects[check_name(name)] = content

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        data = data if isinstance(data, bytes) else b"".join(map(as_bytes_view, data))
        with self._lock:
            if self.objects.setdefault(check_name(name), data) is not data:
                raise AlreadyExists(f"{self.url}/{name}: expected no such object, got one")

    def get(self, name: str, most: int | None = None) -> bytes:
        content = self._content(name)[:most]
        self._count(1, len(content))
        return content

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        content = self._content(name)
        check_ranges(name, ranges)
        spans = coalesce(ranges)
        contents = [content[a:b] for a, b in spans]
        self._count(len(spans), sum(map(len, contents)))
        return cut(name, ranges, spans, contents)

    def head(self, name: str) -> ObjectInfo:
        content = self._content(name)
        self._count(1, 0)
        return ObjectInfo(name, len(content))

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        with self._lock:
            names = sorted(n for n in self.objects if n.startswith(prefix) and (after is None or n > after))
            found = [ObjectInfo(n, len(self.objects[n])) for n in names]
        return iter(found)

    def delete(self, name: str) -> None:
        with self._lock:
            self.objects.pop(name, None)

    def version(self, name: str) -> str:
        return hashlib.sha256(self._content(name)).hexdigest()

    def delete_version(self, name: str, version: str) -> bool:
        with self._lock:
            content = self.objects.get(name)
            if content is None or hashlib.sha256(content).hexdigest() != version:
                return False
            del self.objects[name]
            return True

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        new = b"".join(as_bytes_view(b) for b in buffers)
        with self._lock:
            content = self.objects.get(name)
            if content is None or hashlib.sha256(content).hexdigest() != version:
                return False
            self.objects[name] = new
            return True

    def reset(self) -> None:
        """Reset the counts to zero."""
        self.requests = self.bytes_read = 0

    def _content(self, name: str) -> bytes:
        with self._lock:
            if name not in self.objects:
                raise NotFound(f"{self.url}/{name}: there is no such object")
            return self.objects[name]

    def _count(self, requests: int, nbytes: int) -> None:
        with self._lock:
            self.requests += requests
            self.bytes_read += nbytes
