"""obstore gives status, code and cause only in the text of its errors. The texts here are copied from real errors."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, UnauthenticatedError

from hsx_dist.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from hsx_dist.store.faults import Redactor, expired, past_the_end, redirected, translate
from hsx_dist.store.obstore import ObstoreStore

_RUST = "\n\nDebug source:\nGeneric {\n    store: 503 <Code>SlowDown</Code>,\n}"


def _said(status: str, code: str = "") -> str:
    body = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>no</Message></Error>' if code else ""
    return f"Error performing PUT http://h/b/o in 1ms - Server returned non-2xx status code: {status}: {body}{_RUST}"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (FileNotFoundError(_said("404 Not Found", "NoSuchBucket")), NotFound, "there is no bucket 'bkt'. Make"),
        (GenericError(_said("404 Not Found", "NoSuchBucket")), NotFound, "there is no bucket 'bkt'. Make"),
        (FileNotFoundError(_said("404 Not Found")), NotFound, "there is no such object"),
        (AlreadyExistsError(_said("412 Precondition Failed", "PreconditionFailed")), AlreadyExists, "got one"),
        (AlreadyExistsError(_said("409 Conflict", "ConditionalRequestConflict")), Unavailable, "cannot answer now"),
        (FileNotFoundError(_said("404 Not Found", "NoSuchUpload")), Unavailable, "cannot answer now"),
        (PermissionDeniedError(_said("403 Forbidden", "SignatureDoesNotMatch")), Denied, "Check the credentials"),
        (GenericError(_said("403 Forbidden")), Denied, "Check the credentials"),
        (GenericError(f"DeleteObjects failed: no (code: AccessDenied){_RUST}"), Denied, "Check the credentials"),
        (UnauthenticatedError(f"External AWS credential provider: gone{_RUST}"), Denied, "Check the credentials"),
        (GenericError(_said("503 Service Unavailable", "SlowDown")), Unavailable, "cannot answer now"),
        (GenericError(_said("500 Internal Server Error")), Unavailable, "cannot answer now"),
        (GenericError(f"after 1 retries - HTTP error: error sending request{_RUST}"), Unavailable, "no answer"),
        (GenericError(_said("501 Not Implemented", "NotImplemented")), StoreError, "NotImplemented"),
        (GenericError(_said("400 Bad Request", "BadDigest")), Unavailable, "cannot answer now"),
        (GenericError(_said("301 Moved Permanently", "PermanentRedirect")), StoreError, "another region"),
        (GenericError(_said("400 Bad Request", "InvalidArgument")), StoreError, "InvalidArgument"),
    ],
)
def test_kinds(error: Exception, kind: type[StoreError], says: str) -> None:
    told = translate(error, "put s3://bkt/o", "bkt", Redactor({}, {}))
    assert type(told) is kind
    assert says in str(told)
    assert "Debug source" not in str(told)


def test_a_conflict_without_a_code_passes_for_a_call_that_reads() -> None:
    error = AlreadyExistsError(_said("409 Conflict"))
    assert type(translate(error, "head s3://bkt/o", "bkt", Redactor({}, {}))) is Unavailable
    assert type(translate(error, "put-if-absent s3://bkt/o", "bkt", Redactor({}, {}))) is AlreadyExists


def test_azures_log_in_service_does_not_say_that_an_object_is_missing() -> None:
    said = f"Server returned non-2xx status code: 404 Not Found: <Error><Code>ContainerNotFound</Code></Error>{_RUST}"
    for what, kind in (("token", Denied), ("list", NotFound)):
        error = GenericError(f"Generic MicrosoftAzure error: Error performing {what} request: {said}")
        assert type(translate(error, "list az://bkt/o", "bkt", Redactor({}, {}))) is kind
    lost = GenericError(f"Error performing token request: HTTP error: error sending request{_RUST}")
    assert type(translate(lost, "list az://bkt/o", "bkt", Redactor({}, {}))) is Unavailable


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{\n  "error": {\n    "code": 404,\n    "message": "No such object: b/o"\n  }\n}', NotFound),
        ("<?xml version='1.0'?><Error><Code>BlobNotFound</Code></Error>", NotFound),
        ('{"message": "no Route matched", "code": 404}', Unavailable),
        ("404 page not found\n", Unavailable),
        ("<html><p>The code is in <Code>404</Code></html>", Unavailable),
    ],
)
def test_the_body_of_a_404_distinguishes_the_store_from_a_gateway(body: str, kind: type[StoreError]) -> None:
    said = f"Error performing GET http://h/b/o in 1ms - Server returned non-2xx status code: 404 Not Found: {body}"
    for error in (FileNotFoundError(said + _RUST), GenericError(f"Error performing list request: {said}{_RUST}")):
        assert type(translate(error, "list gs://bkt/o", "bkt", Redactor({}, {}))) is kind


def test_what_can_be_mended() -> None:
    assert expired(GenericError(_said("400 Bad Request", "ExpiredToken")))
    assert not expired(GenericError(_said("400 Bad Request", "InvalidToken")))
    assert redirected(GenericError(_said("301 Moved Permanently", "PermanentRedirect")))
    assert not redirected(GenericError(_said("503 Slow", "SlowDown")))
    assert past_the_end(GenericError(_said("416 Range Not Satisfiable", "InvalidRange")))


def test_an_error_that_was_handled_is_gone_at_once(tmp_path: Path) -> None:
    """An error refers to its frames, and these to the stored buffers. No reference cycle may keep them until Python's
    garbage collector runs.
    """
    store = ObstoreStore(f"file://{tmp_path}")
    seen = []
    gc.disable()
    try:
        try:
            store.head("nothing")
        except NotFound as e:
            seen.append(weakref.ref(e))
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()
