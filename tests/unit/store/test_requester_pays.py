"""A bucket whose requesters pay refuses each request that does not name its payer."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from s3fs import S3FileSystem

from hsx_dist.store import Store, open_store
from hsx_dist.store.base import Conditional
from hsx_dist.store.opening import Backend
from tests.harness.http_server import Answers, entry, listing, s3_options, served

TIME = "Thu, 01 Jan 2026 00:00:00 GMT"


class Bucket(Answers):
    """Has the object ``r/a``. It keeps the payer that each request names."""

    payers: ClassVar[list[tuple[str, str | None]]]

    def do_GET(self) -> None:
        self.received()
        self.payers.append((f"{self.command} {self.path}", self.headers.get("x-amz-request-payer")))
        if "list-type" in self.path:
            self.answer(200, listing([entry("r/a")]), Content_Type="application/xml")
        elif "Range" in self.headers:
            self.answer(206, b"x", ETag='"1"', Last_Modified=TIME, Content_Range="bytes 0-0/1")
        elif self.command == "DELETE":
            self.answer(204)
        else:
            self.answer(200, b"x" if self.command in ("GET", "HEAD") else b"", ETag='"1"', Last_Modified=TIME)

    do_HEAD = do_PUT = do_DELETE = do_GET


def _use(store: Store) -> None:
    assert [info.name for info in store.list()] == ["a"]
    assert store.head("a").size == 1
    assert (store.get("a"), store.get("a", 1)) == (b"x", b"x")
    assert [bytes(view) for view in store.get_ranges("a", [(0, 1)])] == [b"x"]
    store.put("a", [b"x"])
    store.put_if_absent("a", b"x")
    assert isinstance(store, Conditional)
    assert store.put_version("a", [b"x"], store.version("a"))
    assert store.delete_version("a", '"1"')
    store.delete("a")


def _as_before(fs: S3FileSystem, method: Any, *more: dict[str, Any], **arguments: Any) -> Any:
    """s3fs 2025.2's arguments of a request: its own methods add the payer, and other callers must."""
    merged = dict(fs.s3_additional_kwargs)
    for one in more:
        merged.update(one)
    return fs._filter_kwargs(method, {**merged, **arguments})


@pytest.mark.parametrize("version", ["2025.2", "installed"])
@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_each_request_names_its_payer(monkeypatch: pytest.MonkeyPatch, backend: Backend, version: str) -> None:
    if version == "2025.2":
        monkeypatch.setattr(S3FileSystem, "_get_s3_method_kwargs", _as_before)
    monkeypatch.setattr(Bucket, "payers", [], raising=False)
    with served(Bucket) as url:
        _use(open_store("s3://b/r", {**s3_options(url), "requester_pays": True}, backend=backend, retry_seconds=0))
    assert len(Bucket.payers) > 8
    assert [request for request, payer in Bucket.payers if payer != "requester"] == []
