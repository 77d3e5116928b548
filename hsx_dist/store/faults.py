"""Translation of the back ends' exceptions into the store's errors.

Recognises the exceptions by their names and fields, so that this module imports none of the libraries.
"""

from __future__ import annotations

import base64
import errno
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote, quote_plus

from hsx_dist.config.redaction import redact_text
from hsx_dist.config.secret_names import looks_secret
from hsx_dist.config.urls import url_secrets
from hsx_dist.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from hsx_dist.store.look_ups import CONNECTION, chain_of, failed_for_now, found_none, names_of
from hsx_dist.store.obstore_errors import RUST, ObstoreError, obstore_error
from hsx_dist.text import shown_error, text_of

_DENIED_CODES = frozenset(
    {
        "AccessDenied",
        "AccountProblem",
        "AllAccessDisabled",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "NotSignedUp",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnauthorizedAccess",
    }
)
_BUSY_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        # The library completed a multipart upload a second time after the first response was lost.
        "NoSuchUpload",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentSHA256Mismatch",
    }
)
#: Codes with the status 404 that say that an object or its bucket is missing. MinIO, Ceph, SeaweedFS, R2 and GCS's XML
#: have S3's. The other ones are Azure's.
_MISSING_CODES = frozenset(
    {"BlobNotFound", "ContainerNotFound", "NoSuchBucket", "NoSuchKey", "NoSuchVersion", "ResourceNotFound"}
)
#: Codes with the status 416 that say that the range begins past the object's end. Azure has S3's.
_RANGE_CODES = frozenset({"InvalidRange"})
#: Codes with the status 409 or 412 that say that the condition of a put or a delete does not hold.
_CONDITION_CODES = frozenset({"BlobAlreadyExists", "ConditionNotMet", "PreconditionFailed", "TargetConditionNotMet"})
_NO_CREDENTIALS = frozenset(
    {
        "CredentialRetrievalError",
        "DefaultCredentialsError",
        "MetadataRetrievalError",
        "NoAuthTokenError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "RefreshError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
    }
)
#: Errors of a disk or a mount that may end. The client or the server of a shared file system may just be restarted.
#: Another thread or process may give back descriptors and memory.
TRANSIENT = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ENOLCK, errno.EREMOTEIO, errno.ESTALE),
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ETIMEDOUT),
    }
)
#: The file system is full, or the file is too large for it.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: botocore's names of S3's operations. Other services answer while credentials are looked up, such as STS.
_S3_OPERATIONS = frozenset(
    {
        "AbortMultipartUpload",
        "CompleteMultipartUpload",
        "CreateMultipartUpload",
        "CreateSession",
        "DeleteObject",
        "GetObject",
        "HeadBucket",
        "HeadObject",
        "ListObjectVersions",
        "ListObjectsV2",
        "PutObject",
        "UploadPart",
    }
)
#: Classes of libraries for a 404 of the store itself. aiohttp has a subclass for a proxy's. obstore has an own class
#: for that of a conditional put.
_NOT_FOUND = frozenset(
    {"ClientResponseError", "NotFound", "NotFoundError", "PreconditionError", "ResourceNotFoundError"}
)
#: Verbs that only read: for them no conflict lasts.
_READS = ("get", "head", "list")
#: Verbs with a condition, of which a 409 or a 412 says that it does not hold.
_CONDITIONAL = ("put-if-absent", "put-version", "delete-version")
#: Schemes whose objects are no files: an error with the system's number is about another file.
_WEB = ("s3", "s3a", "gs", "gcs", "http", "https")
_REGION_CODES = frozenset({"301", "307", "AuthorizationHeaderMalformed", "PermanentRedirect"})
#: What a gateway's page lacks, as s3fs and gcsfs report it for an upload in pieces.
_LACKING = (("ETag",), ("Location",), ("UploadId",))
#: Characters of a library's message that an error repeats: S3's XML responses are longer than a log line.
_DETAIL = 300
# gcsfs takes these words as `token`. They are no secrets, and redacting them would garble messages.
_WHERE_TO_LOOK = frozenset({"anon", "browser", "cache", "cloud", "google_default"})

_CREDENTIALS_HINT = (
    "Check the credentials (environment, profile, instance role, or storage_options), and that they permit this"
)
_ENDPOINT_HINT = "Check the endpoint's address, the service, and the network to it"


class NoBucket(NotFound):
    """There is no such bucket, thus no object."""


@contextmanager
def unless_missing() -> Iterator[None]:
    """Suppress ``NotFound``, except that of a bucket."""
    try:
        yield
    except NoBucket:
        raise
    except NotFound:
        pass


