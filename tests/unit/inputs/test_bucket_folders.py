"""A listing of an input on S3 or GCS has every name, or is an error: a file that is missing would be lost rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, Unavailable
from hsx_dist.inputs.listing import find_input
from hsx_dist.inputs.sources import Input
from tests.harness.http_server import Answers, entry, listing, s3_options, served

FILES = ("in/0.jsonl", "in/1.jsonl", "in/2.jsonl", "in/a-b.jsonl", "in/a/3.jsonl", "in/a/b/4.jsonl", "in/c/5.jsonl")
HIDDEN = ("in/", "in/_SUCCESS", "in/_tmp/6.jsonl", "in/a/", "in/a/.7.jsonl", "in/empty/", "other/8.jsonl")
PAGE = b'<?xml version="1.0"?><html><body>maintenance</body></html>'
TOKEN = "<NextContinuationToken>2</NextContinuationToken>"


class Bucket(Answers):
    """Lists ``names`` as S3 and GCS do, in pages of two. In the folder ``odd``, its pages are ``odd_pages``."""

    names: tuple[str, ...] = ()
    odd, odd_pages = "none", dict[str, bytes]()
    requests: list[str] = []  # noqa: RUF012
    #: Bytes of an object whose name ends with a slash.
    marker = 0

    #: Names that also exist without a listing. The status of listings that are refused.
    objects: tuple[str, ...] = ()
    refusal: int | None = None

    def do_HEAD(self) -> None:
        self.requests.append(self.path)
        if urlsplit(self.path).path.removeprefix("/b/") in self.objects:
            return self.answer_object(200, b"abc")
        return self.answer(404)

    def do_GET(self) -> None:
        self.requests.append(self.path)
        asked = {name: value[0] for name, value in parse_qs(urlsplit(self.path).query).items()}
        name = unquote(urlsplit(self.path).path.partition("/o/")[2])
        if name in self.objects:
            said = {"kind": "storage#object", "name": name, "size": "3", "bucket": "b", "generation": "1"}
            return self.answer(200, json.dumps(said).encode(), Content_Type="application/json")
        if self.refusal and {"list-type", "prefix"} & set(asked):
            return self.answer(self.refusal)
        if "/o/" in urlsplit(self.path).path or not {"list-type", "delimiter"} & set(asked):
            return self.answer(404)
        prefix, token = asked.get("prefix", ""), asked.get("continuation-token", asked.get("pageToken", "0"))
        whole = {self._rolled_up(name, prefix) for name in self.names if name.startswith(prefix)}
        start, most = int(token), int(asked.get("max-keys", asked.get("maxResults", 2)))
        page, more = sorted(whole)[start:][:most], len(whole) > start + most
        body = (self.s3 if "list-type" in asked else self.gcs)(page, start + most if more else None, prefix)
        if prefix == self.odd and most > 1:
            body = self.odd_pages.get(token, body)
        if prefix.startswith(self.odd) and "cut" in self.odd_pages:
            body = self.s3(page[:most], None, prefix)
        kind = "application/json" if body[:1] == b"{" else "application/xml"
        return self.answer(200, body, Content_Type=kind)

    @staticmethod
    def _rolled_up(name: str, prefix: str) -> str:
        step, slash, _ = name.removeprefix(prefix).partition("/")
        return f"{prefix}{step}{slash}"

    @classmethod
    def s3(cls, page: list[str], token: int | None, prefix: str) -> bytes:
        said = f"<IsTruncated>{str(token is not None).lower()}</IsTruncated>"
        said += f"<NextContinuationToken>{token}</NextContinuationToken>" if token is not None else ""
        objects = [entry(n, cls.marker if n[-1] == "/" else 3) for n in page if not n.endswith("/") or n == prefix]
        folders = [
            f"<CommonPrefixes><Prefix>{n}</Prefix></CommonPrefixes>" for n in page if n[-1] == "/" and n != prefix
        ]
        return listing(objects + folders, said)

    @classmethod
    def gcs(cls, page: list[str], token: int | None, prefix: str) -> bytes:
        more = {} if token is None else {"nextPageToken": str(token)}
        items = [
            {"name": n, "size": str(cls.marker if n[-1] == "/" else 3), "bucket": "b", "generation": "1"}
            for n in page
            if not n.endswith("/") or n == prefix
        ]
        folders = [n for n in page if n.endswith("/") and n != prefix]
        return json.dumps({"kind": "storage#objects", "items": items, "prefixes": folders, **more}).encode()


@pytest.fixture(autouse=True)
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Bucket, "names", FILES + HIDDEN)
    monkeypatch.setattr(Bucket, "requests", [])
    with served(Bucket) as url:
        yield url


def found(url: str, path: str) -> Input:
    """Return the input at ``path``, such as ``gs://b/in`` or ``simplecache::s3://b/in``."""
    scheme = path.rpartition("::")[2].partition(":")[0]
    options = s3_options(url) if scheme == "s3" else {"endpoint_url": url, "token": "anon"}
    return find_input(InputConfig(path=path, storage_options={scheme: options} if "::" in path else options))


