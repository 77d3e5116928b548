from __future__ import annotations

import base64
import errno
import json
import traceback
from typing import Any
from urllib.parse import quote

import pytest

from hsx_dist.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from hsx_dist.store import open_store
from hsx_dist.store.faults import NoBucket, Redactor, expired, shown_cause, translate
from hsx_dist.store.opening import Backend
from tests.harness.http_server import Answers, s3_options, served

_NOTHING = Redactor({}, {})


class ClientError(Exception):
    """Like botocore's error."""

    def __init__(self, code: str, status: int | None, message: str = "said the server"):
        super().__init__(f"An error occurred ({code}): {message}")
        self.operation_name = "PutObject"
        self.response: dict[str, Any] = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpError(Exception):
    """Like gcsfs's error."""

    def __init__(self, code: int):
        super().__init__(f"said the server, {code}")
        self.code = code


class NoCredentialsError(Exception): ...


class HTTPClientError(Exception): ...


class EndpointConnectionError(HTTPClientError): ...


def _caused(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (_caused(FileNotFoundError("x"), ClientError("NoSuchBucket", 404)), NoBucket, "there is no bucket 'bkt'. Make"),
        (_caused(FileNotFoundError("x"), ClientError("NoSuchKey", 404)), NotFound, "there is no such object"),
        (FileNotFoundError("x"), NotFound, "there is no such object"),
        (_caused(OSError(errno.EINVAL, "x"), ClientError("PreconditionFailed", 412)), AlreadyExists, "got one"),
        (FileExistsError("x"), AlreadyExists, "got one"),
        (_caused(PermissionError("x"), ClientError("AccessDenied", 403)), Denied, "Check the credentials"),
        (_caused(PermissionError("x"), ClientError("RequestTimeTooSkewed", 403)), Denied, "clock"),
        (_caused(PermissionError("x"), ClientError("ExpiredToken", 400)), Denied, "Check the credentials"),
        (NoCredentialsError("Unable to locate credentials"), Denied, "Check the credentials"),
        (OSError("Forbidden: b/bkt/o\nno"), Denied, "Check the credentials"),
        (HttpError(401), Denied, "Check the credentials"),
        (_caused(OSError(errno.EBUSY, "x"), ClientError("SlowDown", 503)), Unavailable, "cannot answer now"),
        (_caused(OSError(errno.EIO, "x"), ClientError("InternalError", 500)), Unavailable, "cannot answer now"),
        (_caused(TimeoutError("x"), ClientError("RequestTimeout", 400)), Unavailable, "cannot answer now"),
        (_caused(FileNotFoundError("x"), ClientError("NoSuchUpload", 404)), Unavailable, "cannot answer now"),
        (_caused(OSError(errno.EBUSY, "x"), ClientError("ConditionalRequestConflict", 409)), Unavailable, "cannot"),
        (HttpError(429), Unavailable, "cannot answer now"),
        (HttpError(503), Unavailable, "cannot answer now"),
        (EndpointConnectionError("Could not connect"), Unavailable, "Check the endpoint's address"),
        (TimeoutError(), Unavailable, "Check the endpoint's address"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Unavailable, "Check the endpoint's address"),
        (_caused(OSError(errno.EREMCHG, "x"), ClientError("PermanentRedirect", 301)), StoreError, "another region"),
        (_caused(OSError(errno.EINVAL, "x"), ClientError("InvalidArgument", 400)), StoreError, "InvalidArgument"),
        (OSError(errno.EMFILE, "Too many open files"), Unavailable, "Too many open files"),
        (OSError(errno.ENFILE, "Too many open files in system"), Unavailable, "Too many open files"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Unavailable, "Cannot allocate memory"),
        (OSError(errno.ENOSPC, "full"), StoreError, "Free some space"),
        (KeyError("UploadId"), Unavailable, "got another"),  # of s3fs, for a gateway's page
        (KeyError("Key"), StoreError, "KeyError"),
        (ValueError("Expecting value"), StoreError, "Expecting value"),
    ],
)
def test_every_back_ends_error_has_its_type_and_hint(error: Exception, kind: type[StoreError], says: str) -> None:
    told = translate(error, "put s3://bkt/run/a", "bkt", _NOTHING)
    assert type(told) is kind
    assert says in str(told)
    assert str(told).startswith("put s3://bkt/run/a: ")


@pytest.mark.parametrize(
    ("where", "kind"),
    [("put gs://b/a", Unavailable), ("open gs://b", StoreError), ("get s3://b/a", StoreError)],
)
def test_only_a_service_that_answers_in_json_is_unavailable_for_other_text(where: str, kind: type[StoreError]) -> None:
    """A program or a file with credentials has JSON, too."""
    assert type(translate(json.JSONDecodeError("Expecting value", "<html>", 0), where, "b", _NOTHING)) is kind
    with pytest.raises(UnicodeDecodeError) as page:
        "Wartung läuft".encode("latin-1").decode()
    assert type(translate(page.value, where, "b", _NOTHING)) is kind


@pytest.mark.parametrize(
    ("verb", "code", "kind"),
    [
        ("head", "409", Unavailable),
        ("get", "409", Unavailable),
        ("list", "409", Unavailable),
        ("get", "ObjectLocked", StoreError),
        ("put", "409", StoreError),
    ],
)
def test_a_conflict_without_a_code_passes_for_a_call_that_reads(verb: str, code: str, kind: type[StoreError]) -> None:
    error = _caused(OSError(errno.EBUSY, "Conflict"), ClientError(code, 409))
    assert type(translate(error, f"{verb} s3://bkt/a", "bkt", _NOTHING)) is kind