class Redactor:
    """Removes the values of credentials from text that comes from a back end."""

    def __init__(self, options: Mapping[str, Any], environ: Mapping[str, str]):
        values = {*_secret_values(options), *(v for k, v in environ.items() if _holds_a_secret(k) and len(v) >= 8)}
        values.update(secret for v in environ.values() for secret in url_secrets(v) if len(secret) >= 8)  # of a proxy
        self._secrets: list[str] = []
        self.learn(values)

    def learn(self, secrets: Collection[str | bytes]) -> None:
        """Also remove ``secrets``: credentials that were found after the store was opened."""
        new = {v for v in tuple(secrets) if isinstance(v, (str, bytes)) and len(v) >= 4}
        values = {*self._secrets, *(form for v in new for form in _forms(v))}
        if len(values) > len(self._secrets):
            # Longest first: one secret may be a part of another.
            self._secrets = sorted(values, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "(not shown)")
        return text


def _forms(secret: str | bytes) -> Iterator[str]:
    """Yield the texts in which libraries, requests and answers show a secret."""
    # A variable that is not UTF-8 has halves of surrogate pairs.
    raw = secret if isinstance(secret, bytes) else secret.encode(errors="surrogatepass")
    as_text = repr(secret).removeprefix("b'").removesuffix("'") if isinstance(secret, bytes) else secret
    # In base64 a customer's key of S3 is sent, and a user with a password.
    for text in (as_text, base64.b64encode(raw).decode()):
        yield text
        # Libraries quote the parts of a URL.
        yield from (form(text, errors="surrogatepass") for form in (quote, quote_plus, partial(quote, safe="")))
        # S3's answer to a wrong signature has the bytes of the signed request, such as "6b 65 79".
        yield text.encode(errors="surrogatepass").hex(" ")


