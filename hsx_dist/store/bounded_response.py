"""An answer of a web server that takes no more memory than its request asked for."""

from __future__ import annotations

import re

import aiohttp

from hsx_dist.config.urls import public_url
from hsx_dist.store.base import require_at_most
from hsx_dist.store.partial_answers import PAGES, part_of, require_part

_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")


class BoundedResponse(aiohttp.ClientResponse):
    """An answer whose body has at most the bytes that its request's ``Range`` names.

    A server without ranges sends the whole object with the status 200. If it is no larger than a range from the
    object's beginning, it is the asked bytes, unless it is a page.
    """

    _whole_suffices = True

    async def read(self) -> bytes:
        """Return the body.

        Raises:
            StoreError: it is larger than the range.
            Unavailable: the answer has other bytes than the asked ones.
        """
        asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
        if asked is None or not self.ok:
            return await super().read()
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


class PartialResponse(BoundedResponse):
    """An answer of a service that has ranges: each request for one gets a part."""

    _whole_suffices = False