def test_credentials_are_removed_from_what_a_back_end_says() -> None:
    options = {
        "key": "AKIAEXAMPLE",
        "client_kwargs": {"aws_session_token": "session-token", "region_name": "eu-north-1"},
        "token": {"client_email": "me@example.org"},
    }
    redact = Redactor(options, {"AWS_SECRET_ACCESS_KEY": "from-the-environment", "HOME": "/home/somebody"})
    said = "AKIAEXAMPLE session-token eu-north-1 me@example.org from-the-environment /home/somebody"
    told = str(translate(OSError(said), "get x", "bkt", redact))
    for secret in ("AKIAEXAMPLE", "session-token", "me@example.org", "from-the-environment"):
        assert secret not in told
    assert "eu-north-1" in told
    assert "/home/somebody" in told


def test_credentials_in_urls_of_options_and_of_a_proxy_are_removed() -> None:
    options = {"client_kwargs": {"endpoint_url": "http://me:very%2Fsecret@host:9000"}}
    redact = Redactor(options, {"HTTPS_PROXY": "http://proxy-user:proxy-secret@proxy:3128", "NO_PROXY": "a,b"})
    told = redact("http://me:very%2Fsecret@host:9000/x, very/secret, by http://proxy-user:proxy-secret@proxy:3128")
    assert told == "http://(not shown)@host:9000/x, (not shown), by http://(not shown)@proxy:3128"


def test_credentials_that_a_library_quoted_are_removed() -> None:
    redact = Redactor({"token": "ya29.a0/AfB+cS3 cret=="}, {})
    for quoted in ("a0%2FAfB%2BcS3%20cret%3D%3D", "a0%2FAfB%2BcS3+cret%3D%3D", "a0/AfB%2BcS3%20cret%3D%3D"):
        assert redact(f"GET /tokeninfo?access_token=ya29.{quoted} failed") == (
            "GET /tokeninfo?access_token=(not shown) failed"
        )
    redact.learn(["an/other"])
    assert redact("an%2Fother") == "(not shown)"


def test_credentials_are_removed_in_the_forms_that_are_sent() -> None:
    key, binary = "customer's key?>", bytes(range(256))
    options = {
        "s3_additional_kwargs": {"SSECustomerKey": key, "CopySourceSSECustomerKey": bytearray(binary)},
        "client_kwargs": {"auth": ("me", "hunter2?", "latin1")},
    }
    redact = Redactor(options, {})
    for secret in (key.encode(), binary, b"me:hunter2?"):
        sent = base64.b64encode(secret).decode()
        for form in (sent, quote(sent, safe=""), sent.encode().hex(" ")):
            assert redact(f"<x>{form}</x>") == "<x>(not shown)</x>"
    assert redact(f"{key} {binary!r} hunter2?") == "(not shown) b'(not shown)' (not shown)"


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_an_error_that_quotes_the_signed_request_shows_no_customers_key(backend: Backend) -> None:
    """S3 answers so to a wrong signature. The error's cause is in tracebacks and logs."""
    key = "k" * 32
    sent: list[str] = []

    class Quoting(Answers):
        def do_GET(self) -> None:
            sent.append(self.headers["x-amz-server-side-encryption-customer-key"])
            request = f"GET\nx-amz-server-side-encryption-customer-key:{sent[-1]}\n"
            quoted = f"<CanonicalRequestBytes>{request.encode().hex(' ')}</CanonicalRequestBytes>"
            self.answer(403, f"<Error><Code>SignatureDoesNotMatch</Code>{quoted}</Error>".encode())

    kwargs = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
    with served(Quoting) as url:
        options = {**s3_options(url), "s3_additional_kwargs": kwargs}
        with pytest.raises(Denied) as refused:
            open_store("s3://b/run", options, backend=backend, retry_seconds=0).get("a")
    shown = "".join(traceback.format_exception(refused.value))
    assert sent[0] == base64.b64encode(key.encode()).decode()
    for form in (key, sent[0], sent[0].encode().hex(" ")):
        assert form not in shown


def test_a_cause_is_shown_if_none_of_its_causes_has_a_credential() -> None:
    redact = Redactor({"secret": "hunter2secret"}, {})
    harmless = _caused(OSError("a"), _caused(OSError("b"), _caused(OSError("c"), OSError("d"))))
    assert shown_cause(harmless, redact) is harmless
    quoting = _caused(OSError("a"), _caused(OSError("b"), _caused(OSError("c"), OSError("hunter2secret"))))
    assert shown_cause(quoting, redact) is None


def test_the_word_anonymous_is_not_hidden_as_a_secret() -> None:
    assert Redactor({"token": "anon"}, {})("anonymous caller") == "anonymous caller"


def test_expired_credentials_are_recognised() -> None:
    assert expired(_caused(PermissionError("x"), ClientError("ExpiredToken", 400)))
    assert not expired(_caused(PermissionError("x"), ClientError("AccessDenied", 403)))


def test_the_context_of_an_error_does_not_decide_its_type() -> None:
    error = EndpointConnectionError("Could not connect")
    error.__context__ = FileNotFoundError("the credentials file")
    assert type(translate(error, "get x", "bkt", _NOTHING)) is Unavailable


@pytest.mark.parametrize("before", range(230, 310, 3))
def test_a_credential_is_not_shown_in_part_where_a_message_is_cut(before: int) -> None:
    redact = Redactor({"secret": "very-secret-value"}, {})
    error = translate(ClientError("AccessDenied", 403, "x" * before + " very-secret-value"), "put a", "b", redact)
    assert "very" not in str(error)


@pytest.mark.parametrize("before", range(230, 310, 3))
def test_an_unknown_credential_is_not_shown_in_part_where_a_message_is_cut(before: int) -> None:
    said = "x" * before + " mirror https://hunter2secret@host/x failed"
    assert "hunter" not in str(translate(ClientError("Odd", 400, said), "put a", "b", _NOTHING))