def shown_cause(error: BaseException, redact: Callable[[str], str]) -> BaseException | None:
    """Return the error as the cause that tracebacks show, or None if its text contains a credential."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    text = " ".join(f"{shown_error(e)} {text_of(e.args)}" for e in chain)
    return error if redact(text) == text else None


def translate(error: BaseException, where: str, bucket: str, redact: Redactor) -> StoreError:
    """Return the store's error for a back end's ``error``.

    ``where``: verb and object, without credentials. ``bucket``: its bucket, for hints.
    """
    of_http = where.partition(" ")[2].startswith("http")
    if of_http and isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        # fsspec calls every failure of a HEAD a missing file: also a lost connection, and every other status.
        return translate(error.__cause__, where, bucket, redact)
    chain = list(chain_of(error))
    names = names_of(chain)
    said = _said(chain, where)
    code, status = _code(chain, said)
    detail = _detail(chain, code, status, redact)
    if failed_for_now(error):
        return Unavailable(f"{where}: no credentials now: {detail}. Check their service, and try again later")
    # Before AlreadyExists: obstore raises AlreadyExistsError for every 409, also S3's ConditionalRequestConflict.
    busy = code in _BUSY_CODES or status in (408, 410, 429, 499)
    busy = busy or (status is not None and status >= 500 and status != 501)
    # The answer to a HEAD has no body, thus no code.
    if busy or (status == 409 and code in ("", "409") and where.startswith(_READS)):
        return Unavailable(f"{where}: the service cannot answer now: {detail}. Check the service, and try again later")
    # Before NotFound and AlreadyExists, which are answers about the object.
    of_another_service = said.of_another_service or any(map(_of_another_service_of_aws, chain))
    if (of_another_service and not said.unanswered) or _of_another_file(error, where):
        return Denied(f"{where}: no usable credentials or connection: {detail}. {_CREDENTIALS_HINT}")
    if code == "NoSuchBucket" or said.lacks_bucket:
        return NoBucket(f"{where}: there is no bucket {bucket!r}. Make it, or correct the url")
    # Such a status proves nothing: proxies and services for credentials answer with it too, perhaps with a code in XML.
    conditional = status in (409, 412) and where.startswith(_CONDITIONAL)
    known = code in (_MISSING_CODES if status == 404 else _RANGE_CODES if status == 416 else _CONDITION_CODES)
    of_a_page = (status in (404, 416) or conditional) and (said.of_a_page or any(map(_of_a_page, chain)))
    if (of_a_page and not known) or (status == 412 and where.startswith(_READS)):  # a read has no condition
        return Unavailable(f"{where}: expected the store's answer, got another: {detail}. {_ENDPOINT_HINT}")
    # obstore also raises AlreadyExistsError for a 304, which is no answer to a put.
    exists = (isinstance(error, FileExistsError) or "AlreadyExistsError" in names) and status in (None, 409, 412)
    if "PreconditionFailed" in (code, *names) or status == 412 or exists:
        return AlreadyExists(f"{where}: expected no object of this name, got one")
    if code in _REGION_CODES or status in (301, 307):
        return StoreError(f"{where}: {detail}. The bucket is in another region. Set the region, or the endpoint")
    if code == "RequestTimeTooSkewed":
        return Denied(f"{where}: {detail}. Set this machine's clock")
    refused = isinstance(error, PermissionError) or names & {"PermissionDeniedError", "UnauthenticatedError"}
    denied = code in _DENIED_CODES or status in (401, 403) or any(map(_of_gcsfs_403, chain))
    if denied or (refused and not said.unanswered):
        return Denied(f"{where}: not allowed: {detail}. {_CREDENTIALS_HINT}")
    if names & _NO_CREDENTIALS:
        return Denied(f"{where}: no usable credentials: {detail}. {_CREDENTIALS_HINT}")
    number = error.errno if isinstance(error, OSError) else said.number
    if number == errno.ENOTDIR and where.startswith("put"):
        return StoreError(f"{where}: {detail}. An object and a folder cannot share a name. Choose another output")
    missing = isinstance(error, FileNotFoundError) or number in (errno.EISDIR, errno.ENOTDIR)
    if missing or (status == 404 and (said.of_a_listing or any(map(_of_the_store, chain)))):
        return NotFound(f"{where}: there is no such object")
    if names & CONNECTION or isinstance(error, (TimeoutError, ConnectionError)) or said.unanswered:
        return Unavailable(f"{where}: no answer: {detail}. {_ENDPOINT_HINT}")
    if _of_a_gateway(chain, where, said):
        return Unavailable(f"{where}: expected the store's answer, got another: {detail}. {_ENDPOINT_HINT}")
    # Only without a status: a 4xx is a wrong request, even if the library reports a transient errno for it.
    if status is None and number in TRANSIENT:
        return Unavailable(f"{where}: {detail}. {_ENDPOINT_HINT}")
    if number in FULL:
        return StoreError(f"{where}: {detail}. Free some space, or choose another output")
    if "InvalidPathError" in names:  # of obstore: one such name ends the whole listing
        return StoreError(
            f"{where}: {detail}. No part of a name may be empty, '.' or '..'. Remove that object, or set store.backend "
            "to fsspec"
        )
    return StoreError(f"{where}: {detail}")


@contextmanager
def looking_up() -> Iterator[None]:
    """Raise ``Unavailable`` if a look-up of credentials fails for now. obstore keeps only the text of its error."""
    try:
        yield
    except Exception as e:
        if isinstance(translate(e, "look up", "", Redactor({}, {})), Unavailable):
            root = list(chain_of(e))[-1]
            raise Unavailable(f"{type(root).__name__}: {root}") from e
        raise


def after_renewal(result: StoreError, renew: Callable[[], bool]) -> StoreError:
    """Return the error for a call that failed with ``result``. ``renew``: whether a retry of the call may succeed.

    An error of ``renew`` is about credentials or the network, and never about the object.
    """
    try:
        return Unavailable(str(result)) if renew() else result
    except Exception as e:  # noqa: BLE001 - of the options' translation, or one of the store's errors
        kind = Unavailable if isinstance(e, Unavailable) else Denied
        return kind(f"{result}. A look-up of new credentials fails: {e}")


def expired(error: BaseException, where: str = "") -> bool:
    """Whether temporary credentials expired. New credentials may exist already. ``where``: of an error of obstore."""
    chain = list(chain_of(error))
    return _code(chain, _said(chain, where))[0] in ("ExpiredToken", "TokenRefreshRequired")


def outdated(error: BaseException) -> bool:
    """Whether a new look-up may find credentials: for this call if they expired, for a later one if none were found."""
    return expired(error) or found_none(error)


def redirected(error: BaseException, where: str) -> bool:
    """Whether the bucket is in another region than the request's."""
    chain = list(chain_of(error))
    code, status = _code(chain, _said(chain, where))
    return code in _REGION_CODES or status in (301, 307)


def past_the_end(error: BaseException, where: str) -> bool:
    """Whether the requested range begins past the object's last byte."""
    chain = list(chain_of(error))
    said = _said(chain, where)
    if said.of_another_service or any(map(_of_another_service_of_aws, chain)):
        return False
    code, status = _code(chain, said)
    # A proxy's page proves nothing. The store's own answer has a known code, or no body.
    of_a_page = said.of_a_page or any(map(_of_a_page, chain))
    by_code = code in _RANGE_CODES and status in (None, 400, 416)
    return by_code or (status == 416 and not of_a_page) or said.past_the_end


def _said(chain: list[BaseException], where: str) -> ObstoreError:
    """Return the parts of the text of obstore's error, or none."""
    found = (obstore_error(e, where.partition(" ")[2]) for e in chain)
    return next((said for said in found if said is not None), ObstoreError())


def _of_another_service_of_aws(error: BaseException) -> bool:
    """Whether a service for credentials answered botocore, not the store."""
    return _of_aws(error) and getattr(error, "operation_name", None) not in _S3_OPERATIONS


