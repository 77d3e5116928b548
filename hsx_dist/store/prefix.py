"""A store over a folder of another store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hsx_dist.store.base import Buffer, ObjectInfo, Store, check_name


class PrefixStore:
    """The objects of ``inner`` below ``folder/``; names are relative to that folder."""

    def __init__(self, inner: Store, folder: str):
        self._inner = inner
        self._folder = f"{check_name(folder)}/"

    @property
    def url(self) -> str:
        return f"{self._inner.url.rstrip('/')}/{self._folder.rstrip('/')}"

    def __repr__(self) -> str:
        return f"PrefixStore({self._inner!r}, {self._folder!r})"

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        self._inner.put(self._full(name), buffers)

    def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
        self._inner.put_if_absent(self._full(name), data)

    def get(self, name: str, most: int | None = None) -> bytes:
        return self._inner.get(self._full(name), most)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return self._inner.get_ranges(self._full(name), ranges)

    def head(self, name: str) -> ObjectInfo:
        return ObjectInfo(name, self._inner.head(self._full(name)).size)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        start = None if after is None else self._folder + after
        return map(self._relative, self._inner.list(self._folder + prefix, start))

    def delete(self, name: str) -> None:
        self._inner.delete(self._full(name))

    def _full(self, name: str) -> str:
        return self._folder + check_name(name)

    def _relative(self, info: ObjectInfo) -> ObjectInfo:
        return ObjectInfo(info.name.removeprefix(self._folder), info.size)
