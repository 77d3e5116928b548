"""Options of fsspec's file systems with which an answer takes no more memory than asked, and a copy shows a lost part.

- A ``Content-Encoding`` is not decoded. aiohttp decodes it without a limit: 48 KB can take GiB of memory. Every writer
  of a GCS bucket can set it for an object. s3fs and obstore decode nothing.
- The answer to a range request ends with an error at the first byte too many, and if it is another service's page
  (``BoundedResponse``).
- No other server gets the headers, cookies and passwords of the options by a redirect. aiohttp removes only the header
  ``Authorization``. With the option ``allow_redirects=False`` a redirect is an error, and not the object.
- A transfer may take any time, but each wait for bytes has a limit. Otherwise aiohttp ends each transfer after five
  minutes, and gcsfs waits without a limit.
- A cache of whole files gets an object of S3 in one request. s3fs would give a copy its full size before parts arrive,
  and checks no part. So a copy would have the right size also without a part.
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
_S3 = frozenset({"s3", "s3a"})
#: Headers that may be sent to any server, and ``Authorization``, which aiohttp removes.
_HARMLESS = frozenset({"accept", "accept-encoding", "accept-language", "authorization", "user-agent"})
#: Limits in seconds of a connection attempt, and of a wait for the next bytes of an answer.
_CONNECT_S, _NEXT_BYTES_S = 30, 60


def bounding_answers(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of fsspec for ``url`` with which each link gives its bytes as sent, and no more than asked.

    The request asks for an answer without an encoding, so that a server does not compress plain rows on the way.
    ``options`` are from ``checked_options``: fsspec would not merge its configuration with the result.
    """
    result = dict(options)
    first, *others = [link.partition("://")[0] for link in url.split("::")]
    for scheme in _SESSION.keys() & others:
        result[scheme] = _bounding(scheme, result.get(scheme) or {})
    for scheme in _S3 & set(others):
        result[scheme] = {**(result.get(scheme) or {}), "max_concurrency": 1}
    if first in _SESSION:  # fsspec also takes the options of the first link from a mapping of its name
        result = _bounding(first, {**(result.pop(first, None) or {}), **result})
    return result


def _bounding(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    from aiohttp import ClientTimeout  # part of an extra

    from hsx_dist.store.bounded_response import PartialResponse

    session = options.get(_SESSION[scheme]) or {}
    own = {
        "headers": {"Accept-Encoding": "identity", **(session.get("headers") or {})},
        "auto_decompress": False,
        "response_class": PartialResponse if scheme in ("gs", "gcs") else _class_of_http(session, options),
    }
    timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_NEXT_BYTES_S)
    session = {"timeout": timeout, **session, **own}
    # gcsfs gives each request this limit in place of the session's, also None.
    of_requests = {"requests_timeout": session["timeout"]} if _SESSION[scheme] == "session_kwargs" else {}
    return {**of_requests, **options, _SESSION[scheme]: session}


def _class_of_http(session: Mapping[str, Any], options: Mapping[str, Any]) -> type:
    from hsx_dist.store.bounded_response import RedirectedResponse, SameServerResponse, UnredirectedResponse

    if options.get("allow_redirects") is False:
        return UnredirectedResponse
    for given in (session, options):
        headers = {str(name).lower() for name in given.get("headers") or {}}
        if headers - _HARMLESS or given.get("auth") or given.get("cookies"):
            return SameServerResponse
    return RedirectedResponse
