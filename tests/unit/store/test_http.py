"""Runs behind an HTTP server: it lists without sizes, and it may ignore range requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.errors import StoreError
from hsx_dist.format.container import Part
from hsx_dist.store import open_store
from hsx_dist.store.base import Store, cut


class Whole(SimpleHTTPRequestHandler):
    """Python's own server. It sends the whole object for every range."""

    def log_message(self, *_args: Any) -> None:
        pass


class WithoutSize(Whole):
    """A server that does not state an object's size."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword.lower() != "content-length":
            super().send_header(keyword, value)


@contextmanager
def served(folder: Path, handler: type[Whole]) -> Iterator[Store]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield open_store(f"http://127.0.0.1:{server.server_address[1]}/run", retry_seconds=0)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run" / "below").mkdir(parents=True)
    (tmp_path / "run" / "below" / "part").write_bytes(bytes(range(100)))
    return tmp_path


def test_a_listing_without_sizes_has_the_sizes_of_the_objects(folder: Path) -> None:
    with served(folder, Whole) as store:
        assert [(info.name, info.size) for info in store.list()] == [("below/part", 100)]


def test_an_object_without_a_size_is_an_error_of_the_store(folder: Path) -> None:
    with served(folder, WithoutSize) as store:
        with pytest.raises(StoreError, match="expected the object's size, got none"):
            store.head("below/part")
        with pytest.raises(StoreError, match="expected the object's size, got none"):
            list(store.list())


def test_a_server_that_ignores_ranges_is_named_and_no_object_is_called_damaged(folder: Path) -> None:
    with served(folder, Whole) as store:
        assert store.get("below/part", 100) == bytes(range(100))
        assert store.get("below/part", 1000) == bytes(range(100))
        for read in (
            lambda: store.get("below/part", 99),
            lambda: store.get_ranges("below/part", [(0, 8)]),
            lambda: store.get_ranges("below/part", [(10, 20)]),
            lambda: Part.open(store, "below/part"),
        ):
            with pytest.raises(StoreError, match=r"below/part: expected at most .* the server ignores range requests"):
                read()


def test_a_range_of_several_requests_that_is_too_long_is_an_error_of_the_store() -> None:
    with pytest.raises(StoreError, match="ignores range requests"):
        cut("a", [(0, 2), (8, 9)], [(0, 2), (8, 9)], [b"ab", b"abcdefghi"])
