"""Runs behind an HTTP server: it lists without sizes or not at all, encodes names, and may ignore range requests."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import pytest

from hsx_dist import open_run
from hsx_dist.config import InputConfig
from hsx_dist.errors import Denied, HsxError, NotFound, StoreError, Unavailable
from hsx_dist.format.container import Part
from hsx_dist.format.receipt import Receipt
from hsx_dist.format.receipt_log import LogReader, ReceiptLog
from hsx_dist.inputs.rows import read_rows
from hsx_dist.store import open_store
from hsx_dist.store.base import Store, cut
from hsx_dist.store.http_store import _further_page, _names_in
from tests.golden.make import FOLDER
from tests.unit.growth import check_linear


class Whole(SimpleHTTPRequestHandler):
    """Python's own server. It sends the whole object for every range."""

    def log_message(self, *_args: Any) -> None:
        pass


class WithoutFolders(Whole):
    """A server that answers 404 for a folder."""

    def list_directory(self, path: str | PathLike[str]) -> None:  # noqa: ARG002
        self.send_error(404)


class Failing(Whole):
    """A server that answers every request with ``status``, or closes the connection for 0."""

    status = 0

    def do_HEAD(self) -> None:
        if self.status:
            self.send_error(self.status)

    def do_GET(self) -> None:
        self.do_HEAD()


class Welcome(Whole):
    """A server whose page of a folder has no link into the folder."""

    page = b'<html><a href="about.html">Welcome</a></html>'

    def list_directory(self, path: str | PathLike[str]) -> BytesIO:  # noqa: ARG002
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        return BytesIO(self.page)


class Endless(Welcome):
    """A server whose page of a folder never ends. It says nothing of a length, and not that it is a page."""

    def list_directory(self, path: str | PathLike[str]) -> None:  # noqa: ARG002
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        with suppress(OSError):
            for _ in range(1000):
                self.wfile.write(bytes(1 << 20))
            pytest.fail("a reader took a GiB")


class Blank(Welcome):
    """A server whose page of a folder has no links."""

    page = b"<html>Welcome</html>"


class WithoutSlash(Welcome):
    """A server whose links to folders look as links to objects do."""

    page = b'<a href="run.json">run.json</a> <a href="below">below</a>'


class ByQuery(Welcome):
    """A server that links to folders by a query."""

    page = b'<a href="?dir=run/below">below</a> <a href="run.json">run.json</a>'


class Sorted(Welcome):
    """A server with Apache's links, and with other links to the same objects."""

    page = (
        b'<a href="?C=N;O=D">Name</a> <a href="/">Parent</a> <a href="../">..</a> <a href="./a%26b">a</a> '
        b'<a href="a&amp;b">a</a> <a href="%2e%2e%2fb">b</a>'
    )


class WithoutSize(Whole):
    """A server that does not state an object's size."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword.lower() != "content-length":
            super().send_header(keyword, value)


class Writable(Whole):
    """A server that stores an object without a look at the request's condition."""

    puts = 0

    def do_PUT(self) -> None:
        type(self).puts += 1
        self.send_error(201)


class Large(Whole):
    """A server that answers each request for a range with 256 MiB."""

    sent = 0

    def do_GET(self) -> None:
        self.send_response(206 if "Range" in self.headers else 200)
        self.end_headers()
        for _ in range(256):
            try:
                self.wfile.write(bytes(1 << 20))
            except ConnectionError:
                return
            type(self).sent += 1


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


def test_a_page_without_end_is_not_read_into_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsx_dist.store.http_store._LARGEST_PAGE", 1 << 20)
    with served(folder, Endless) as store, pytest.raises(StoreError, match="expected a page of at most 1048576 bytes"):
        list(store.list())


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


def test_the_rest_of_an_answer_that_is_too_long_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder, Large) as store:
        for read in (
            lambda: store.get("below/part", 99),
            lambda: store.get_ranges("below/part", [(10, 20)]),
            lambda: store.get_ranges("below/part", [(0, 8), (50 << 20, (50 << 20) + 8)]),
            lambda: list(read_rows(InputConfig(path=f"{store.url}/below/rows.parquet"))),
        ):
            monkeypatch.setattr(Large, "sent", 0)
            with pytest.raises(HsxError):
                read()
            assert Large.sent < 64