def _of_gcsfs_403(error: BaseException) -> bool:
    """Whether gcsfs got a 403. Its error has no status. A name is never at the beginning of an error's text."""
    return type(error) is OSError and text_of(error).startswith("Forbidden: ")


def _of_the_store(error: BaseException) -> bool:
    """Whether the store itself answered with a 404. Only for errors of no other service."""
    return _of_aws(error) or type(error).__name__ in _NOT_FOUND


def _of_a_page(error: BaseException) -> bool:
    """Whether botocore's error is for an answer with a body, as the page of an ingress. Some stores send no body.

    For an answer without a known code. gcsfs and web servers' libraries show no body.
    """
    if not _of_aws(error):
        return False
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})  # type: ignore[attr-defined]
    of_head = str(getattr(error, "operation_name", "")).startswith("Head")
    return not of_head and headers.get("content-length") != "0"


def _of_another_file(error: BaseException, where: str) -> bool:
    """Whether a file is missing or exists that is not the object: a program or a file with credentials, or a CA bundle.

    Opening a store asks for no object.
    """
    if not isinstance(error, (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)):
        return False
    verb, _, url = where.partition(" ")
    scheme, _, path = url.partition("://")
    if verb == "open":
        return True
    if error.filename is None:
        return error.errno is not None and scheme in _WEB
    file = str(error.filename).replace("\\", "/")
    if scheme in _WEB or not file.startswith("/"):
        return scheme in _WEB  # another file has an absolute path on this machine
    # The path of an object may have another host, or none. A listing reads folders above and below its prefix.
    asked = path.rpartition("/")[0] if verb == "list" else path
    below_host = asked.partition("/")[2]
    above = any(_as_folder(place).startswith(_as_folder(file)) for place in (asked, below_host))
    return not above and not (below_host and _as_folder(below_host) in _as_folder(file))


def _as_folder(path: str) -> str:
    return f"/{path.strip('/')}/".replace("//", "/")


def _of_a_gateway(chain: list[BaseException], where: str, said: ObstoreError) -> bool:
    """Whether the answer to a listing, an upload or a get, or any answer of GCS in JSON, is another service's page."""
    if any(isinstance(e, json.JSONDecodeError | UnicodeDecodeError) for e in chain):
        return re.match(r"(?!open )\S+ (gs|gcs)://", where) is not None  # opening a store may read a file in JSON
    lacking = {e.args[:1] for e in chain if isinstance(e, KeyError)}
    if ("name",) in lacking and re.match(r"head (gs|gcs)://", where):
        return True
    return where.startswith(("list", "put", "get")) and (said.of_a_gateway or not lacking.isdisjoint(_LACKING))


def _of_aws(error: BaseException) -> bool:
    return isinstance(getattr(error, "response", None), Mapping)  # botocore's ClientError


def _code(chain: list[BaseException], said: ObstoreError) -> tuple[str, int | None]:
    """(S3's error code or "", HTTP status or None)."""
    for e in chain:
        response = getattr(e, "response", None)  # botocore's ClientError
        if isinstance(response, Mapping):
            code = str(response.get("Error", {}).get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return code, _status(status) or _status(code)
        for field in ("code", "status", "status_code"):  # gcsfs's HttpError, aiohttp's, others'
            status = _status(getattr(e, field, None))
            if status is not None:
                return "", status
    return said.code, said.status


def _status(value: object) -> int | None:
    if isinstance(value, (int, str)) and re.fullmatch(r"[1-5]\d\d", str(value)):
        return int(value)
    return None


def _detail(chain: list[BaseException], code: str, status: int | None, redact: Redactor) -> str:
    root = chain[-1]
    # Redacted before the text is cut: half a credential would not be recognised.
    text = " ".join(redact(text_of(root).partition(RUST)[0]).split()) or redact(json.dumps(repr(root)))
    text = redact_text(text)
    short = text if len(text) <= _DETAIL else f"{text[:_DETAIL]}…"
    what = code or (f"HTTP {status}" if status is not None else "")
    return f"{type(root).__name__}{f' {what}' if what and what not in short else ''}: {short}"


def _holds_a_secret(name: str) -> bool:
    """Whether a variable holds a credential. A path is none: errors name a missing file."""
    return looks_secret(name) and name not in ("PWD", "OLDPWD") and not name.endswith("_FILE")


def _secret_values(value: Any, hidden: bool = False) -> Iterator[str | bytes]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secret_values(item, hidden or looks_secret(str(name)))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secret_values(item, hidden)
        if hidden and all(isinstance(item, str) for item in value):
            yield ":".join(value[:2])  # a user with a password, and in aiohttp's form an encoding
    elif hidden and isinstance(value, (bytes, bytearray)):
        yield bytes(value)
    elif isinstance(value, str):
        yield from [value] if hidden and value not in _WHERE_TO_LOOK else url_secrets(value)
