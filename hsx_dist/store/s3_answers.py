"""s3fs with checked answers to reads and uploads. s3fs itself takes each answer with the status 200 for the store's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from botocore.utils import parse_timestamp
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem  # part of an extra

from hsx_dist.errors import Unavailable
from hsx_dist.store.partial_answers import part_of, require_part

#: What stores an object or a piece of one. The answer states an ETag.
_UPLOADS = frozenset({"complete_multipart_upload", "put_object", "upload_part"})


class CheckedS3(S3FileSystem):  # type: ignore[misc]
    """s3fs's file system. Reads and uploads raise ``Unavailable`` for an answer that is none of the store's."""

    async def set_session(self, *args: Any, **kwargs: Any) -> Any:
        client = await super().set_session(*args, **kwargs)
        # botocore's own parser takes two thirds of the processor time of a long listing.
        self.session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_time)
        return client

    async def _call_s3(self, method: str, *more: Any, **kwargs: Any) -> Any:
        answer = await super()._call_s3(method, *more, **kwargs)
        if method in _UPLOADS and (not answer.get("ETag") or _of_a_file(answer)):
            raise Unavailable(
                f"put s3://{kwargs['Bucket']}/{kwargs['Key']}: expected an answer with the stored object's ETag, got "
                "another answer: the object may not be stored. Check that the endpoint is the store, and no proxy"
            )
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
            if start is not None and end is not None:
                part = part_of(answer["ResponseMetadata"]["HTTPStatusCode"], answer.get("ContentRange"), start, end)
                body: bytes = b"" if part is None else await answer["Body"].read()
                require_part(f"s3://{path}", part, start, end, len(body))
                return body
            if answer.get("ETag"):
                whole: bytes = await answer["Body"].read()
                return whole
        finally:
            answer["Body"].close()
        raise Unavailable(
            f"get s3://{path}: expected an answer with an ETag, got another. Check that the endpoint is the store, and "
            "no proxy"
        )


def _time(value: Any) -> datetime:
    """Return a time in an answer. botocore's own parser takes 0.1 ms for a time."""
    if isinstance(value, str) and value.endswith("Z"):
        with suppress(ValueError):
            return datetime.fromisoformat(value)
    found: datetime = parse_timestamp(value)
    return found


def _of_a_file(answer: Mapping[str, Any]) -> bool:
    """Whether a web server sent a static page, which has an ETag too. No store states both of these for an upload."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return "last-modified" in headers and str(headers.get("content-type")).startswith("text/html")