def test_a_range_of_several_requests_that_is_too_long_is_an_error_of_the_store() -> None:
    with pytest.raises(StoreError, match="ignores range requests"):
        cut("a", [(0, 2), (8, 9)], [(0, 2), (8, 9)], [b"ab", b"abcdefghi"])


@pytest.mark.parametrize(
    ("handler", "got"),
    [(WithoutFolders, "404"), (Blank, "a page without links"), (Welcome, "without a link to below/")],
)
def test_a_server_that_lists_no_folders_is_refused(folder: Path, handler: type[Whole], got: str) -> None:
    with served(folder, handler) as store:
        store.get("below/part", 100)
        for prefix in ("", "below/", "manifest/"):
            with pytest.raises(StoreError, match=f"expected a server that lists folders, got .*{got}.* Use a server"):
                list(store.list(prefix))


@pytest.mark.parametrize(
    ("handler", "got"),
    [(WithoutSlash, "a link to below without a slash at its end"), (ByQuery, "a page without links to folders")],
)
def test_a_server_whose_links_to_folders_look_like_no_folder_is_refused(folder: Path, handler: type, got: str) -> None:
    (folder / "run" / "run.json").write_bytes(b"{}")
    with served(folder, handler) as store:
        store.get("run.json", 100)
        with pytest.raises(StoreError, match=f"got {got}"):
            list(store.list("below/"))


def test_a_page_without_links_is_no_empty_folder(folder: Path) -> None:
    """It may be a log-in page."""

    class Late(Welcome):
        page = b'<a href="/login">in</a>'

        def list_directory(self, path: str | PathLike[str]) -> BytesIO:
            listing = Whole.list_directory if str(path).rstrip("/").endswith("run") else Welcome.list_directory
            found = listing(self, path)
            assert found is not None
            return found

    with served(folder, Late) as store:
        store.head("below/part")
        with pytest.raises(StoreError, match=r"got a page without links, and .* at .*below"):
            list(store.list())


def counting(asked: list[str]) -> type[Whole]:
    """A server that appends the path of each listing to ``asked``."""

    class Counting(Whole):
        def list_directory(self, path: str | PathLike[str]) -> BytesIO | None:
            asked.append(self.path)
            return super().list_directory(path)

    return Counting


def test_an_empty_folder_has_no_objects(folder: Path) -> None:
    (folder / "run" / "empty folder").mkdir()
    with served(folder, Whole) as store:
        assert [info.name for info in store.list()] == ["below/part"]
        assert not list(store.list("empty folder/"))


def test_a_folder_that_no_name_with_the_prefix_is_in_is_not_listed(folder: Path) -> None:
    (folder / "run" / "bel").mkdir()
    asked: list[str] = []
    with served(folder, counting(asked)) as store:
        store.head("below/part")
        assert not list(store.list("be."))
        assert [info.name for info in store.list("belo")] == ["below/part"]
        assert set(asked) == {"/run/", "/run/below/"}


def test_an_object_that_is_deleted_during_a_listing_is_left_out(folder: Path) -> None:
    class Deleting(Whole):
        def list_directory(self, path: str | PathLike[str]) -> BytesIO | None:
            found = super().list_directory(path)
            (folder / "run" / "below" / "gone").unlink(missing_ok=True)
            return found

    with served(folder, Deleting) as store:
        store.head("below/part")
        list(store.list("below/"))
        (folder / "run" / "below" / "gone").write_bytes(b"a")
        assert [info.name for info in store.list("below/")] == ["below/part"]


def test_a_folder_with_links_to_itself_has_an_end(folder: Path) -> None:
    (folder / "run" / "again").symlink_to(".")
    with served(folder, Whole) as store, pytest.raises(StoreError, match="folders in one another, got more"):
        list(store.list())


