"""An answer of a web server that takes no more memory than its request asked for."""

from __future__ import annotations

import re

import aiohttp

from hsx_dist.config.urls import public_url
from hsx_dist.store.base import require_at_most

_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")


class BoundedResponse(aiohttp.ClientResponse):
    """An answer whose body has at most the bytes that its request's ``Range`` names."""

    async def read(self) -> bytes:
        """Return the body.

        Raises:
            StoreError: it is larger than the range.
        """
        asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
        if asked is None or not self.ok:
            return await super().read()
        most = int(asked[2]) - int(asked[1]) + 1
        found = bytearray()
        try:
            async for piece in self.content.iter_any():
                found += piece
                require_at_most(public_url(str(self.url)), most, len(found))
        except BaseException:
            self.close()  # without the rest of the body
            raise
        return bytes(found)
