"""An error while credentials are looked up is never an answer about an object."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gcsfs
import obstore
import pytest
from botocore.exceptions import CredentialRetrievalError
from botocore.utils import ContainerMetadataFetcher
from google.auth.exceptions import RefreshError, TransportError
from obstore.exceptions import UnauthenticatedError
from obstore.store import GCSStore

from hsx_dist.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from hsx_dist.store import Store, open_store
from hsx_dist.store.base import Conditional
from hsx_dist.store.faults import Redactor, after_renewal, translate
from hsx_dist.store.obstore_options import GcsfsCredentials
from hsx_dist.store.opening import Backend
from tests.harness.http_server import Answers, served

_LOOK_UP = """
import datetime, json
end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=30)
print(json.dumps({"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b", "Expiration": end.isoformat()}))
"""

#: As a service for credentials gives them.
_CREDENTIALS = json.dumps(
    {"Code": "Success", "AccessKeyId": "a", "SecretAccessKey": "b", "Token": "c", "Expiration": "2999-01-01T00:00:00Z"}
).encode()


class Service(Answers):
    """S3 with an object for every name but "absent", and STS, which answers every request with ``sts`` and ``code``.

    ``agent``: the status of a container's and an instance's service for credentials.
    """

    sts, code = 404, "NoSuchEntity"
    expired = False
    agent = 200

    def do_PUT(self) -> None:
        self.received()
        self.answer(self.agent, b"a token")

    def do_HEAD(self) -> None:
        self.answer_object(404 if self.path.endswith("absent") else 200)

    def do_GET(self) -> None:
        if self.path.endswith("/security-credentials/"):
            return self.answer(self.agent, b"role")
        if self.path.endswith(("/agent", "/role")):
            return self.answer(self.agent, _CREDENTIALS)
        return self.answer(400, b"<Error><Code>ExpiredToken</Code></Error>") if self.expired else self.do_HEAD()

    def do_POST(self) -> None:
        self.received()
        self.answer(self.sts, f"<ErrorResponse><Error><Code>{self.code}</Code></Error></ErrorResponse>".encode())


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with served(Service) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield


def _program(tmp_path: Path) -> Path:
    """Let a profile ask a program for credentials that expire at once. Returns the program."""
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n{_LOOK_UP}")
    tool.chmod(0o755)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {shlex.quote(str(tool))}\n")
    return tool


def _role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let STS exchange a token for credentials. Returns the token's file."""
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/x")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "identity"))
    return tmp_path / "identity"


def _open(backend: Backend) -> Store:
    return open_store("s3://b/r", backend=backend, retry_seconds=0)


_CALLS: list[Callable[[Store], object]] = [
    lambda store: store.head("a"),
    lambda store: store.get("a", 10),
    lambda store: list(store.list()),
    lambda store: store.delete("a"),
    lambda store: store.put_if_absent("a", b"x"),
]


