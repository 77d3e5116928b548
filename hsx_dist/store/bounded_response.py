"""Answers of a web server that take no more memory than their requests asked for, and redirects to other servers."""

from __future__ import annotations

import json
import re
from contextvars import ContextVar
from typing import Any, Literal

import aiohttp
from yarl import URL

from hsx_dist.config.urls import public_url
from hsx_dist.errors import StoreError
from hsx_dist.store.base import require_at_most
from hsx_dist.store.partial_answers import PAGES, names_all, part_of, require_part

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
#: gcsfs does not read the text of these errors.
_BY_STATUS = frozenset({403, 404, 412})
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")

#: Limit in bytes of an answer to a request without a range. fsspec's thread runs a request in the caller's context.
WITHOUT_RANGE: ContextVar[int | None] = ContextVar("WITHOUT_RANGE", default=None)


class BoundedResponse(aiohttp.ClientResponse):
    """An answer whose body has at most the bytes that its request's ``Range`` names, or ``WITHOUT_RANGE`` of them.

    A server without ranges sends the whole object with the status 200. If it is no larger than a range from the
    object's beginning, it is the asked bytes, unless it is a page.
    """

    _whole_suffices = True

    async def read(self) -> bytes:
        """Return the body.

        Raises:
            StoreError: it is larger than the range, or than ``WITHOUT_RANGE``.
            Unavailable: the answer has other bytes than the asked ones.
        """
        asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
        if asked is None or not self.ok:
            return await self._read_without_range(WITHOUT_RANGE.get())
        where, start, stop = public_url(str(self.url)), int(asked[1]), int(asked[2]) + 1
        part = part_of(self.status, self.headers.get("Content-Range"), start, stop)
        whole = self._whole_suffices and self.status == 200 and self.content_type not in PAGES
        found = bytearray()
        try:
            if part is None and not whole:
                require_part(where, None, start, stop, 0)
            async for piece in self.content.iter_any():
                found += piece
                require_at_most(where, stop - start if start == 0 or not whole else 0, len(found))
            if not whole or start:  # an empty answer does not show that the object is shorter
                require_part(where, part, start, stop, len(found))
        except BaseException:
            self.close()  # without the rest of the body
            raise
        return bytes(found)

    async def _read_without_range(self, most: int | None) -> bytes:
        if most is None:
            return await super().read()
        found = bytearray()
        async for piece in self.content.iter_any():
            found += piece
            if len(found) > most:
                self.close()
                raise StoreError(
                    f"{public_url(str(self.url))}: expected a page of at most {most} bytes, got more. Copy the run to "
                    "a folder"
                )
        return bytes(found)


class PartialResponse(BoundedResponse):
    """An answer of GCS to gcsfs. Each request for a range gets a part.

    gcsfs takes an error's status from its text. It would not repeat a request after a 503 whose text has the word
    "invalid", perhaps in the name of the bucket, or another code.
    """

    _whole_suffices = False

    async def read(self) -> bytes:
        """Return the body.

        Raises:
            gcsfs.retry.HttpError: the answer is an error. Has its status.
        """
        body = await super().read()
        of_ended_upload = self.status == 499 and "upload_id" in self.url.query  # gcsfs expects it
        if self.status < 400 or self.status in _BY_STATUS or of_ended_upload:
            return body
        from gcsfs.retry import HttpError  # part of an extra

        text = body.decode(errors="replace")
        try:
            message = str(json.loads(text)["error"]["message"])
        except (ValueError, LookupError, TypeError, RecursionError):
            message = text
        raise HttpError({"code": self.status, "message": message})


class RedirectedResponse(BoundedResponse):
    """An answer of an HTTP server, which may redirect reads. aiohttp follows a redirect after ``start``.

    An upload is never redirected: after a 303, aiohttp sends a GET. Its answer does not show that nothing is stored.
    fsspec takes each answer to a read without a range for the whole object, also a part (206) or one without a body.
    """

    #: To which servers reads are redirected.
    _to: Literal["any", "same", "none"] = "any"

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the answer's headers.

        Raises:
            ClientResponseError: the answer is a redirect that must not be followed, or may be a part of the object.
        """
        await super().start(connection)
        if self.status in _REDIRECTS:
            if not self._follows(self.headers.get("Location") or self.headers.get("URI")):
                raise self._error(f"expected an answer of this server, got a redirect. {self._todo()}")
        elif self.status < 400 and not self._may_be_whole():
            raise self._error(
                f"expected the whole object with the status 200, got the status {self.status} or a Content-Range. "
                "Check the server, and proxies before it"
            )
        return self

    def _may_be_whole(self) -> bool:
        """Return False for an answer to a read without a range that is a part, or not the object as it is stored."""
        if self.method not in ("GET", "HEAD") or "Range" in self.request_info.headers:
            return True
        named = self.headers.get("Content-Range")
        return self.status == 200 and (named is None or names_all(named, self.content_length))

    def _error(self, message: str) -> aiohttp.ClientResponseError:
        # aiohttp would take a ``StoreError``, which is an ``OSError``, for a lost connection.
        return aiohttp.ClientResponseError(self.request_info, self.history, status=self.status, message=message)

    def _follows(self, place: str | None) -> bool:
        if place is None or self.method not in ("GET", "HEAD"):  # without a place, the body would be the object
            return False
        try:
            same = self.url.join(URL(place)).origin() == self.url.origin()
        except ValueError:
            return False
        return self._to == "any" or (self._to == "same" and same)

    def _todo(self) -> str:
        if self._to == "same":
            return (
                "Headers, cookies and passwords of storage_options are not sent to another server: name the URL "
                "behind the redirect, or remove them"
            )
        return "Name the URL behind the redirect"


class SameServerResponse(RedirectedResponse):
    """An answer to a request whose own headers no other server may get."""

    _to = "same"


class UnredirectedResponse(RedirectedResponse):
    """An answer to a request that may be redirected nowhere."""

    _to = "none"
