"""Options of fsspec's file systems over aiohttp, with which a ``Content-Encoding`` is not decoded.

aiohttp decodes it without a limit: 48 KB can take GiB of memory. Every writer of a GCS bucket can set it for an object.
s3fs and obstore decode nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Scheme → the option that holds the arguments of aiohttp's session.
_SESSION = {
    "http": "client_kwargs",
    "https": "client_kwargs",
    "gs": "session_kwargs",
    "gcs": "session_kwargs",
}


def without_decoding(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of fsspec for ``url`` with which every link of the URL gives bytes as the server sends them.

    The request asks for an answer without an encoding, so that a server does not compress plain rows on the way.
    """
    result = dict(options)
    first, *others = [link.partition("://")[0] for link in url.split("::")]
    for scheme in _SESSION.keys() & others:
        result[scheme] = _plain(scheme, result.get(scheme) or {})
    if first in _SESSION:  # fsspec also takes the options of the first link from a mapping of its name
        result = _plain(first, {**(result.pop(first, None) or {}), **result})
    return result


def _plain(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    session = options.get(_SESSION[scheme]) or {}
    headers = {"Accept-Encoding": "identity", **(session.get("headers") or {})}
    return {**options, _SESSION[scheme]: {**session, "headers": headers, "auto_decompress": False}}
