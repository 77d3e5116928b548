"""A service of S3 whose answers lack a member, or have a wrong one, raises the store's error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hsx_dist.errors import AlreadyExists, NotFound, StoreError, Unavailable
from hsx_dist.format.presence import exists
from hsx_dist.store import Store, open_store
from hsx_dist.store.base import Conditional, ObjectInfo, stated_size, version_of
from hsx_dist.store.faults import NoBucket
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.obstore import ObstoreStore
from hsx_dist.store.opening import Backend
from hsx_dist.store.retry import RetryPolicy, RetryStore
from hsx_dist.store.upload_answers import require_stored
from hsx_dist.testing.stores import MemoryStore
from tests.harness.http_server import Answers, listing, s3_options, served


class Odd(Answers):
    """Answers HEAD without size and ETag, and lists one object with ``members``."""

    members = ""
    date = "Wed, 01 Jan 2025 00:00:00 GMT"

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Last-Modified", self.date)
        self.end_headers()

    def do_GET(self) -> None:
        if "list-type" not in self.path:
            return self.answer(206, b"x", Content_Range="bytes 0-0/1", ETag='"e"', Last_Modified=self.date)
        date = "<LastModified>2025-01-01T00:00:00.000Z</LastModified>"
        return self.answer(200, listing([f"<Contents>{date}{self.members}</Contents>"]))


@pytest.fixture
def options() -> Iterator[dict[str, str]]:
    with served(Odd) as url:
        yield s3_options(url)


def _version(store: Store) -> str:
    assert isinstance(store, Conditional)
    return store.version("a")


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("members", "call"),
    [
        ("", lambda store: store.head("a")),
        ("<Key>r/a</Key>", lambda store: list(store.list())),
        ("<Key>r/a</Key><Size>-5</Size>", lambda store: list(store.list())),
        ("<Key>r/a</Key><Size>abc</Size>", lambda store: list(store.list())),
        ("<Size>3</Size>", lambda store: list(store.list())),
        ("", _version),
    ],
)
def test_an_odd_answer_is_a_store_error(
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    backend: Backend,
    members: str,
    call: Callable[[Store], Any],
) -> None:
    monkeypatch.setattr(Odd, "members", members)
    with pytest.raises(StoreError, match="conditional deletes" if call is _version else "a: |list ") as told:
        call(open_store("s3://b/r", options, backend=backend, retry_seconds=0))
    assert not told.value.retryable


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_gateways_page_does_not_make_a_store_one_without_versions(backend: Backend) -> None:
    """Without a version, an object is deleted and replaced without a condition."""

    class PagedOnce(Answers):
        asked = 0

        def do_HEAD(self) -> None:
            PagedOnce.asked += 1
            if PagedOnce.asked == 1:
                return self.answer(200, b"<html>Down for a moment</html>", Content_Type="text/html")
            return self.answer_object(200, b"x")

    with served(PagedOnce) as url:
        store = open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=0)
        with pytest.raises(Unavailable, match="ETag"):
            version_of(store, "a")
        assert version_of(store, "a") == '"1"'


class Unproven(Answers):
    """Answers every request with ``status`` and ``body``, as a page to log in does. Begins uploads in pieces."""

    status, body = 200, b""
    begun = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"

    def do_GET(self) -> None:
        self.received()
        body = self.begun if self.path.endswith("?uploads") else self.body
        self.answer(self.status, body, **({"ETag": '"e"'} if "partNumber=" in self.path else {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self.do_GET
        raise AttributeError(name)


@pytest.mark.parametrize("status", [200, 206])
@pytest.mark.parametrize(
    "call",
    [lambda store: store.get("a", 3), lambda store: bytes(store.get_ranges("a", [(0, 3)])[0])],
    ids=["get", "ranges"],
)
def test_a_range_that_a_gateway_answers_with_a_page_is_asked_for_again(
    status: int, call: Callable[[Store], bytes]
) -> None:
    pages = [b"<html>Log in</html>"]

    class PagedOnce(Answers):
        def do_GET(self) -> None:
            if pages:
                self.answer(status, pages.pop())
            else:
                self.answer(
                    206, b"abc", Content_Range="bytes 0-2/3", ETag='"e"', Last_Modified="Wed, 01 Jan 2025 00:00:00 GMT"
                )

    with served(PagedOnce) as url:
        assert call(open_store("s3://b/r", s3_options(url), backend="obstore", retry_seconds=5)) == b"abc"
    assert not pages


class TooLong(Answers):
    """Names the asked part, and sends 64 MiB."""

    sent = 0

    def do_GET(self) -> None:
        self.send_response(206)
        for name, value in (("Content-Range", "bytes 0-9/100"), ("Content-Length", str(64 << 20)), ("ETag", '"e"')):
            self.send_header(name, value)
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.end_headers()
        with suppress(OSError):
            for TooLong.sent in range(1, 65):
                self.wfile.write(bytes(1 << 20))
        self.close_connection = True


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_body_is_read_to_the_first_byte_too_many(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    monkeypatch.setattr(TooLong, "sent", 0)
    with served(TooLong) as url:
        store = open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=0)
        with pytest.raises(StoreError, match=r"expected at most 10 bytes|expected the bytes \[0, 10\) as a part"):
            store.get("a", 10)
    assert TooLong.sent < 64


_MISSING = b'<?xml version="1.0"?>\n<Error><Code>NoSuchKey</Code><Message>no</Message></Error>'


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"<html><hr><center>nginx</center></html>", Unavailable),
        (b"default backend - 404", Unavailable),
        (b'{"error": {"code": 404, "message": "no Route matched with those values"}}', Unavailable),
        (b"<Error><Code>RouteNotFound</Code><Message>no upstream</Message></Error>", Unavailable),
        (b"<Error><Code>NoSuchBucket</Code></Error>", NoBucket),
        (_MISSING, NotFound),
        (b"", NotFound),
    ],
)
def test_only_a_404_of_the_store_says_that_there_is_no_object(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, body: bytes, kind: type[StoreError]
) -> None:
    """An ingress without rules answers 404 too."""
    calls: list[Callable[[Any], Any]] = [
        lambda store: store.get("a"),
        lambda store: store.get_ranges("a", [(0, 3), (1 << 20, 2 << 20)]),
        lambda store: store.put("a", [b"x"]),
        lambda store: list(store.list()),
        lambda store: store.head("a"),
        lambda store: store.version("a"),
    ]
    without: list[Callable[[Any], Any]] = [
        lambda store: store.delete("a"),
        lambda store: store.delete_version("a", "1"),
        lambda store: store.put_version("a", [b"x"], "1"),
    ]
    monkeypatch.setattr(Unproven, "status", 404)
    monkeypatch.setattr(Unproven, "body", body)
    with served(Unproven) as url:
        store = open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=0)
        for call in calls:
            with pytest.raises(kind):
                call(store)
        for call in without:
            with nullcontext() if kind is NotFound else pytest.raises(kind):
                assert not call(store)


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize("content", [b"", b"abc"])
def test_a_404_to_a_head_is_confirmed_by_a_get(backend: Backend, content: bytes) -> None:
    """The answer to a HEAD has no body that shows who sent it."""
    requests: list[str] = []
    pages: list[int] = []

    class PagedOnce(Answers):
        def do_HEAD(self) -> None:
            requests.append("HEAD")
            if not self.path.startswith("/b/r/a"):
                self.answer(404)
            elif pages:
                self.answer(pages.pop(), b"default backend - 404")
            else:
                self.answer_object(200, content)

        def do_GET(self) -> None:
            requests.append("GET")
            if not self.path.startswith("/b/r/a"):
                self.answer(404, _MISSING)
            elif content:
                self.answer(
                    206, b"a", Content_Range="bytes 0-0/3", ETag='"1"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT"
                )
            else:
                self.answer(416, b"<Error><Code>InvalidRange</Code></Error>")

    with served(PagedOnce) as url:
        store = open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=5)
        for call, answer in ((lambda: store.head("a").size, len(content)), (lambda: _version(store), '"1"')):
            pages.append(404)
            assert call() == answer
            assert requests == ["HEAD", "GET", "HEAD"]
            requests.clear()
            assert call() == answer
            assert requests == ["HEAD"]  # no more requests for an object that exists
            requests.clear()
        assert exists(store, "a")
        assert not exists(store, "b")
        assert requests == ["GET", "GET"]


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize("call", [lambda store: store.head("a"), _version], ids=["head", "version"])
def test_a_404_to_a_second_head_does_not_outweigh_a_get(backend: Backend, call: Callable[[Store], Any]) -> None:
    statuses = [404, 400]

    class Expired(Answers):
        def do_HEAD(self) -> None:
            # After a 400, botocore asks for the bucket's region.
            self.answer(statuses.pop() if self.path.startswith("/b/r/a") else 404)

        def do_GET(self) -> None:
            self.answer(206, b"x", Content_Range="bytes 0-0/1", ETag='"1"', Last_Modified=Odd.date)

    with served(Expired) as url:
        store = open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=0)
        with pytest.raises(Unavailable, match="404 for an object that exists"):
            call(store)
    assert not statuses


class LostBucket(MemoryStore):
    """A store whose bucket is removed after a put."""

    def head(self, name: str) -> ObjectInfo:
        raise NoBucket(f"head {self.url}/{name}: there is no bucket")


def test_a_removed_bucket_is_not_a_missing_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise the cause is unknown, or a listing has no objects."""
    lost = LostBucket("s3://b/r")
    with pytest.raises(NoBucket):
        require_stored(lost, "a", None, 3)
    lost.put("a", [b"x"])
    answers: list[StoreError] = [AlreadyExists("exists"), Unavailable("lost")]
    monkeypatch.setattr(lost, "put_if_absent", lambda *_: (_ for _ in ()).throw(answers.pop()))
    with pytest.raises(NoBucket):
        RetryStore(lost, RetryPolicy(seconds=5, first_pause=0.001)).put_if_absent("a", b"x")

    marked = ObstoreStore(f"file://{tmp_path}")
    monkeypatch.setattr(marked, "head", lost.head)
    with pytest.raises(NoBucket):
        marked._is_marker("a")

    listed = FsspecStore("memory://b/r")
    monkeypatch.setattr(listed, "head", lost.head)
    monkeypatch.setattr(listed, "_listed", lambda *_: [{"name": f"{listed._root}/a", "type": "file", "size": None}])
    with pytest.raises(NoBucket):
        list(listed.list())
    missing: list[StoreError] = [NoBucket("no bucket"), NotFound("no folder")]
    monkeypatch.setattr(listed, "_listed", lambda *_: (_ for _ in ()).throw(missing.pop()))
    with pytest.raises(NoBucket):
        list(listed.list())


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_304_does_not_say_that_an_object_exists(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    monkeypatch.setattr(Unproven, "status", 304)
    with served(Unproven) as url:
        store: Any = open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=0)
        for call in (lambda: store.put_if_absent("a", b"x"), lambda: store.put_version("a", [b"x"], "1")):
            with pytest.raises(StoreError, match="304") as told:
                call()
            assert type(told.value) is StoreError


