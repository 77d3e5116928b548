"""A web server gives single files: its folders have pages of links, whose lines must not become rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from zipfile import ZipFile

import pytest

from hsx_dist.config import InputConfig, public_url
from hsx_dist.config.urls import web_path
from hsx_dist.errors import ConfigError, Unavailable
from hsx_dist.inputs.rows import read_rows
from hsx_dist.inputs.web import check_web_file
from tests.harness.http_server import Answers, served


class _Handler(SimpleHTTPRequestHandler):
    """Serves files, and a page of links for a folder. Redirects a folder's URL without a slash to one with a slash."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("a row\n")
    (tmp_path / "list.xml").write_text("<ListBucketResult/>\n")
    with served(partial(_Handler, directory=str(tmp_path))) as url:
        yield url


@pytest.mark.parametrize("form", ["auto", "text"])
@pytest.mark.parametrize(
    ("path", "got"),
    [
        ("", "a page of type text/html"),
        ("/corpus", "a page of type text/html"),
        ("/corpus/", "a page of type text/html"),
        ("/corpus/*.txt", "a glob"),
        ("/list.xml", "a page of type (text|application)/xml"),
    ],
)
def test_pages_folders_and_globs_of_a_web_server_are_refused(url: str, path: str, got: str, form: str) -> None:
    with pytest.raises(ConfigError, match=rf"expected the URL of a file on a web server, got {got} at {url}"):
        list(read_rows(InputConfig.model_validate({"path": url + path, "format": form})))


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_a_cache_does_not_hide_a_page(url: str, cache: str) -> None:
    with pytest.raises(ConfigError, match=r"got a page of type text/html"):
        list(read_rows(InputConfig(path=f"{cache}::{url}/corpus", format="text")))


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_an_older_copy_of_a_zip_file_is_noticed(url: str, tmp_path: Path, cache: str) -> None:
    def read(*texts: str) -> list[str]:
        with ZipFile(tmp_path / "corpus.zip", "w") as file:
            file.writestr("a.txt", "\n".join(texts))
        options = {cache: {"cache_storage": str(tmp_path / "copies")}}
        config = InputConfig(path=f"zip://a.txt::{cache}::{url}/corpus.zip", storage_options=options)
        return [str(row.text) for row in read_rows(config)]

    assert read("old") == read("old") == ["old"]
    with pytest.raises(Unavailable, match=r"as its store states, got \d+.*Delete its copy"):
        read("a new row", "a new row")


@pytest.mark.parametrize("chain", ["", "filecache::"])
def test_a_file_of_a_web_server_is_read(url: str, chain: str) -> None:
    (row,) = read_rows(InputConfig(path=f"{chain}{url}/corpus/a.txt"))
    assert row.key == "a:00000000"


@pytest.mark.parametrize(
    "name",
    ["download/eyJhbGciOiJIUzI1NiJ9.eyJmaWxlIjoxNywiZXhwIjoxOX0.Zm9vYmFyYmF6cXV4", "rows.jsonl&token=S3cr3tV4lue0"],
)
@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_a_credential_in_the_path_of_a_url_becomes_no_part_of_keys(url: str, chain: str, name: str) -> None:
    with pytest.raises(ConfigError, match="expected a file whose name has no credential") as told:
        list(read_rows(InputConfig(path=f"{chain}{url}/{name}")))
    assert "Zm9v" not in str(told.value)
    assert "S3cr3t" not in str(told.value)


@pytest.mark.parametrize("url", ["http://h", "http://h/", "https://h/corpus/"])
def test_a_folder_is_known_without_its_type(url: str) -> None:
    with pytest.raises(ConfigError, match="got a folder at http"):
        check_web_file({"url": url}, "http://shown")


@pytest.mark.parametrize("url", ["http://h/corpus", "http://h/download/?id=1", "http://h/a.txt"])
def test_another_url_may_be_a_file(url: str) -> None:
    check_web_file({"url": url, "mimetype": "application/octet-stream"}, "http://shown")


@pytest.mark.parametrize("chain", ["", "simplecache::"])
@pytest.mark.parametrize("query", ["", "?user=me@corp.com&token=hunter2", "?token=ab@hunter2", "#x;token=ab@hunter2"])
@pytest.mark.parametrize("user", ["", "me:hunter2@", "me:ab@hunter2@"])
def test_a_row_is_named_by_its_file_and_not_by_a_users_or_a_querys_at_sign(
    tmp_path: Path, url: str, user: str, query: str, chain: str
) -> None:
    (tmp_path / "corpus" / "train@v2.jsonl").write_text('{"text": "a"}\nno JSON\n')
    path = url.replace("://", f"://{user}") + f"/corpus/train@v2.jsonl{query}"
    row, refused = read_rows(InputConfig(path=chain + path))
    assert (row.key, refused.key) == ("train@v2:00000000", "train@v2#00000001")
    assert "hunter2" not in str(refused)


@pytest.mark.parametrize(
    "path",
    ["", "/", "/a.jsonl", "/a@b.jsonl", "/a;b=1/c.txt", "/a;token=b", "/a#sig=b", "/a#b.txt", "/x?a=b", "//a:b@c"],
)
@pytest.mark.parametrize("host", ["h", "h.example:9000", "127.0.0.1:80", "[::1]:80", "h/https://h"])
def test_the_name_of_a_url_without_a_user_is_its_public_form(host: str, path: str) -> None:
    """Keys of stored runs have this name. Names of a URL with a user have no part of the user."""
    assert web_path(f"https://{host}{path}") == public_url(f"https://{host}{path}")
    assert web_path(f"https://u:p@{host}{path}") == public_url(f"https://{host}{path}")
    assert "hunter2" not in web_path(f"https://proxy/https://u:hunter2@{host}{path}")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("chain", ["", "simplecache::", "filecache::"])
def test_an_answer_that_is_not_the_whole_file_is_no_file(chain: str) -> None:
    """fsspec takes it for the file: rows would be missing."""
    row = b'{"text": "a"}\n'
    part, whole = {"Content_Range": "bytes 0-13/70"}, {"Content_Range": "bytes 0-13/14"}
    answers: list[tuple[int, dict[str, str], bool]] = [
        (200, {}, True),
        (200, whole, True),
        (200, part, False),
        (200, {"Content_Range": "bytes 0-69/70"}, False),
        (206, part, False),
        (206, {"Content_Range": "bytes 0-13/*"}, False),
        *((status, {}, False) for status in (203, 204, 206, 226, 300)),
    ]

    class Handler(Answers):
        def do_GET(self) -> None:
            status, headers, _ = answers[int(self.path[1:].partition(".")[0])]
            if status == 200 and not headers and "Range" in self.headers:
                status, headers = 206, whole
            self.answer(status, b"" if status == 204 else row, **headers)

        do_HEAD = do_GET

    with served(Handler) as url:
        for i, (_, _, is_file) in enumerate(answers):
            config = InputConfig(path=f"{chain}{url}/{i}.jsonl")
            if is_file:
                assert len(list(read_rows(config))) == 1
                continue
            with pytest.raises(ConfigError, match=r"got (an answer that is not the whole file|a redirect that)"):
                list(read_rows(config))
