"""Failures of look-ups of credentials: whether their service cannot answer now, or refuses.

Recognises the exceptions by their names and fields, as ``faults`` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

#: Errors of botocore and google-auth about a service for credentials.
_OF_LOOK_UPS = frozenset({"CredentialRetrievalError", "MetadataRetrievalError", "RefreshError", "TransportError"})
#: In their texts: that the service cannot answer now. botocore hides why an instance's role has no new credentials.
_NOT_NOW = re.compile(
    r"(?:non 200 response |[Ss]tatus: |\"code\": )(?:408|429|5\d\d)\b|from iam-role: Credential refresh failed"
)
#: Errors of libraries for a connection that fails.
CONNECTION = frozenset(
    {
        "ChecksumError",
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectionClosedError",
        "ConnectionError",
        "FSTimeoutError",
        "HTTPClientError",
        "IncompleteRead",
        "RequestException",
        "ResponseParserError",
        "RetryError",
        "ServerDisconnectedError",
        "ServerTimeoutError",
        "TransportError",
    }
)


def failed_for_now(error: BaseException) -> bool:
    """Whether a look-up of credentials failed because their service cannot answer now.

    gcsfs reports this as a 401, with the true error as its cause. botocore gives its errors no causes, so their
    ``__context__`` is followed.
    """
    found: list[BaseException] = []
    following: BaseException | None = error
    for _ in range(8):
        if following is None:
            break
        if found or type(following).__name__ in _OF_LOOK_UPS:
            found.append(following)
        unrelated = not found or following.__suppress_context__
        following = following.__cause__ or (None if unrelated else following.__context__)
    return any(
        getattr(e, "retryable", False) is True
        or isinstance(e, (TimeoutError, ConnectionError))
        or (_NOT_NOW.search(str(e)) if type(e).__name__ in _OF_LOOK_UPS else names_of([e]) & CONNECTION)
        for e in found
    )


def found_none(error: BaseException) -> bool:
    """Whether a look-up of credentials found none. botocore hides that a service for them did not answer."""
    return "NoCredentialsError" in names_of(chain_of(error))


def names_of(errors: Iterable[BaseException]) -> set[str]:
    """Return the names of the errors' classes, and of those above them."""
    return {c.__name__ for e in errors for c in type(e).__mro__}


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its explicit causes. ``__context__`` is not followed: it may be unrelated."""
    seen = 0
    while error is not None and seen < 8:
        yield error
        error = error.__cause__
        seen += 1