@pytest.mark.parametrize("scheme", ["s3", "gs", "simplecache::s3"])
def test_folders_and_globs_of_a_bucket(url: str, scheme: str) -> None:
    for path, labels in {
        "b/in": ["0", "1", "2", "a-b", "a/3", "a/b/4", "c/5"],
        "b/in/": ["0", "1", "2", "a-b", "a/3", "a/b/4", "c/5"],
        "b/in/*.jsonl": ["0", "1", "2", "a-b"],
        "b/in/*/*.jsonl": ["a/3", "c/5"],
        "b/in/a/**": ["3", "b/4"],
        "b/**/[4-9].jsonl": ["in/a/b/4", "in/c/5", "other/8"],
    }.items():
        of = found(url, f"{scheme}://{path}")
        assert [source.label for source in of.sources] == labels, path
        Bucket.requests.clear()
        assert [of.stored_bytes(source.files[0]) for source in of.sources] == [3] * len(labels)
        assert Bucket.requests == []  # the listings had the sizes
    with pytest.raises(ConfigError, match="got no such file or bucket"):
        found(url, f"{scheme}://b/none/*.jsonl")


def test_keys_that_look_like_versions_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs reads another object for such a key."""
    for name in ("in/a?versionId=1.jsonl", "in/a?versionId=1/b.jsonl"):
        monkeypatch.setattr(Bucket, "names", ("in/a", name))
        with pytest.raises(ConfigError, match=r"got the key 'in/a\?versionId=1.*, for which fsspec opens another"):
            found(url, "s3://b/in")


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_names_that_a_path_does_not_distinguish_are_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    for path, *names in (("in", "in/", "in//0.jsonl"), ("in", "in/0.jsonl", "in/0.jsonl/1.jsonl"), ("", "/0.jsonl")):
        monkeypatch.setattr(Bucket, "names", tuple(names))
        with pytest.raises(ConfigError, match="with and without a slash at the end"):
            found(url, f"{scheme}://b/{path}/*" if path else f"{scheme}://b/*.jsonl")


@pytest.mark.parametrize("scheme", ["s3", "gs", "simplecache::s3"])
@pytest.mark.parametrize("path", ["b/in", "b/in/", "b/in/*.jsonl", "b/**"])
def test_a_folder_whose_marker_has_bytes_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, scheme: str, path: str
) -> None:
    """A console's marker of the folder ``in/`` is an empty object. The rows of another object would be missing."""
    monkeypatch.setattr(Bucket, "names", FILES + HIDDEN[:1])
    assert found(url, f"{scheme}://{path}").sources
    monkeypatch.setattr(Bucket, "marker", 3)
    # gcsfs takes such an object for ``in`` as well.
    error = "expected an empty object as the marker of a folder, got one of 3 bytes|got an object and a folder"
    with pytest.raises(ConfigError, match=error):
        found(url, f"{scheme}://{path}")


