"""s3fs with checked answers to reads and uploads. s3fs itself takes each answer with the status 200 for the store's."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiobotocore
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import ClientError
from botocore.utils import parse_timestamp
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem  # part of an extra

from hsx_dist.errors import Unavailable
from hsx_dist.store.partial_answers import AnsweredPart, part_of, require_part

if "http_session_cls" not in inspect.signature(AioConfig).parameters:
    what = "aiobotocore 2.13.3 or newer"
    raise ImportError(f"expected {what}, got {aiobotocore.__version__}, which follows redirects", name=what)

#: What stores an object or a piece of one. The answer states an ETag.
_UPLOADS = frozenset({"complete_multipart_upload", "put_object", "upload_part"})
#: An argument of ``get_object`` for ``CheckedS3``: the size of the object of which a part is asked for.
STATED_SIZE = "StatedSize"


class UnredirectedSession(AIOHTTPSession):  # type: ignore[misc]
    """botocore's connections, which follow no redirect and send each request once.

    botocore's own connections never follow a redirect, but aiohttp follows one to any server. That server would get the
    session's token and the customer's key for encryption, and its answers would count as the store's. S3's redirects to
    a bucket's region have a header for botocore.
    """

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        if hasattr(session, "_retry_connection"):
            session._retry_connection = False  # aiohttp would send a PUT again, see ``_once``
        return SimpleNamespace(request=partial(_request, session))


async def _request(session: Any, method: str, **how: Any) -> Any:
    answer = await session.request(method, allow_redirects=False, **how)
    if 300 < answer.status < 400 and "Location" in answer.headers and "x-amz-bucket-region" not in answer.headers:
        answer.close()
        raise Unavailable(f"expected the store's answer, got a redirect with the status {answer.status}")
    return answer


class CheckedS3(S3FileSystem):  # type: ignore[misc]
    """s3fs's file system. Reads and uploads raise ``Unavailable`` for an answer that is none of the store's.

    ``requires_objects``: the same for the size of an object without an ETag. A store of runs itself says what an ETag
    is needed for.
    """

    requires_objects = False

    def _prepare_config_kwargs(self) -> dict[str, Any]:
        return {"http_session_cls": UnredirectedSession, **super()._prepare_config_kwargs()}

    async def set_session(self, *args: Any, **kwargs: Any) -> Any:
        client = await super().set_session(*args, **kwargs)
        # botocore's own parser takes two thirds of the processor time of a long listing.
        self.session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_time)
        client.meta.events.register_first("needs-retry.s3", _once, unique_id="hsx-once")
        return client

    async def _call_s3(self, method: str, *more: Any, **kwargs: Any) -> Any:
        size = kwargs.pop(STATED_SIZE, None)
        # s3fs before 2026 adds the payer of a request (``requester_pays``) only in its own methods.
        answer = await super()._call_s3(method, self.req_kw, *more, **kwargs)
        where = f"s3://{kwargs.get('Bucket')}/{kwargs.get('Key')}"
        if method in _UPLOADS and (not answer.get("ETag") or _of_a_file(answer)):
            raise Unavailable(
                f"put {where}: expected an answer with the stored object's ETag, got another answer: the object may "
                "not be stored. Check that the endpoint is the store, and no proxy"
            )
        # An answer without both must not count as one of a store without versions, whose objects need no condition.
        if method == "head_object" and (
            self.requires_objects or not (answer.get("ETag") or answer.get("LastModified"))
        ):
            require_object(answer, where)
        if method == "get_object":
            try:
                _require_asked(answer, where, kwargs.get("Range"), size)
            except BaseException:
                answer["Body"].close()
                raise
        return answer

    call_s3 = sync_wrapper(_call_s3)

    async def _cat_file(
        self, path: str, version_id: str | None = None, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return the object, or its bytes ``[start, end)``, in one request."""
        bucket, key, version = self.split_path(path)
        how = {"VersionId": version_id or version} if version_id or version else {}
        if start is not None and end is not None:
            how["Range"] = f"bytes={start}-{end - 1}"
        answer = await self._call_s3("get_object", Bucket=bucket, Key=key, **how)
        try:
            if start is None or end is None:
                return bytes(await answer["Body"].read())
            body = await _read_at_most(answer["Body"], end - start + 1)  # a byte too many shows a wrong answer
        finally:
            answer["Body"].close()
        require_part(f"s3://{path}", _part(answer, start, end), start, end, len(body))
        return body


async def _read_at_most(body: Any, most: int) -> bytes:
    """Return the first ``most`` bytes of an answer's body, which may be of any length."""
    pieces: list[bytes] = []
    left = most
    while left and (piece := await body.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _once(
    request_dict: Mapping[str, Any],
    response: tuple[Any, dict[str, Any]] | None = None,
    caught_exception: Exception | None = None,
    operation: Any = None,
    **_: Any,
) -> None:
    """Raise the error of a conditional upload, so that botocore does not repeat it.

    If an answer is lost, the second attempt finds the first one's object, and reports it as another writer's.
    """
    conditions = {name.lower() for name in request_dict["headers"]} & {"if-match", "if-none-match"}
    if not conditions or request_dict["method"] not in ("PUT", "POST"):  # s3fs reads files with a condition, too
        return
    if caught_exception is not None:
        raise caught_exception
    if response is not None and response[0].status_code >= 500:
        raise ClientError(response[1], operation.name)


def require_object(said: Mapping[str, Any], where: str) -> None:
    """Raise ``Unavailable`` unless the answer to a question about an object has what every store states of one."""
    if not said.get("ETag") or not said.get("LastModified"):
        raise Unavailable(
            f"head {where}: expected an answer with an object's ETag and Last-Modified, got another. Check that the "
            "endpoint is the store, and no proxy"
        )


def _time(value: Any) -> datetime:
    """Return a time in an answer. botocore's own parser takes 0.1 ms for a time."""
    if isinstance(value, str) and value.endswith("Z"):
        with suppress(ValueError):
            return datetime.fromisoformat(value)
    found: datetime = parse_timestamp(value)
    return found


def _require_asked(answer: Mapping[str, Any], where: str, asked: str | None, size: int | None) -> None:
    """Raise ``Unavailable`` unless an answer has the bytes of the ``asked`` range, or the object.

    ``size``: the object's size, if the caller knows it.
    """
    if asked is None:
        if not answer.get("ETag"):
            raise Unavailable(
                f"get {where}: expected an answer with an ETag, got another. Check that the endpoint is the store, and "
                "no proxy"
            )
        return
    start, _, last = asked.removeprefix("bytes=").partition("-")
    first, stop = int(start), int(last) + 1 if last else sys.maxsize  # s3fs continues a copy with "bytes=N-"
    part = _part(answer, first, stop)
    if part is None:
        require_part(where, None, first, stop, 0)
    elif size is not None and part.size not in (None, size):
        raise Unavailable(
            f"get {where}: expected a part of an object of {size} bytes, got a part of {part.size}. Try again: the "
            "object may have been replaced"
        )


def _part(answer: Mapping[str, Any], start: int, stop: int) -> AnsweredPart | None:
    return part_of(answer["ResponseMetadata"]["HTTPStatusCode"], answer.get("ContentRange"), start, stop)


def _of_a_file(answer: Mapping[str, Any]) -> bool:
    """Whether a web server sent a static page, which has an ETag too. No store states both of these for an upload."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return "last-modified" in headers and str(headers.get("content-type")).startswith("text/html")
