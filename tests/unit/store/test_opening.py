from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf
from pydantic import ValidationError

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, StoreError, Unavailable
from hsx_dist.inputs.listing import find_input
from hsx_dist.reading import load_hidden_states, open_run
from hsx_dist.store import open_store
from hsx_dist.store.faults import Redactor
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.local import LocalStore
from hsx_dist.store.opening import Backend
from hsx_dist.store.options import checked_options
from hsx_dist.store.retry import RetryStore
from tests.harness.http_server import s3_options


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "expected the url of a store"),
        ("s3://", "expected a bucket behind s3://"),
        ("nosuch://x/y", "expected a scheme that fsspec knows"),
        ("file://relative/path", "Add the leading slash"),
        ("s3://me:hunter2secret@bucket/x", "URL without credentials"),
    ],
)
def test_urls_that_cannot_be(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        open_store(url)
    assert "hunter2secret" not in str(told.value)


@pytest.mark.parametrize("backend", ["auto", "fsspec", "obstore"])
@pytest.mark.parametrize(
    "chain", ["zip://x", "zip://x::", "simplecache::zip://x::", "tar://x::", "libarchive://x::", "reference://x::"]
)
def test_an_archive_is_no_store(tmp_path: Path, chain: str, backend: Backend) -> None:
    """A small archive may have objects of any size."""
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/a", bytes(1 << 20))
    url, options = (f"{chain}file://{path}", {}) if chain.endswith("::") else (chain, {"fo": str(path)})
    with pytest.raises(ConfigError, match="Extract the archive to a folder"):
        open_store(url, options, backend=backend)


@pytest.mark.parametrize("scheme", ["filecache", "blockcache", "cached"])
def test_a_cache_is_no_store(scheme: str) -> None:
    """An old fsspec would unpickle a file of the cache's folder."""
    with pytest.raises(ConfigError, match="expected a folder or an object store, got a cache"):
        open_store(f"{scheme}://x", {"target_protocol": "memory"})


def test_a_missing_package_is_named() -> None:
    program = """
import sys
sys.modules["s3fs"] = None
from hsx_dist.errors import ConfigError
from hsx_dist.store import open_store
try:
    open_store("s3://bucket/x", backend="fsspec")
except ConfigError as e:
    print(e)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert 'pip install ".[s3]"' in said


def test_options_of_the_wrong_kind() -> None:
    with pytest.raises(ConfigError, match="refuses storage_options"):
        open_store("s3://bucket/x", {"config_kwargs": 3})


@pytest.mark.parametrize(
    ("more", "environment"),
    [
        ({"s3_additional_kwargs": {"ServerSideEncryption": "aws:fsx"}}, {}),
        ({}, {"AWS_COPY_IF_NOT_EXISTS": "bad"}),
        ({"client_kwargs": {"verify": "none.pem"}}, {}),
        ({}, {"AWS_CA_BUNDLE": "none.pem"}),
        ({}, {"AWS_CA_BUNDLE": "bad.pem"}),
    ],
)
def test_a_setting_that_obstore_refuses_is_left_to_fsspec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], environment: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("none.pem").write_text("no certificate\n")
    Path("bad.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = {**s3_options("http://127.0.0.1:1"), **more}
    with pytest.raises(ConfigError, match=r"store\.backend: .* obstore refuses the settings: .*\. Set fsspec or auto"):
        open_store("s3://b/r", options, backend="obstore")
    store = open_store("s3://b/r", options)
    assert isinstance(store, RetryStore)
    assert isinstance(store._inner, FsspecStore)


def test_a_later_client_that_fails_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each limit of time has its own client."""
    store = open_store("s3://b/r", s3_options("http://127.0.0.1:1"), backend="obstore", retry_seconds=0)
    monkeypatch.setenv("AWS_COPY_IF_NOT_EXISTS", "bad")
    with pytest.raises(StoreError, match="put s3://b/r/a: GenericError"):
        store.put("a", [bytes(2 << 20)])


@pytest.mark.parametrize(
    "name",
    [
        "AZURE_STORAGE_USE_EMULATOR",
        "AZURITE_BLOB_STORAGE_URL",
        "AZURE_STORAGE_ENDPOINT",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_CLIENT_ID",
        "AZURE_SKIP_SIGNATURE",
        "AZURE_STORAGE_CONNECTION_STRING",
    ],
)
def test_only_adlfs_serves_other_variables_of_azure(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An endpoint from such a variable would get the rows."""
    options = {"account_name": "a", "account_key": "a2V5"}
    open_store("az://c/r", options, backend="obstore")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "b2V5")
    monkeypatch.setenv("AZURE_CONFIG_DIR", "/home/a/.azure")  # of the command line tool
    monkeypatch.setenv("AZURE_HTTP_USER_AGENT", "GITHUBACTIONS")
    open_store("az://c/r", options, backend="obstore")
    monkeypatch.setenv(name, "true")
    with pytest.raises(ConfigError, match=rf"obstore does not read the environment variable {name} as adlfs does"):
        open_store("az://c/r", options, backend="obstore")


def test_files_need_no_fsspec(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["fsspec"] = None
from hsx_dist.store import open_store
store = open_store({str(tmp_path)!r})
store.put("a", [b"1"])
print(store.get("a"))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == "b'1'\n"


def test_urls_show_no_credentials_and_no_query(tmp_path: Path) -> None:
    assert open_store(str(tmp_path / "run")).url == str(tmp_path / "run")
    assert open_store(f"file://{tmp_path}/run/").url == f"{tmp_path}/run"
    assert open_store("memory://a/b/").url == "memory://a/b"


def test_negative_retry_seconds() -> None:
    with pytest.raises(ConfigError, match="retry_seconds"):
        open_store("memory://a", retry_seconds=-1)


def test_exceptions_in_lists_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's cat_ranges returns exceptions in the place of contents."""
    store = FsspecStore("memory://hsx-lists/x")

    def cat_ranges(*args: object, **kwargs: object) -> list[object]:
        return [b"1", TimeoutError("late")]

    monkeypatch.setattr(type(store._fs), "cat_ranges", cat_ranges)
    with pytest.raises(Unavailable, match="late"):
        store.get_ranges("a", [(0, 1), (10**6, 10**6 + 1)])


def test_without_obstore_auto_is_fsspec_and_obstore_is_refused() -> None:
    program = """
import sys
sys.modules["obstore"] = None
from hsx_dist.errors import ConfigError
from hsx_dist.store import open_store
print(open_store("s3://bucket/x", {"key": "k", "secret": "s"}))
try:
    open_store("s3://bucket/x", {"key": "k", "secret": "s"}, backend="obstore")
except ConfigError as e:
    print(e)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "FsspecStore('s3://bucket/x')" in said
    assert "expected the package obstore, got none" in said


BACKENDS: list[Backend] = ["auto", "obstore", "fsspec"]
ODD_ENDPOINTS = [
    "me:hunter2secret@minio:9000",
    "//me:hunter2secret@minio:9000",
    "minio:9000",
    "ftp://minio",
    "http://",
    "http://minio:90OO",
    "http://minio:90000",
    "http://minio:9000/?sig=hunter2secret",
    "http://me:hunter2secret@minio:9000",
    "http://minio:9000/#hunter2secret",
]


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize("endpoint", ODD_ENDPOINTS)
def test_an_endpoint_is_http_and_a_host(endpoint: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    for options in ({"endpoint_url": endpoint}, {"client_kwargs": {"endpoint_url": endpoint}}):
        with pytest.raises(ConfigError, match="endpoint_url: expected http://HOST") as told:
            open_store("s3://b/x", options, backend=backend)
        assert "hunter2" not in str(told.value)
        with pytest.raises(ConfigError, match="endpoint_url: expected http://HOST"):
            find_input(InputConfig.model_construct(path="s3://b/x.jsonl", storage_options=options))
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, endpoint)
        with pytest.raises(ConfigError, match=f"{name}: expected http://HOST"):
            open_store("s3://b/x", backend=backend)
        monkeypatch.delenv(name)


@pytest.mark.parametrize("value", [12345678, 1234.5678, ["12345678"]])
@pytest.mark.parametrize("name", ["key", "secret", "token", "client_kwargs.aws_secret_access_key"])
def test_a_credential_is_text(name: str, value: object) -> None:
    outer, _, inner = name.rpartition(".")
    options: dict[str, object] = {"key": "k", "secret": "s"}
    options |= {outer: {inner: value}} if outer else {inner: value}
    expected = rf"storage_options.{name}: expected text, got a (number|list)\. Put it in quotes"
    for backend in BACKENDS:
        with pytest.raises(ConfigError, match=expected) as told:
            open_store("s3://b/x", options, backend=backend)
        assert "1234" not in str(told.value)
    with pytest.raises(ConfigError, match=expected):
        find_input(InputConfig.model_construct(path="s3://b/x.jsonl", storage_options=options))


@pytest.mark.parametrize("control", ["\n", "\r", "\t", "\0", "\x7f"])
def test_a_credential_has_no_control_characters(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore's library panics if a request's header has one."""
    value = f"hunter2{control}"
    for name in ("key", "secret", "token", "username", "password", "client_kwargs.aws_session_token"):
        outer, _, inner = name.rpartition(".")
        options: dict[str, object] = {outer: {inner: value}} if outer else {inner: value}
        expected = f"^storage_options.{name}: expected a credential without control characters"
        for backend in BACKENDS:
            with pytest.raises(ConfigError, match=expected) as refused:
                open_store("s3://b/x", options, backend=backend)
            assert "hunter2" not in str(refused.value)
        with pytest.raises(ConfigError, match=expected):
            find_input(InputConfig.model_construct(path="s3://b/x.jsonl", storage_options=options))
    if control == "\0":
        return  # no variable has one
    for url, name in (
        ("s3://b/x", "AWS_ACCESS_KEY_ID"),
        ("simplecache::s3://b/x", "AWS_SESSION_TOKEN"),
        ("az://b/x", "AZURE_STORAGE_SAS_TOKEN"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"^{name}: expected a credential without control characters") as refused:
            checked_options(url, None)
        assert "hunter2" not in str(refused.value)
        checked_options("/data/x", None)
        scheme = url.partition("::")[2].partition("://")[0] or url.partition("://")[0]
        for given in ({"anon": True}, {"key": "k", "secret": "s"}, {"client_kwargs": {"aws_access_key_id": "k"}}):
            checked_options(url, {scheme: given} if "::" in url else given)
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "options", [{"anon": "false"}, {"use_ssl": "No"}, {"client_kwargs": {"verify": "off"}}, {"me:s3cret@h": "no"}]
)
def test_a_text_for_false_is_refused(options: dict[str, object]) -> None:
    """s3fs would read without credentials for ``anon: "false"``."""
    with pytest.raises(ConfigError, match=r"^storage_options\..*: expected a boolean, got a text") as refused:
        open_store("s3://bucket/x", options)
    assert "s3cret" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"^storage_options\..*: expected a boolean, got a text"):
        find_input(InputConfig(path="s3://bucket/x.jsonl", storage_options=options))


def test_a_credential_that_is_no_text_is_not_searched_for() -> None:
    redact = Redactor({}, {})
    redact.learn([12345678, True, "hunter2"])  # type: ignore[list-item]
    assert redact("12345678 hunter2") == "12345678 (not shown)"


@pytest.mark.parametrize("backend", ["obstore", "auto", "fsspec"])
def test_the_endpoint_of_a_profile_is_checked(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "config"
    profile.write_text("[default]\nregion = us-east-1\nendpoint_url = http://me:hunter2secret@127.0.0.1:9\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(profile))
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with pytest.raises(ConfigError, match="endpoint_url of the AWS profile: expected http://HOST") as told:
        open_store("s3://b/x", {"key": "k", "secret": "s"}, backend=backend, retry_seconds=0).put("a", [b"x"])
    assert "hunter2" not in str(told.value)


def test_options_of_fsspecs_configuration_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setitem(conf, "s3", {"key": "k", "secret": "s", "endpoint_url": "http://me:hunter2secret@h"})
    for backend in BACKENDS:
        with pytest.raises(ConfigError, match="endpoint_url: expected http://HOST"):
            open_store("s3://b/x", backend=backend)
    with pytest.raises(ConfigError, match="endpoint_url: expected http://HOST"):
        find_input(InputConfig.model_construct(path="s3://b/x.jsonl", storage_options={}))
    monkeypatch.setitem(conf, "s3", {"key": "k", "secret": "s", "session": "mine"})
    with pytest.raises(ConfigError, match=r"storage_options.session has no counterpart"):
        open_store("s3://b/x", backend="obstore")
    open_store("s3://b/x", {"session": None}, backend="obstore")  # an option counts more


def test_an_emulators_address_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://me:hunter2secret@host:9000")
    with pytest.raises(ConfigError, match="STORAGE_EMULATOR_HOST: expected a host") as told:
        open_store("gs://b/x")
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_client_kwargs_are_a_mapping(backend: Backend) -> None:
    with pytest.raises(ConfigError, match=r"client_kwargs: expected a mapping, got str"):
        open_store("s3://b/x", {"client_kwargs": "hunter2"}, backend=backend)


@pytest.mark.parametrize(
    "endpoint", ["http://h", "https://h.example:9000/base/", "HTTP://[::1]:9000", "http://10.0.0.1:1"]
)
def test_ordinary_endpoints_are_taken(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_DISCOVERY_ENABLED", "true")  # a variable of botocore, which is no endpoint
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    open_store("s3://b/x", {"endpoint_url": endpoint, "key": "k", "secret": "s"})


@pytest.mark.parametrize(
    "path", ["a\0b", "/a\0b/c", "~a\0/b", "\ud800", "a/\udfff/b", "file:///a\0b", "s3://b/a\ud800"]
)
def test_a_path_that_the_system_cannot_take_is_refused(path: str) -> None:
    openers: list[Callable[[], object]] = [
        lambda: open_store(path),
        lambda: LocalStore(path.removeprefix("~")),
        lambda: open_run(path),
        lambda: load_hidden_states(f"{path}/k.safetensors"),
        lambda: InputConfig(path=path),
    ]
    for opened in openers:
        with pytest.raises((ConfigError, ValidationError), match=r"expected (a path or URL, got|scheme://place)"):
            opened()


def test_a_path_whose_bytes_are_no_utf8_is_a_path(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / os.fsdecode(b"\xff")))
    store.put("a", [b"1"])
    assert store.get("a") == b"1"
    assert [os.fsencode(path.name) for path in tmp_path.iterdir()] == [b"\xff"]
