"""Options of an input's links, also of fsspec's configuration, are used, checked, and sent to no other server."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from fsspec.config import conf

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError
from hsx_dist.inputs.rows import read_rows
from hsx_dist.store import open_store
from tests.harness.http_server import Answers, served

pytestmark = pytest.mark.usefixtures("in_process")
ROWS = b'{"text": "t"}\n'
HEADERS = {"headers": {"X-Token": "abc"}}
CHAINS = ["", "simplecache::", "zip://a.jsonl::", "zip://a.jsonl::simplecache::"]


class _Server(Answers):
    """Has rows, also in a zip file. Redirects requests below ``/away/`` to ``other``. Keeps the tokens of requests."""

    tokens: ClassVar[list[str | None]]
    other: ClassVar[str]

    def do_GET(self) -> None:
        self.tokens.append(self.headers["X-Token"])
        if self.path.startswith("/away/"):
            self.answer(302, Location=f"{self.other}/{self.path.removeprefix('/away/')}")
            return
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as members:
            members.writestr("a.jsonl", ROWS)
        body = packed.getvalue() if self.path.endswith(".zip") else ROWS
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or ""):
            start, stop = int(asked[1]), min(int(asked[2]) + 1, len(body))
            self.answer(206, body[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(body)}")
            return
        self.answer(200, body, Accept_Ranges="bytes")

    do_HEAD = do_GET


@pytest.fixture
def servers() -> Iterator[tuple[str, list[str | None], list[str | None]]]:
    """The URL of a server, and the tokens that it and another server received."""

    class Other(_Server):
        tokens: ClassVar[list[str | None]] = []

    with served(Other) as url:

        class First(_Server):
            tokens: ClassVar[list[str | None]] = []
            other: ClassVar[str] = url

        with served(First) as first:
            yield first, First.tokens, Other.tokens


def _path(chain: str, url: str) -> str:
    return f"{chain}{url}/a.{'zip' if chain.startswith('zip') else 'jsonl'}"


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("configured", [HEADERS, {"client_kwargs": HEADERS}])
def test_headers_of_the_configuration_reach_their_server_alone(
    chain: str, configured: dict[str, Any], servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, tokens, others = servers
    monkeypatch.setitem(conf, "http", configured)
    assert len(list(read_rows(InputConfig(path=_path(chain, url))))) == 1
    assert set(tokens) == {"abc"}
    with pytest.raises(ConfigError, match="expected a readable input"):
        list(read_rows(InputConfig(path=_path(chain, f"{url}/away"))))
    assert not others


@pytest.mark.parametrize("chain", CHAINS)
def test_an_option_counts_more_than_the_configuration(
    chain: str, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, tokens, _ = servers
    monkeypatch.setitem(conf, "http", {"client_kwargs": {"headers": {"X-Token": "other"}}})
    config = InputConfig(path=_path(chain, url), storage_options={"http": {"client_kwargs": HEADERS}})
    assert len(list(read_rows(config))) == 1
    assert set(tokens) == {"abc"}
    assert config.storage_options == {"http": {"client_kwargs": HEADERS}}


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anon": "false"}, r"anon: expected a boolean, got a text"),
        ({"client_kwargs": {"use_ssl": "no"}}, r"client_kwargs\.use_ssl: expected a boolean, got a text"),
        ({"key": 123}, r"key: expected text, got a number"),
        ({"endpoint_url": "http://me:hunter2@h"}, r"endpoint_url: expected http://HOST"),
        ({"client_kwargs": {"endpoint_url": "http://me:hunter2@h"}}, r"endpoint_url: expected http://HOST"),
        ({"client_kwargs": "hunter2"}, r"client_kwargs: expected a mapping"),
    ],
)
def test_the_options_of_each_link_are_checked(
    chain: str, options: dict[str, Any], message: str, configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if configured:
        monkeypatch.setitem(conf, "s3", options)
    given = {} if configured else {"s3": options}
    with pytest.raises(ConfigError, match=rf"^storage_options(\.s3)?\.{message}") as told:
        list(read_rows(InputConfig(path=_path(chain, "s3://b"), storage_options=given)))
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("option", ["same_names", "cache_mapper"])
@pytest.mark.parametrize("path", ["simplecache::s3://b/**", "zip://a.jsonl::filecache::s3://b/a.zip"])
def test_files_of_one_name_share_no_copy_of_a_cache(
    path: str, option: str, configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ``val/0.arrow`` would have the rows of ``train/0.arrow``, if their sizes are equal."""
    link = "simplecache" if path.startswith("simplecache") else "filecache"
    if configured:
        monkeypatch.setitem(conf, link, {option: True})
    given = {} if configured else {link: {option: True}}
    with pytest.raises(ConfigError, match=rf"storage_options.*\.{option}: expected it to be absent"):
        list(read_rows(InputConfig(path=path, storage_options=given)))


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("simplecache://h/a.jsonl", {"target_protocol": "http", "target_options": HEADERS}),
        ("dir://a.jsonl", {"fo": "http://h", "target_options": HEADERS}),
        ("memory://h/a.jsonl", {"protocol": "http"}),
    ],
)
def test_only_the_url_names_the_file(
    path: str, options: dict[str, Any], configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that an option names would have no limits, and a redirect would send its headers to another one."""
    if configured:
        monkeypatch.setitem(conf, path.partition("://")[0], options)
    given = {} if configured else options
    with pytest.raises(ConfigError, match="only the URL names the file"):
        list(read_rows(InputConfig(path=path, storage_options=given)))
    with pytest.raises(ConfigError, match="only the URL names the file"):
        open_store(path, given, backend="fsspec")
