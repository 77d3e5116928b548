"""Errors as HTTP answers in OpenAI's form, as vLLM writes it: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from hsx_dist.errors import (
    ConfigError,
    HsxError,
    NotFound,
    SampleConflict,
    SampleFailed,
    SampleNotFound,
    StoreError,
    Unavailable,
)
from hsx_dist.format.markers import OBJECT
from hsx_dist.logger import get_logger
from hsx_dist.page import object_name
from hsx_dist.text import bounded, printable

log = get_logger(__name__)

#: The first matching class decides. OpenAI clients retry 408, 409, 429 and 5xx, so a failed sample has another status.
_STATUS: tuple[tuple[type[HsxError], int], ...] = (
    (ConfigError, 400),
    (NotFound, 404),
    (SampleNotFound, 404),
    (SampleConflict, 409),
    (SampleFailed, 424),
    (Unavailable, 503),
    (StoreError, 502),
    (HsxError, 500),
)


class Refusal(Exception):
    """An error answer instead of states.

    Args:
        status: the HTTP status.
        kind: ``type`` of the answer: a class of ``hsx_dist.errors``, or ``SampleExpired``, ``AnswerTooLarge``,
            ``Timeout``.
        message: ``expected X, got Y. Do Z.``
        param: the wrong parameter.
    """

    def __init__(self, status: int, kind: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, {"Retry-After": "1"} if self.status == 503 else None)


def bad_request(message: str, param: str | None = None) -> Refusal:
    """Return a refusal with status 400, for a wrong request."""
    return Refusal(400, ConfigError.__name__, message, param)


def refusal_of(error: HsxError, key: str) -> Refusal:
    """Return the answer to a failed request for the sample of ``key``. Errors of the server are only logged.

    The text of a store's error names the object in the store, which is not for clients.
    """
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    shown = printable(repr(key), 200)
    if isinstance(error, NotFound):
        message = f"key {shown}: expected a stored sample, got none. Check the key, or ask the model again"
    elif status < 500:
        # The text begins with the object's place. The reason in a marker of an earlier version can name it again.
        _, found, rest = str(error).rpartition(object_name(key) + OBJECT)
        message = str(bounded(f"key {shown}{rest}" if found else error))
    else:
        log.error("hidden states not answered: key=%s error=%s: %s", shown, type(error).__name__, printable(error))
        message = (
            f"key {shown}: expected to read its sample, got {type(error).__name__}. The server's log has the reason"
        )
    return Refusal(status, type(error).__name__, message)