def _require_denied(store: Store, says: str) -> None:
    for call in _CALLS:
        with pytest.raises(Denied, match=says):
            call(store)


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
class TestCredentials:
    def test_a_program_is_missing_before_the_first_call(self, backend: Backend, tmp_path: Path) -> None:
        _program(tmp_path).unlink()
        with pytest.raises(Denied, match=r"No such file or directory: '.*/tool'"):
            _open(backend).head("a")

    def test_a_program_goes_missing(self, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tool, store = _program(tmp_path), _open(backend)
        assert store.head("a").size == 0
        with pytest.raises(NotFound):
            store.head("absent")
        monkeypatch.setattr(Service, "expired", True)  # obstore keeps credentials until the service refuses them
        tool.unlink()
        with pytest.raises(Denied, match=r"No such file or directory: '.*/tool'"):
            store.get("a", 10)

    def test_a_token_file_is_missing(self, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _role(tmp_path, monkeypatch)
        _require_denied(_open(backend), "No such file or directory: '.*/identity'")

    @pytest.mark.parametrize("status", [404, 409, 412, 416])
    def test_sts_refuses(self, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
        monkeypatch.setattr(Service, "sts", status)
        _role(tmp_path, monkeypatch).write_text("identity")
        _require_denied(_open(backend), "NoSuchEntity.*AssumeRoleWithWebIdentity")

    @pytest.mark.parametrize("status", [503, None])
    def test_sts_answers_later(
        self, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None
    ) -> None:
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setattr(Service, "sts", status)
        monkeypatch.setattr(Service, "code", "ServiceUnavailable")
        if status is None:
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:1")
        _role(tmp_path, monkeypatch).write_text("identity")
        with pytest.raises(Unavailable, match="AssumeRoleWithWebIdentity" if status else "127.0.0.1:1"):
            _open(backend).head("a")

    @pytest.mark.parametrize(
        ("status", "kind"), [(503, Unavailable), (429, Unavailable), (None, Unavailable), (404, Denied)]
    )
    def test_a_containers_agent_answers_later(
        self, backend: Backend, monkeypatch: pytest.MonkeyPatch, status: int | None, kind: type[StoreError]
    ) -> None:
        monkeypatch.setattr(ContainerMetadataFetcher, "RETRY_ATTEMPTS", 1)
        monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{os.environ['AWS_ENDPOINT_URL']}/agent")
        monkeypatch.setattr(Service, "agent", status or 200)
        if status is None:
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:1/agent")
        with pytest.raises(kind, match="container-role"):
            _open(backend).head("a")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{os.environ['AWS_ENDPOINT_URL']}/agent")
        monkeypatch.setattr(Service, "agent", 200)
        monkeypatch.setattr(sys.modules[__name__], "_CREDENTIALS", _CREDENTIALS.replace(b"2999", b"2001"))
        store = _open(backend)  # with credentials that expired
        monkeypatch.setattr(Service, "agent", status or 503)
        with pytest.raises(kind, match="container-role"):
            store.head("a")
        monkeypatch.setattr(Service, "agent", 200)
        monkeypatch.setattr(sys.modules[__name__], "_CREDENTIALS", _CREDENTIALS.replace(b"2001", b"2999"))
        assert store.head("a").size == 0

    def test_an_instances_role_is_found_later(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        """botocore hides that its service did not answer. So this is ``Denied``, but not for ever."""
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", os.environ["AWS_ENDPOINT_URL"])
        monkeypatch.setattr(Service, "agent", 503)
        store = _open(backend)
        with pytest.raises(Denied, match="Unable to locate credentials"):
            store.head("a")
        monkeypatch.setattr(Service, "agent", 200)
        assert store.head("a").size == 0


def _of_gcsfs(cause: Exception) -> Exception:
    """Return gcsfs's error for a failed renewal of a token."""
    refresh = RefreshError(cause, retryable=getattr(cause, "retryable", False))
    refresh.__cause__ = cause
    error = gcsfs.retry.HttpError({"code": 401, "message": "Invalid Credentials"})
    error.__cause__ = refresh
    return error


def _raised_from_none() -> Exception:
    """Return a final refusal that was raised while another error was handled."""
    try:
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except ConnectionRefusedError:
            raise RefreshError("invalid_grant") from None
    except RefreshError as e:
        return e


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (_raised_from_none(), Denied),
        (_of_gcsfs(TransportError("metadata server unavailable. Response status: 503\nno")), Unavailable),
        (_of_gcsfs(TransportError("metadata service. Status: 502 Response:\nno")), Unavailable),
        (_of_gcsfs(TransportError("metadata service. Status: 404 Response:\nno")), Denied),
        (_of_gcsfs(RefreshError("internal_failure", retryable=True)), Unavailable),
        (_of_gcsfs(RefreshError("invalid_grant: Token has been revoked")), Denied),
        (_of_gcsfs(RefreshError("Unable to acquire credentials", '{"error": {"code": 503}}')), Unavailable),
        (_of_gcsfs(ConnectionRefusedError(111, "Connection refused")), Unavailable),
        (CredentialRetrievalError(provider="iam-role", error_msg="Credential refresh failed, no: token"), Unavailable),
        (CredentialRetrievalError(provider="custom-process", error_msg="Credential refresh failed, no: token"), Denied),
    ],
)
def test_a_failed_renewal(error: Exception, kind: type[StoreError]) -> None:
    class Source:
        def maybe_refresh(self) -> None:
            raise error

    assert type(translate(error, "get gs://b/r/a", "b", Redactor({}, {}))) is kind
    with pytest.raises(UnauthenticatedError) as caught:
        obstore.head(GCSStore("b", credential_provider=GcsfsCredentials(Source())), "a")
    assert type(translate(caught.value, "get gs://b/r/a", "b", Redactor({}, {}))) is kind


class ClientError(Exception):
    """Like botocore's error."""

    def __init__(self, operation_name: str, code: str, status: int):
        super().__init__(f"({code}) when calling {operation_name}")
        self.operation_name = operation_name
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """Like the error of gcsfs, and of a proxy in aiohttp."""

    code = status = 404


@pytest.mark.parametrize(
    ("error", "where", "kind"),
    [
        (ClientError("HeadObject", "404", 404), "head s3://b/r/a", NotFound),
        (ClientError("GetObject", "NoSuchKey", 404), "get s3://b/r/a", NotFound),
        (ClientError("GetRoleCredentials", "404", 404), "get s3://b/r/a", Denied),
        (ClientError("AssumeRole", "ServiceUnavailable", 503), "get s3://b/r/a", Unavailable),
        (HttpError(), "get gs://b/r/a", StoreError),
        (FileNotFoundError("b/r/a"), "get gs://b/r/a", NotFound),
        (FileNotFoundError("b/r/a"), "get s3://b/r/a", NotFound),
        (FileNotFoundError("https://h/r/a"), "get https://h/r/a", NotFound),
        (FileNotFoundError("tool"), "open s3://b/r", Denied),
        (FileNotFoundError(2, "No such file", "/b/r/a"), "get gs://b/r/a", Denied),
        (FileNotFoundError(2, "No such file"), "get https://h/r/a", Denied),  # of OpenSSL, which names no file
        (FileNotFoundError(2, "No such file"), "get sftp://h/r/a", NotFound),
        (FileNotFoundError(2, "No such file", "/r/a"), "get sftp://h/r/a", NotFound),
        (FileNotFoundError(2, "No such file", "\\\\h\\r\\a"), "get smb://h/r/a", NotFound),
        (FileNotFoundError(2, "No such file", "h/r/p1"), "list dav://h/r/p", NotFound),
        # adlfs: the account is a part of the URL, and none of the path.
        (FileNotFoundError(2, "No such file", "c/r/a"), "head abfs://c@x.dfs.core.windows.net/r/a", NotFound),
        (FileNotFoundError(2, "No such file", "c/r/p"), "list abfs://c@x.dfs.core.windows.net/r/p/", NotFound),
        (FileNotFoundError(2, "No such file", "c"), "list abfs://c@x.dfs.core.windows.net/r/", NotFound),
        (FileNotFoundError(2, "No such file", "/run/token"), "get abfs://c@x.dfs.core.windows.net/r/a", Denied),
        # A folder that goes missing while it is listed.
        (FileNotFoundError(2, "No such file", "/r/p/1"), "list sftp://h/r/p/", NotFound),
        (FileNotFoundError(2, "No such file", "/r/p1"), "list sftp://h/r/p", NotFound),
        (FileNotFoundError(2, "No such file", "/r"), "list sftp://h/r/p/", NotFound),
        (FileNotFoundError(2, "No such file", "/p/1"), "list sftp://h/p/", NotFound),
        (FileNotFoundError(2, "No such file", "/home/me/r/a"), "get sftp://h/r/a", NotFound),
        (FileNotFoundError(2, "No such file", "/a/b/p/1"), "list file:///a/b/p/", NotFound),
        (FileNotFoundError(2, "No such file", "/a"), "list file:///a/b/p/", NotFound),
        (FileNotFoundError(2, "No such file", b"/a/b/c"), "get file:///a/b/c", NotFound),
        (FileNotFoundError(2, "No such file", "/home/me/token"), "list sftp://h/r/p", Denied),
        (FileNotFoundError(2, "No such file", "/etc/ssl/ca.pem"), "list sftp://h/", Denied),
        (FileNotFoundError(2, "No such file", "/etc/ssl/ca.pem"), "list abfs://c/a", Denied),
        (FileNotFoundError(2, "No such file", "/etc/ssl/ca.pem"), "get abfs://c/a", Denied),
        (NotADirectoryError(20, "Not a directory", "/home/me/tool"), "get sftp://h/r/a", Denied),
        (FileExistsError(17, "File exists", "/home/me/cache"), "put-if-absent gs://b/r/a", Denied),
        (FileExistsError("b/r/a"), "put-if-absent gs://b/r/a", AlreadyExists),
    ],
)
def test_only_an_answer_about_the_object_says_that_it_is_missing(
    error: Exception, where: str, kind: type[StoreError]
) -> None:
    assert type(translate(error, where, "b", Redactor({}, {}))) is kind


@pytest.mark.parametrize(("error", "kind"), [(NotFound("x"), Denied), (Unavailable("x"), Unavailable)])
def test_an_error_of_a_renewal_is_not_about_the_object(error: StoreError, kind: type[StoreError]) -> None:
    def renew() -> bool:
        raise error

    assert type(after_renewal(Denied("get a"), renew)) is kind
    assert str(after_renewal(Denied("get a"), renew)).startswith("get a. ")


def test_a_path_in_the_environment_is_no_credential() -> None:
    environ = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/identity", "PWD": "/home/somebody", "MY_TOKEN": "very-secret"}
    assert Redactor({}, environ)("/var/run/identity /home/somebody very-secret") == (
        "/var/run/identity /home/somebody (not shown)"
    )


class Rotated(Answers):
    """Refuses old tokens as S3 does: the answer to a HEAD has no body, thus no code."""

    token = "old"

    def do_GET(self) -> None:
        if self.headers["x-amz-security-token"] == self.token:
            return self.answer_object(200, b"x")
        return self.answer(400, b"<Error><Code>ExpiredToken</Code></Error>")

    do_HEAD = do_GET


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_an_expired_token_is_renewed_after_a_head(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    """In a server ``version`` of obstore's store is the only call of its second client."""
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "SESSION_TOKEN": "old"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(Rotated, "token", "old")
    with served(Rotated) as url:
        options = {"endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}}
        store = open_store("s3://b/r", options, backend=backend, retry_seconds=30)
        assert isinstance(store, Conditional)
        assert (store.head("a").size, store.version("a")) == (1, '"1"')
        for token, call in (("newer", lambda: store.head("a").size), ("newest", lambda: store.version("a"))):
            monkeypatch.setattr(Rotated, "token", token)
            monkeypatch.setenv("AWS_SESSION_TOKEN", token)
            assert call() in (1, '"1"')