@pytest.mark.parametrize("link", ["&#" + "1" * 5000 + ";", "a%00b"])
def test_a_link_that_cannot_be_read_is_an_error_of_the_store(folder: Path, link: str) -> None:
    class Odd(Welcome):
        page = f'<a href="{link}">a</a>'.encode()

    with (
        served(folder, Odd) as store,
        pytest.raises(StoreError, match=r"a (link or title that cannot be read|page without links)"),
    ):
        list(store.list())


def test_a_title_that_cannot_be_read_is_an_error_of_the_store(folder: Path) -> None:
    class Odd(Welcome):
        page = b"<title>&#" + b"1" * 5000 + b";</title>"

    with served(folder, Odd) as store, pytest.raises(StoreError, match="a link or title that cannot be read"):
        list(store.list("below/"))


@pytest.mark.parametrize("handler", [WithoutFolders, Blank])
def test_an_empty_listing_is_not_believed_before_an_object_is_read(folder: Path, handler: type[Whole]) -> None:
    with served(folder, handler) as store, pytest.raises(StoreError, match="expected a server that lists folders"):
        list(store.list("manifest/"))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("handler", [WithoutFolders, Blank])
def test_a_run_on_a_server_that_lists_no_folders_does_not_open(
    tmp_path: Path, version: int, handler: type[Whole]
) -> None:
    shutil.copytree(FOLDER / f"v{version}-complete", tmp_path / "run")
    with served(tmp_path, handler) as store, pytest.raises(StoreError, match="expected a server that lists folders"):
        open_run(store.url)


def test_a_server_that_lists_folders_is_asked_once(folder: Path) -> None:
    asked: list[str] = []
    with served(folder, counting(asked)) as store:
        store.head("below/part")
        assert [list(store.list("manifest/")) for _ in range(3)] == [[], [], []]
        assert asked.count("/run/") == 4  # once as the proof, and once in each listing, as the parent of manifest/


@pytest.mark.parametrize("name", ["a=b", "50%", "a%41", "a b", "a#b", "a?b", "a&b", "a+b", "é", "a'b", "a/%2F=b/c d"])
def test_a_name_is_listed_as_it_was_written(folder: Path, name: str) -> None:
    path = folder / "run" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"abc")
    with served(folder, Whole) as store:
        assert store.get(name) == b"abc"
        assert store.head(name).size == 3
        assert [info.name for info in store.list()] == sorted([name, "below/part"])
        assert [info.name for info in store.list(name)] == [name]


def test_a_name_that_is_not_utf_8_is_listed_and_read(folder: Path) -> None:
    """The store lists a name only if the server has its size: a changed name would be left out."""
    Path(os.fsdecode(os.fsencode(folder / "run/a") + b"\x80")).write_bytes(b"abc")
    with served(folder, Whole) as store:
        [name] = [info.name for info in store.list() if info.name != "below/part"]
        assert store.get(name) == b"abc"
        assert [info.name for info in store.list(name)] == [name]
        with pytest.raises(NotFound):
            store.get(f"{name}\udc80/b")


def test_links_that_name_no_object_are_left_out(folder: Path) -> None:
    (folder / "run" / "a&b").write_bytes(b"abc")
    with served(folder, Sorted) as store:
        assert [info.name for info in store.list()] == ["a&b"]


@pytest.mark.parametrize(
    ("link", "name"),
    [
        ("'a'", "a"),
        ("./a", "a"),
        ('"/r/a/"', "a/"),
        ("http://h/r/a%20b", "a b"),
        ("https://h/r/a", "a"),
        ("' a:b ' class=x", " a:b "),
        ("/other/a", None),
        ("http://other/r/a", None),
        ("../a", None),
        ("http://[", None),
        ("''", None),
    ],
)
def test_a_link_is_read_as_a_browser_does(link: str, name: str | None) -> None:
    page = f"<html><a name=x>n</a>\n<A  class='y'\nHREF = {link}>text</A>".encode()
    assert list(_names_in(page, "http://h/r")) == ([] if name is None else [name])


