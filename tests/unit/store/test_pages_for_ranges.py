"""A page with the status 200 in place of a range is asked for again. fsspec itself takes it for the bytes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from hsx_dist.errors import StoreError, Unavailable
from hsx_dist.store import Store, open_store
from hsx_dist.store.opening import Backend
from hsx_dist.store.partial_answers import AnsweredPart, part_of, require_part
from tests.harness.http_server import Answers, s3_options, served

_DATA = bytes(range(256)) * 4
_OBJECT = {"ETag": '"1"', "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


class Paged(Answers):
    """Answers each first GET with ``page``, and then with the bytes."""

    page: bytes = b""
    status = 200
    kind = "text/html"
    said: ClassVar[dict[str, str]] = {}
    left = 0

    def do_GET(self) -> None:
        if type(self).left:
            type(self).left -= 1
            return self.answer(self.status, self.page, Content_Type=self.kind, **self.said)
        if "Range" not in self.headers:
            return self.answer(200, _DATA, **_OBJECT)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last, len(_DATA) - 1)
        return self.answer(206, _DATA[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(_DATA)}", **_OBJECT)


def _store(url: str, back_end: str, retry_seconds: float = 5) -> Store:
    if back_end == "http":
        return open_store(f"{url}/b/r", retry_seconds=retry_seconds)
    backend: Backend = "fsspec" if back_end == "fsspec" else "obstore"
    return open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=retry_seconds)


@pytest.mark.parametrize("back_end", ["http", "fsspec", "obstore"])
@pytest.mark.parametrize(
    ("status", "page", "said"),
    [
        (200, b"<html>Down</html>", {}),
        (200, b"<html>Down</html>", {"Transfer_Encoding": "chunked"}),  # without a length
        (200, b"<html>Down</html>", {**_OBJECT, "Last_Modified": "-1"}),
        (200, b"<html>" + b"x" * 600, _OBJECT),
        (206, b"x" * 600, {}),
        (206, b"x" * 600, {"Content_Range": f"bytes 1-600/{len(_DATA)}", **_OBJECT}),
    ],
)
def test_another_answer_to_a_range_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, back_end: str, status: int, page: bytes, said: dict[str, str]
) -> None:
    for name, value in (("status", status), ("page", page), ("said", said)):
        monkeypatch.setattr(Paged, name, value)
    with served(Paged) as url:
        store = _store(url, back_end)
        monkeypatch.setattr(Paged, "left", 1)
        assert store.get_ranges("a", [(0, 600)]) == [_DATA[:600]]
        monkeypatch.setattr(Paged, "left", 1)
        assert store.get("a", 600) == _DATA[:600]
        assert Paged.left == 0


def test_several_ranges_are_checked_each(monkeypatch: pytest.MonkeyPatch) -> None:
    big = _DATA * 200
    monkeypatch.setitem(globals(), "_DATA", big)
    monkeypatch.setattr(Paged, "page", b"x" * 3)
    with served(Paged) as url:
        store = _store(url, "fsspec")
        monkeypatch.setattr(Paged, "left", 1)
        assert store.get_ranges("a", [(0, 3), (150_001, 150_004)]) == [big[:3], big[150_001:150_004]]


def test_a_whole_object_on_s3_has_an_etag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paged, "page", b"<html>Down</html>")
    monkeypatch.setattr(Paged, "left", 1)
    with served(Paged) as url:
        assert _store(url, "fsspec").get("a") == _DATA


@pytest.mark.parametrize(("start", "kind"), [(0, None), (1, StoreError)])
def test_a_web_server_without_ranges_sends_the_whole_object(
    monkeypatch: pytest.MonkeyPatch, start: int, kind: type[StoreError] | None
) -> None:
    for name, value in (("page", b"{}"), ("kind", "application/json"), ("left", 1)):
        monkeypatch.setattr(Paged, name, value)
    with served(Paged) as url:
        store = _store(url, "http", 0)
        if kind is None:
            assert store.get("a", 600) == b"{}"
        else:  # its first bytes are not the asked ones
            with pytest.raises(kind, match="ignores range requests"):
                store.get_ranges("a", [(start, start + 2)])


def test_an_empty_answer_is_not_the_middle_of_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no HTML, and no larger than the range."""
    for name, value in (("page", b""), ("kind", "application/octet-stream"), ("left", 1)):
        monkeypatch.setattr(Paged, name, value)
    with served(Paged) as url:
        assert _store(url, "http").get_ranges("a", [(5, 8)]) == [_DATA[5:8]]


@pytest.mark.parametrize(
    ("status", "said", "part"),
    [
        (206, "bytes 5-9/20", AnsweredPart(5, 20)),
        (206, "bytes 5-7/*", AnsweredPart(3, None)),
        (206, "bytes 5-10/20", None),
        (206, "bytes 4-9/20", None),
        (206, "bytes */20", None),
        (206, None, None),
        (200, "bytes 5-9/20", None),
    ],
)
def test_the_part_that_an_answer_names(status: int, said: str | None, part: AnsweredPart | None) -> None:
    assert part_of(status, said, 5, 10) == part


@pytest.mark.parametrize(
    ("part", "got", "enough"),
    [
        (AnsweredPart(5, 20), 5, True),
        (AnsweredPart(3, 8), 3, True),  # the object ends there
        (AnsweredPart(3, None), 3, True),
        (AnsweredPart(3, 20), 3, False),
        (AnsweredPart(5, 20), 4, False),
        (None, 5, False),
    ],
)
def test_a_part_has_all_asked_bytes_that_exist(part: AnsweredPart | None, got: int, enough: bool) -> None:
    call: Any = lambda: require_part("s3://b/a", part, 5, 10, got)  # noqa: E731
    if enough:
        call()
    else:
        with pytest.raises(Unavailable, match=r"expected the bytes \[5, 10\)"):
            call()