_EXISTS = b'<?xml version="1.0"?>\n<Error><Code>PreconditionFailed</Code><Message>no</Message></Error>'


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("status", "body", "of_the_store"),
    [
        (412, b"<html>Blocked</html>", False),
        (409, b"<html>Blocked</html>", False),
        (409, b'{"message": "Conflict"}', False),
        (412, b'{"error": {"code": 412, "message": "Blocked"}}', False),
        (412, b"<Error><Code>RequestBlocked</Code></Error>", False),
        (409, b"<Error><Code>RequestBlocked</Code></Error>", False),
        (412, _EXISTS, True),
        (412, b"", True),
    ],
)
def test_only_the_store_says_that_a_condition_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, status: int, body: bytes, of_the_store: bool
) -> None:
    """A caller takes the object for stored by another writer, and no retry stores it."""
    monkeypatch.setattr(Unproven, "status", status)
    monkeypatch.setattr(Unproven, "body", body)
    with served(Unproven) as url:
        store: Any = open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=0)
        with pytest.raises(AlreadyExists if of_the_store else Unavailable):
            store.put_if_absent("a", b"x")
        for call in (lambda: store.put_version("a", [b"x"], "1"), lambda: store.delete_version("a", "1")):
            with nullcontext() if of_the_store else pytest.raises(Unavailable):
                assert not call()


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_only_the_store_says_that_an_object_is_empty_or_shorter(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    """A reader takes such an object for a damaged one, and no retry reads it."""
    monkeypatch.setattr(Unproven, "status", 416)
    with served(Unproven) as url:
        store = open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=0)
        for body in (b"", b"<Error><Code>InvalidRange</Code></Error>"):
            monkeypatch.setattr(Unproven, "body", body)
            assert store.get("a", 3) == b""
            with pytest.raises(ValueError, match="the object is shorter"):
                store.get_ranges("a", [(0, 3)])
        other = (b"<html>No</html>", b'{"message": "No"}', b"<Error><Code>RequestBlocked</Code></Error>")
        for status, body in (*((416, body) for body in other), (503, b"<Error><Code>InvalidRange</Code></Error>")):
            monkeypatch.setattr(Unproven, "status", status)
            monkeypatch.setattr(Unproven, "body", body)
            for call in (lambda: store.get("a", 3), lambda: store.get_ranges("a", [(0, 3)])):
                with pytest.raises(Unavailable):
                    call()


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.put("a", [b"x"]),
        lambda store: store.put("a", [bytes(32 << 20)]),
        lambda store: store.put_if_absent("a", b"x"),
        lambda store: store.put_version("a", [b"x"], '"e"'),
    ],
    ids=["put", "in pieces", "if absent", "version"],
)
def test_an_answer_that_states_no_object_is_a_failed_upload(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, call: Callable[[Store], Any]
) -> None:
    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    refusal = b"<Error><Code>InvalidArgument</Code></Error>"
    with served(Unproven) as url:
        store = open_store("s3://b/r", s3_options(url) | once, backend=backend, retry_seconds=0)
        for status, body in ((200, b""), (204, b""), (200, b"<html>Log in</html>"), (200, refusal)):
            monkeypatch.setattr(Unproven, "status", status)
            monkeypatch.setattr(Unproven, "body", body)
            with pytest.raises(StoreError, match=r"put.* s3://b/r/a: ") as told:
                call(store)
            assert told.value.retryable or (backend == "fsspec" and body == refusal)