@pytest.mark.parametrize(
    ("tag", "further"),
    [
        ('<a href="?page=2">', "?page=2"),
        ('<a href="./?C=N&amp;offset=10">', "./?C=N&offset=10"),
        ('<a href="/r/a%20b/?start=2#x">', "/r/a%20b/?start=2#x"),
        ("<a href=https://h/r/a%20b?marker=f>", "https://h/r/a%20b?marker=f"),
        ("<a rel='nofollow next' href='2.html'>", "2.html"),
        ('<link rel="next" href="?2">', "?2"),
        ('<a href="?C=N;O=D">', None),
        ('<a href="?sort=name&order=desc">', None),
        ('<a href="file?page=2">', None),
        ('<a href="/other/?page=2">', None),
        ('<link rel="stylesheet" href="s.css?page=2">', None),
    ],
)
def test_a_link_to_a_further_page_of_the_folder_is_seen(tag: str, further: str | None) -> None:
    assert _further_page(tag.encode(), "http://h/r/a%20b") == further
    assert list(_names_in(b"<link rel=stylesheet href=s.css>", "http://h/r")) == []


class Pages(Welcome):
    """A server that lists a folder in several pages."""

    page = b'<a href="below/">below</a> <a href="run.json">run.json</a> <a href="?page=2">Next page</a>'


class Cut(Whole):
    """A server whose page of a folder lacks a name, and does not say so."""

    lacks = ""

    def list_directory(self, path: str | PathLike[str]) -> BytesIO | None:
        names = sorted(p.name + "/" * p.is_dir() for p in Path(path).iterdir() if p.name != self.lacks)
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        shown = self.path.rstrip("/")
        return BytesIO("".join([f"<title>{shown}</title>", *(f'<a href="{n}">{n}</a>' for n in names)]).encode())


def test_a_server_that_lists_folders_in_pages_is_refused(folder: Path) -> None:
    with (
        served(folder, Pages) as store,
        pytest.raises(StoreError, match=r"got a link to a further page \('\?page=2'\)"),
    ):
        list(store.list())


def test_a_put_with_a_condition_is_refused(tmp_path: Path) -> None:
    """fsspec sends none: two processes could replace each other's objects."""
    with served(tmp_path, Writable) as store:
        with pytest.raises(StoreError, match="expected a back end with create-only writes"):
            store.put_if_absent("a", b"x")
        assert Writable.puts == 0


@pytest.mark.parametrize("lacks", ["000002.json", "000003.json"], ids=["a gap", "the end"])
def test_a_receipt_that_exists_and_is_not_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    log = ReceiptLog(open_store(str(tmp_path / "run")), 1, "w")
    for _ in range(3):
        log.append(Receipt(0, "", 0, None, 0, "0" * 8, 0, 0, (), (), "t"))
    (tmp_path / "run" / "run.json").write_bytes(b"{}")
    with served(tmp_path, Cut) as store:
        store.get("run.json")
        assert len(list(LogReader().read(store))) == 3
        monkeypatch.setattr(Cut, "lacks", lacks)
        with pytest.raises(StoreError, match=f"{lacks}: expected a listing with this object, which exists"):
            list(LogReader().read(store))


@pytest.mark.parametrize(
    "unit",
    [" ", "<a ", "rel='", "<a rel=next ", "<a href", "href ", "href=", "<a href='", "<a href=../x>", "<a href=a>"],
)
def test_a_page_takes_time_in_proportion_to_its_length(unit: str) -> None:
    """fsspec's expression takes half a minute for a page of 2,000 blanks."""
    check_linear(lambda n: lambda: list(_names_in(f"<a {unit * n}>".encode(), "http://h/r")), 1 << 13)
    check_linear(lambda n: lambda: _further_page(f"<a {unit * n}>".encode(), "http://h/r"), 1 << 13)


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFound), (0, Unavailable), (503, Unavailable), (403, Denied), (418, StoreError)]
)
def test_only_a_404_says_that_there_is_no_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, kind: type[StoreError]
) -> None:
    monkeypatch.setattr(Failing, "status", status)
    with served(tmp_path, Failing) as store:
        for call in (store.head, store.get):
            with pytest.raises(StoreError) as told:
                call("a")
            assert type(told.value) is kind
