"""An object exists if the store sends its first byte. A gateway may answer a HEAD, or any request, with its page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hsx_dist.errors import Unavailable
from hsx_dist.format.presence import exists
from hsx_dist.reading.follow import has_position
from hsx_dist.reading.missing import _not_stored
from hsx_dist.store import Store, open_store
from hsx_dist.store.opening import Backend
from tests.harness.http_server import Answers, s3_options, served

PAGE = b"<html><body>maintenance</body></html>"


class Gateway(Answers):
    """Answers each HEAD with the status 200 and the headers of a page. A GET reaches the store."""

    def do_HEAD(self) -> None:
        self.answer_object(200, PAGE)

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2].partition("?")[0]
        if name == "page":
            self.answer_object(200, PAGE)
        elif name == "there":
            self.answer(
                206, b"x", ETag='"1"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT", Content_Range="bytes 0-0/9"
            )
        elif name == "empty":
            self.answer(416, b"<Error><Code>InvalidRange</Code></Error>", Content_Type="application/xml")
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>", Content_Type="application/xml")


@pytest.fixture(params=["obstore", "fsspec"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    backend: Backend = request.param
    with served(Gateway) as url:
        yield open_store("s3://b/r", s3_options(url), backend=backend, retry_seconds=0)


def test_the_answer_to_a_head_proves_no_object(store: Store) -> None:
    assert [exists(store, name) for name in ("there", "empty", "none")] == [True, True, False]
    with pytest.raises(Unavailable, match="get s3://b/r/page"):
        exists(store, "page")
    assert _not_stored(store, ["there", "none"]) == ["none"]
    assert not has_position(store, {"1/w": [3, ["k"]]})
