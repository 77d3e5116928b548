"""What an error of obstore means. obstore gives status, code and cause in the error's text only.

That text also has the object's path, and the body of an answer repeats names. A client of a server can choose both. So
each part is taken from its fixed place, and no part is searched for in the whole text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hsx_dist.text import text_of

#: What follows is Rust's debug output.
RUST = "\n\nDebug source:"
#: The beginnings of the texts with the object's path as it was written. One may follow another.
_BEGINNINGS = tuple(
    tuple(text.split("*"))
    for text in (
        "Object at location * not found: ",
        "Object at location * already exists: ",
        "Object at location * not modified: ",
        "Request precondition failure for path *: ",
        "The operation lacked the necessary privileges to complete for path *: ",
        "The operation lacked valid authentication credentials for path *: ",
    )
)
_GENERIC = re.compile(r"Generic \w+ error: ")
#: A request of some step, or of the object itself. The path in its URL is quoted and has no space.
_REQUEST = re.compile(
    r"(?P<step>(?:Error [\w ]+: )*)Error performing [A-Z]+ (?:\S+ )?in [^-]*- (?P<cause>.*)", re.DOTALL
)
#: A program's error while it looks up credentials. ``looking_up`` raises ``Unavailable``.
_PROVIDER = re.compile(
    r"The operation lacked valid authentication credentials for path External \w+ credential provider: "
    r"(?P<later>Unavailable: )?(?:[\w.]+: An error occurred \((?P<code>\w+)\) when calling)?"
)
#: The rest of a download belongs to an object that was deleted or replaced. A new download gets another one, or none.
_OTHER_OBJECT = frozenset({"404", "412", "416"})
_STATUS = re.compile(r"Server returned non-2xx status code: (?P<status>[1-5]\d\d)[^:]*: (?P<body>.*)", re.DOTALL)
#: An error after the status 200, at the end of an upload in pieces.
_RESPONSE = "Server returned error response: "
_CODE = re.compile(r"[\s\ufeff]*(?:<\?xml[^>]*>\s*)?<Error\b[^>]*>.*?<Code>(\w+)</Code>", re.DOTALL)
#: S3's and Azure's deletes in bulk.
_BULK = re.compile(r"(?:DeleteObjects|Bulk delete) request failed for key .*\(code: (\w+)\)\Z", re.DOTALL)
#: GCS's errors in JSON. Gateways have the same form, so only a URL of GCS gets them.
_JSON = r'\{{\s*"error":\s*\{{.*"code":\s*{}\b'
_NO_BUCKET = re.compile(r'"message":\s*"(?:the specified )?bucket does not exist', re.IGNORECASE)
_NO_ANSWER = re.compile(r"(?:Error [\w ]+: )*HTTP error: ")
#: For S3's 301, which names the right endpoint in its body only.
_REDIRECT = "Received redirect without LOCATION"
#: An answer that is none of the store's, such as a gateway's page. A listing's entry that lacks a member, or has a
#: wrong one, is the store's.
_OTHER_ANSWER = re.compile(
    r"Got invalid list response: (?!missing field|.*expected u64)|Got invalid (multipart|put) response"
    "|Unable to extract metadata from headers|(ETag|Last-Modified|Content-Length) Header missing from response"
    "|Invalid last modified '|Received non-partial response|Content-Range header not present"
    r"|Requested [0-9]+\.\.[0-9]+, got "
)
_PAST_THE_END = "Generic LocalFileSystem error: Requested range was invalid"
_ERRNO = re.compile(r"Generic LocalFileSystem error: .*\(os error (\d+)\)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ObstoreError:
    """The parts of an error's text. An unknown text has none: then only the error's class says something.

    ``unanswered``: no answer was received. ``of_another_service``: a service for credentials failed, not the store.
    ``of_a_listing``: a listing's request failed. ``of_a_gateway``: the answer is none of the store's, and had a
    status of success. ``past_the_end``: a file ends before the range. ``number``: of the system's error.
    ``in_gcs_json``: the body is an error of GCS in JSON.
    """

    status: int | None = None
    code: str = ""
    body: str = ""
    unanswered: bool = False
    of_another_service: bool = False
    of_a_listing: bool = False
    of_a_gateway: bool = False
    past_the_end: bool = False
    number: int | None = None
    in_gcs_json: bool = False

    @property
    def of_a_page(self) -> bool:
        """Whether the body of an answer without a known code is none of the store's. Some stores send no body."""
        return self.body.strip() != "" and not self.in_gcs_json

    @property
    def lacks_bucket(self) -> bool:
        return self.code == "NoSuchBucket" or (self.in_gcs_json and _NO_BUCKET.search(self.body) is not None)


def obstore_error(error: BaseException, url: str) -> ObstoreError | None:
    """Return the parts of the text of obstore's ``error`` about the object ``url``, or None for another library's."""
    text = text_of(error)
    # A missing object is a FileNotFoundError. fsspec's has a path only, which begins with the store's URL or bucket.
    missing = isinstance(error, FileNotFoundError) and error.errno is None and text.startswith(_BEGINNINGS[0][0])
    if not (missing or type(error).__module__.startswith("obstore")):
        return None
    rest, resumed = _without_path(text, url.partition("://")[2].partition("/")[2])
    request = _REQUEST.match(rest)
    if request is None:
        return _without_request(text, rest)
    step, cause = request["step"], request["cause"]
    status = _STATUS.match(cause)
    if resumed and status and status["status"] in _OTHER_OBJECT:
        return ObstoreError(unanswered=True)
    body = status["body"] if status else cause.removeprefix(_RESPONSE) if cause.startswith(_RESPONSE) else ""
    code = _CODE.match(body)
    redirect = cause.startswith(_REDIRECT)
    return ObstoreError(
        status=301 if redirect else int(status["status"]) if status else None,
        code="PermanentRedirect" if redirect else code[1] if code else "",
        body=body,
        unanswered=_NO_ANSWER.match(cause) is not None,
        of_another_service="performing token request" in step,
        of_a_listing="performing list request" in step,
        in_gcs_json=status is not None
        and url.startswith(("gs://", "gcs://"))
        and re.match(_JSON.format(status["status"]), body, re.DOTALL) is not None,
    )


def _without_request(text: str, rest: str) -> ObstoreError:
    provider, bulk, number = _PROVIDER.match(text), _BULK.match(rest), _ERRNO.match(text.partition(RUST)[0])
    return ObstoreError(
        code=(provider["code"] or "" if provider else "") or (bulk[1] if bulk else ""),
        unanswered=_NO_ANSWER.match(rest) is not None or (provider is not None and provider["later"] is not None),
        of_another_service=provider is not None,
        of_a_gateway=_OTHER_ANSWER.match(rest) is not None,
        past_the_end=text.partition(RUST)[0] == _PAST_THE_END,
        number=int(number[1]) if number else None,
    )


def _without_path(text: str, path: str) -> tuple[str, bool]:
    """Return the text behind its beginnings, or nothing for an unknown beginning.

    Also whether the failed request should have resumed a download whose connection broke: then the text has the
    beginning ``Generic S3 error:`` and another one behind it.
    """
    rest, generic = text, _GENERIC.match(text)
    if generic:
        rest = text[generic.end() :]
    behind = rest
    while True:
        if again := _GENERIC.match(rest):
            rest = rest[again.end() :]
        elif found := next((b for b in _BEGINNINGS if rest.startswith(path.join(b))), None):
            rest = rest.removeprefix(path.join(found))
        else:
            break
    return "" if rest == text else rest.partition(RUST)[0], generic is not None and rest != behind
