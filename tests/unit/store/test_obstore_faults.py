"""obstore gives status, code and cause only in the text of its errors. The texts here are copied from real errors."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, UnauthenticatedError

from hsx_dist.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from hsx_dist.store.faults import NoBucket, Redactor, expired, past_the_end, redirected, translate
from hsx_dist.store.obstore import ObstoreStore

_RUST = "\n\nDebug source:\nGeneric {\n    store: 503 <Code>SlowDown</Code>,\n}"


_LACKED = "The operation lacked valid authentication credentials for path"
_PROVIDER = "External AWS credential provider"
_SENT = "Generic S3 error: Error performing PUT http://h/o in 1ms, after 1 retries, max_retries: 1, retry_timeout: 2s "
_BULK = "Generic S3 error: DeleteObjects request failed for key o"
_BEGINNINGS: dict[type[Exception], str] = {
    FileNotFoundError: "Object at location o not found",
    AlreadyExistsError: "Object at location o already exists",
    PermissionDeniedError: "The operation lacked the necessary privileges to complete for path o",
    UnauthenticatedError: f"{_LACKED} o",
    GenericError: "Generic S3 error",
}


def _error(kind: type[Exception], status: str, code: str = "", step: str = "", body: str = "") -> Exception:
    if code:
        body = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>no</Message></Error>'
    request = f"{step}Error performing PUT http://h/b/o in 1ms - "
    return kind(f"{_BEGINNINGS[kind]}: {request}Server returned non-2xx status code: {status}: {body}{_RUST}")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (_error(FileNotFoundError, "404 Not Found", "NoSuchBucket"), NoBucket, "there is no bucket 'bkt'. Make"),
        (_error(GenericError, "404 Not Found", "NoSuchBucket"), NoBucket, "there is no bucket 'bkt'. Make"),
        (_error(FileNotFoundError, "404 Not Found"), NotFound, "there is no such object"),
        (_error(AlreadyExistsError, "412 Precondition Failed", "PreconditionFailed"), AlreadyExists, "got one"),
        (_error(AlreadyExistsError, "304 Not Modified"), StoreError, "304 Not Modified"),
        (_error(AlreadyExistsError, "409 Conflict", "ConditionalRequestConflict"), Unavailable, "cannot answer now"),
        (_error(FileNotFoundError, "404 Not Found", "NoSuchUpload"), Unavailable, "cannot answer now"),
        (_error(PermissionDeniedError, "403 Forbidden", "SignatureDoesNotMatch"), Denied, "Check the credentials"),
        (_error(GenericError, "403 Forbidden"), Denied, "Check the credentials"),
        (GenericError(f"{_BULK}: no (code: AccessDenied){_RUST}"), Denied, "Check the credentials"),
        (UnauthenticatedError(f"{_LACKED} {_PROVIDER}: gone{_RUST}"), Denied, "Check the credentials"),
        (_error(GenericError, "503 Service Unavailable", "SlowDown"), Unavailable, "cannot answer now"),
        (_error(GenericError, "500 Internal Server Error"), Unavailable, "cannot answer now"),
        (GenericError(f"{_SENT} - HTTP error: error sending request{_RUST}"), Unavailable, "no answer"),
        (_error(GenericError, "501 Not Implemented", "NotImplemented"), StoreError, "NotImplemented"),
        (_error(GenericError, "400 Bad Request", "BadDigest"), Unavailable, "cannot answer now"),
        (_error(GenericError, "301 Moved Permanently", "PermanentRedirect"), StoreError, "another region"),
        (_error(GenericError, "400 Bad Request", "InvalidArgument"), StoreError, "InvalidArgument"),
    ],
)
def test_kinds(error: Exception, kind: type[StoreError], says: str) -> None:
    told = translate(error, "put s3://bkt/o", "bkt", Redactor({}, {}))
    assert type(told) is kind
    assert says in str(told)
    assert "Debug source" not in str(told)


def test_a_conflict_without_a_code_passes_for_a_call_that_reads() -> None:
    error = _error(AlreadyExistsError, "409 Conflict")
    assert type(translate(error, "head s3://bkt/o", "bkt", Redactor({}, {}))) is Unavailable
    assert type(translate(error, "put-if-absent s3://bkt/o", "bkt", Redactor({}, {}))) is AlreadyExists


def test_azures_log_in_service_does_not_say_that_an_object_is_missing() -> None:
    for what, kind in (("token", Denied), ("list", NotFound)):
        error = _error(GenericError, "404 Not Found", "ContainerNotFound", f"Error performing {what} request: ")
        assert type(translate(error, "list az://bkt/o", "bkt", Redactor({}, {}))) is kind
    lost = "Error performing token request: Error performing POST REDACTED in 1ms - HTTP error: error sending request"
    error = GenericError(f"Generic MicrosoftAzure error: {lost}{_RUST}")
    assert type(translate(error, "list az://bkt/o", "bkt", Redactor({}, {}))) is Unavailable


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
    missing = _error(FileNotFoundError, "404 Not Found", body=body)
    listing = _error(GenericError, "404 Not Found", step="Error performing list request: ", body=body)
    for error in (missing, listing):
        assert type(translate(error, "list gs://bkt/o", "bkt", Redactor({}, {}))) is kind


def test_only_gcs_names_a_missing_object_in_json() -> None:
    """Kong answers with this form."""
    error = _error(FileNotFoundError, "404 Not Found", body='{"error": {"code": 404, "message": "no Route matched"}}')
    for scheme, kind in (("gs", NotFound), ("gcs", NotFound), ("s3", Unavailable), ("az", Unavailable)):
        assert type(translate(error, f"get {scheme}://bkt/o", "bkt", Redactor({}, {}))) is kind


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("409 Conflict", "BlobAlreadyExists", AlreadyExists),
        ("412 Precondition Failed", "ConditionNotMet", AlreadyExists),
        ("412 Precondition Failed", "TargetConditionNotMet", AlreadyExists),
        ("412 Precondition Failed", "LeaseIdMissing", Unavailable),
    ],
)
def test_azures_codes_say_whether_a_condition_holds(status: str, code: str, kind: type[StoreError]) -> None:
    error = _error(AlreadyExistsError, status, code)
    assert type(translate(error, "put-if-absent az://bkt/o", "bkt", Redactor({}, {}))) is kind


@pytest.mark.parametrize("lacking", ["ETag", "Last-Modified", "Content-Length"])
def test_an_answer_to_a_get_without_an_objects_headers_is_asked_for_again(lacking: str) -> None:
    error = GenericError(f"Generic GCS error: {lacking} Header missing from response{_RUST}")
    assert type(translate(error, "get gs://bkt/o", "bkt", Redactor({}, {}))) is Unavailable


def test_what_can_be_mended() -> None:
    where = "put s3://bkt/o"
    assert expired(_error(GenericError, "400 Bad Request", "ExpiredToken"), where)
    assert not expired(_error(GenericError, "400 Bad Request", "InvalidToken"), where)
    assert redirected(_error(GenericError, "301 Moved Permanently", "PermanentRedirect"), where)
    assert not redirected(_error(GenericError, "503 Slow", "SlowDown"), where)
    assert past_the_end(_error(GenericError, "416 Range Not Satisfiable", "InvalidRange"), where)


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


@pytest.mark.parametrize("secret", ["\udc80 of bytes", "\ud800 of a text"], ids=["bytes", "text"])
def test_a_credential_that_is_not_utf_8_is_removed(secret: str) -> None:
    """Variables of other programs may have such values. The error of their encoding would have the whole value."""
    assert Redactor({}, {"OTHER_TOKEN": secret})(f"got {secret}") == "got (not shown)"