class Stored(Answers):
    """Stores one object. Answers the first request of ``paged`` with a page of a static file."""

    paged = ""
    pages = 0
    stored = b""
    parts: ClassVar[list[bytes]] = []

    def do_PUT(self) -> None:
        body = self.received()
        if not self._page():
            if "partNumber=" in self.path:
                self.parts.append(body)
            else:
                Stored.stored = body
            self.answer(200, ETag='"e"')

    def do_POST(self) -> None:
        self.received()
        if self.path.endswith("?uploads"):
            self.parts.clear()
            self.answer(200, Unproven.begun)
        elif not self._page():
            Stored.stored = b"".join(self.parts)
            self.answer(200, b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        self.answer(204)

    def do_HEAD(self) -> None:
        self.answer_object(200, self.stored)

    def _page(self) -> bool:
        if not self.pages or self.command != self.paged:
            return False
        Stored.pages -= 1
        date = "Tue, 05 Mar 2024 10:00:00 GMT"
        self.answer(200, b"<html>Down</html>", Content_Type="text/html", Last_Modified=date, ETag='"65e6f0a0-2a"')
        return True


@pytest.mark.parametrize(("paged", "size"), [("PUT", 8), ("PUT", 2048), ("POST", 2048)])
def test_a_page_in_place_of_an_uploads_answer_leaves_no_old_object(
    monkeypatch: pytest.MonkeyPatch, paged: str, size: int
) -> None:
    """The old object has the size of the new one. The page of a static file has an ETag."""
    monkeypatch.setattr("hsx_dist.store.fsspec._PIECE", 1024)
    for name, value in (("paged", paged), ("pages", 1), ("stored", b"A" * size)):
        monkeypatch.setattr(Stored, name, value)
    options = {"max_concurrency": 1, "config_kwargs": {"request_checksum_calculation": "when_required"}}
    with served(Stored) as url:
        store = open_store("s3://b/r", s3_options(url) | options, backend="fsspec", retry_seconds=5)
        store.put("a", [b"B" * size])
    assert Stored.stored == b"B" * size
    assert not Stored.pages


@pytest.mark.parametrize(
    ("url", "answer", "size", "stored"),
    [
        ("s3://b/r", {"ETag": "e"}, 4, True),
        ("s3://b/r", {"ETag": ""}, 3, False),
        ("s3://b/r", None, 3, True),
        ("s3://b/r", None, 4, False),
        ("gs://b/r", {"name": "r/a", "generation": "1"}, 4, True),
        ("gs://b/r", {"generation": "1", "size": "3"}, 3, True),
        ("gs://b/r", {"name": "r/a"}, 3, False),
        ("gs://b/r", "https://h/upload/storage/v1/b/b/o?upload_id=1", 3, True),
        ("gs://b/r", "https://h/upload/storage/v1/b/b/o?upload_id=1", 4, False),
        ("sftp://h/r", None, 4, True),
    ],
)
def test_an_upload_is_stored_if_the_answer_or_the_object_says_so(
    url: str, answer: object, size: int, stored: bool
) -> None:
    store = MemoryStore(url)
    store.put("a", [b"xyz"])
    with nullcontext() if stored else pytest.raises(Unavailable, match=r"a: expected an .* may not be stored"):
        require_stored(store, "a", answer, size)


def test_an_object_that_was_cut_is_no_reason_for_another_try() -> None:
    with pytest.raises(StoreError, match="expected 4 stored bytes, got another number") as told:
        require_stored(MemoryStore("gs://b/r"), "a", {"generation": "1", "size": "3"}, 4)
    assert not told.value.retryable


@pytest.mark.parametrize("value", [None, -1, "", "x", "9" * 5000, 1.5, True, {}])
def test_a_size_is_a_number(value: object) -> None:
    with pytest.raises(StoreError, match="head x: expected the object's size"):
        stated_size(value, "head x")
    assert stated_size("3", "head x") == stated_size(3, "head x") == 3