@pytest.mark.parametrize("scheme", ["s3", "gs", "simplecache::s3"])
def test_an_object_does_not_hide_the_folder_of_its_name(url: str, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """The rows of the folder would be missing. A console's marker is an empty object ``in/`` in the folder."""
    monkeypatch.setattr(Bucket, "objects", ("in", "in/0.jsonl"))
    with pytest.raises(ConfigError, match=r"got an object and a folder at .*b/in\. Put a slash"):
        found(url, f"{scheme}://b/in")
    assert len(found(url, f"{scheme}://b/in/").sources) == 7
    assert [source.label for source in found(url, f"{scheme}://b/in/0.jsonl").sources] == ["0"]
    with pytest.raises(ConfigError, match="got no such file"):
        found(url, f"{scheme}://b/in/0.jsonl/")


@pytest.mark.parametrize(("scheme", "refusal"), [("s3", 403), ("s3", 404), ("gs", 403), ("gs", 401)])
def test_an_object_is_read_with_credentials_that_may_not_list(
    url: str, monkeypatch: pytest.MonkeyPatch, scheme: str, refusal: int
) -> None:
    """GCS answers 401 to a client without credentials, which may read a public object. Some servers list nothing."""
    monkeypatch.setattr(Bucket, "objects", ("in/0.jsonl",))
    monkeypatch.setattr(Bucket, "refusal", refusal)
    assert [source.label for source in found(url, f"{scheme}://b/in/0.jsonl").sources] == ["0"]


def test_another_answer_for_an_object_of_gcs_is_unavailable(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs takes an answer without a size for an object of 0 bytes: its rows would be missing."""

    def do_get(self: Bucket) -> None:
        self.answer(200, b'{"name": "in.jsonl"}', Content_Type="application/json")

    monkeypatch.setattr(Bucket, "do_GET", do_get)
    with pytest.raises(Unavailable, match="expected an answer with an object's generation, got another"):
        found(url, "gs://b/in.jsonl")


def test_each_folder_is_listed_once_and_the_service_is_checked_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "names", ("in/0.jsonl", "in/a/1.jsonl", "in/a/2.jsonl"))
    assert len(found(url, "s3://b/in").sources) == 3
    lists = [asked for asked in Bucket.requests if "list-type" in asked]
    assert len(lists) == 4, lists  # whether the folder exists, the test of the service, and two folders


@pytest.mark.parametrize(
    ("folder", "pages", "says"),
    [
        ("in/", {"2": b""}, "expected a listing"),
        ("in/a/", {"2": PAGE}, "expected a listing"),
        ("in/a/", {"0": PAGE}, "expected a listing"),
        ("in/", {"cut": b""}, "the store cuts its listings"),
        (
            "in/",
            {"0": listing([entry("in/0.jsonl")], "<IsTruncated>true</IsTruncated>")},
            "expected a page .* got none",
        ),
        ("in/", {"2": listing([], f"<IsTruncated>true</IsTruncated>{TOKEN}")}, "the token of an earlier page"),
        ("in/", {"2": listing(map(entry, ["in/_SUCCESS", "in/0.jsonl"]))}, "expected each name once"),
        ("in/a/", {"0": listing([entry("other/0.jsonl")])}, "expected names that begin with"),
        ("in/a/", {"0": listing(["<Contents><Key>in/a/0.jsonl</Key></Contents>"])}, "size"),
        ("in/a/", {"0": listing(["<CommonPrefixes></CommonPrefixes>"])}, "name of each object"),
    ],
)
def test_a_listing_of_s3_that_may_lack_names_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, folder: str, pages: dict[str, bytes], says: str
) -> None:
    monkeypatch.setattr(Bucket, "odd", folder)
    monkeypatch.setattr(Bucket, "odd_pages", pages)
    with pytest.raises(ConfigError, match=f"input.path: listing of b/{folder}: .*{says}"):
        found(url, "s3://b/in/**/*.jsonl")


@pytest.mark.parametrize("names", [("in/0.jsonl", "in/1.jsonl"), ("in/a/0.jsonl", "in/b/0.jsonl")])
def test_a_service_that_cuts_a_list_of_files_or_folders_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Bucket, "names", names)
    monkeypatch.setattr(Bucket, "odd", "in/")
    monkeypatch.setattr(Bucket, "odd_pages", {"cut": b""})
    with pytest.raises(ConfigError, match=r"input\.path: listing of b/in/: .*the store cuts its listings"):
        found(url, "s3://b/in")


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({"2": b'{"error": {}}'}, "expected a listing"),
        ({"0": b"{}"}, "expected a listing"),
        ({"2": Bucket.gcs(["in/", "in/_SUCCESS"], None, "in/")}, "expected each name once"),
        ({"2": Bucket.gcs(["other/0.jsonl"], None, "in/")}, "expected names that begin with"),
        ({"0": b'{"kind": "storage#objects", "items": null}'}, "a list as items"),
        ({"0": b'{"kind": "storage#objects", "prefixes": [5]}'}, "name of each object"),
    ],
)
def test_a_listing_of_gcs_that_may_lack_names_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, pages: dict[str, bytes], says: str
) -> None:
    monkeypatch.setattr(Bucket, "odd", "in/")
    monkeypatch.setattr(Bucket, "odd_pages", pages)
    with pytest.raises(ConfigError, match=f"input.path: listing of b/in/: .*{says}"):
        found(url, "gs://b/in/*.jsonl")


class _Refuses(Answers):
    """Answers every request with a long text."""

    def do_GET(self) -> None:
        text = "a gateway's log: \x9b31m" + "A" * 100_000
        body = (
            f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>InvalidDigest</Code><Message>{text}</Message></Error>"
        )
        self.answer(404 if self.command == "HEAD" else 400, body.encode(), Content_Type="application/xml")

    do_HEAD = do_GET


def test_an_error_of_a_service_has_none_of_its_text() -> None:
    with served(_Refuses) as url:
        for path in ("s3://b/in", "s3://b/in/*.jsonl"):
            with pytest.raises(ConfigError) as raised:
                found(url, path)
            assert "got Invalid argument. Check the URL" in str(raised.value)
            assert len(str(raised.value)) < 300
