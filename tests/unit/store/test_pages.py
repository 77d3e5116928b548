"""A listing in pages has every object, or fails: the names of a page that is missing would be lost samples."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.utils import parse_timestamp

from hsx_dist.errors import StoreError
from hsx_dist.store import open_store
from hsx_dist.store.opening import Backend
from hsx_dist.store.s3_answers import _time
from tests.harness.http_server import Answers, entry, listing, s3_options, served

NAMES = [f"r/data/{i}" for i in range(5)]
SILENT = ("silent", "token alone")


class Bucket(Answers):
    """Lists ``NAMES`` as S3 does, in pages of two, or in a way that some stores list."""

    way = "version 2"
    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        asked = {name: value[0] for name, value in parse_qs(urlsplit(self.path).query).items()}
        names = [name for name in NAMES if name.startswith(asked.get("prefix", ""))]
        token = asked.get("continuation-token", "")
        start = int(token or 0) if self.way not in ("token ignored", "version 1", "no token", "silent") else 0
        stop = start + min(int(asked.get("max-keys", 2)), 2)
        following = {
            "version 2": f"<NextContinuationToken>{stop}</NextContinuationToken>",
            "same token": f"<NextContinuationToken>{token or stop}</NextContinuationToken>",
            "token ignored": f"<NextContinuationToken>{self.requests}</NextContinuationToken>",
            "page instead of another": f"<NextContinuationToken>{stop}</NextContinuationToken>",
            "version 1": f"<NextMarker>{names[min(stop, len(names)) - 1]}</NextMarker>",
            "no token": "",
            "silent": "",
            "token alone": f"<NextContinuationToken>{stop}</NextContinuationToken>",
        }[self.way]
        truncated = stop < len(names)
        said = f"<IsTruncated>{str(truncated).lower()}</IsTruncated>" if self.way not in SILENT else ""
        page = names[:2] if self.way == "page instead of another" and start == 2 else names[start:stop]
        answer = listing(map(entry, page), f"{said}{following if truncated else ''}")
        self.answer(200, answer, Content_Type="application/xml")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    monkeypatch.setattr(Bucket, "requests", 0)
    with served(Bucket) as url:
        yield s3_options(url)


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("version 1", "NextContinuationToken .* got none"),
        ("no token", "NextContinuationToken .* got none"),
        ("silent", "the store cuts its listings"),
        ("same token", "expected each name once|the token of an earlier page"),
        ("token ignored", "expected each name once"),
        ("page instead of another", "expected each name once"),
    ],
)
def test_a_store_that_does_not_continue_its_pages_is_refused(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, backend: Backend, way: str, says: str
) -> None:
    monkeypatch.setattr(Bucket, "way", way)
    with pytest.raises(StoreError, match=f"list s3://b/r/data/: .*({says})") as told:
        list(open_store("s3://b/r", options, backend=backend, retry_seconds=0).list("data/"))
    assert not told.value.retryable


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_token_alone_says_that_there_are_more_pages(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    monkeypatch.setattr(Bucket, "way", "token alone")
    store = open_store("s3://b/r", options, backend=backend, retry_seconds=0)
    assert [info.name for info in store.list("data/")] == [name.removeprefix("r/") for name in NAMES]


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_a_listing_of_several_pages_is_whole_and_takes_no_more_requests(
    options: dict[str, str], backend: Backend
) -> None:
    store = open_store("s3://b/r", options, backend=backend, retry_seconds=0)
    for requests in (3, 6):
        assert [info.name for info in store.list("data/")] == [name.removeprefix("r/") for name in NAMES]
        assert Bucket.requests == requests


@pytest.mark.parametrize(
    "value",
    ["2026-01-02T03:04:05.678Z", "2026-01-02T03:04:05Z", "2026-01-02T03:04:05", "Thu, 01 Jan 2026 00:00:00 GMT", 17],
)
def test_times_of_a_listing_are_read_as_botocore_reads_them(value: str | int) -> None:
    assert _time(value) == parse_timestamp(value)
    with pytest.raises(ValueError, match="Invalid timestamp"):
        _time("yesterZ")
