"""gcsfs through GCS's JSON API, with one attempt for a conditional upload."""

from __future__ import annotations

import asyncio
from typing import Any

from gcsfs.core import GCSFileSystem  # part of an extra
from gcsfs.retry import HttpError

#: Seconds between tries after the status 401, with which nothing is stored. gcsfs also gives it if no token can be got.
_PAUSES_S = (0.5, 1.0, 2.0)


class JsonGcs(GCSFileSystem):  # type: ignore[misc]
    """gcsfs's file system for the JSON API. It does not repeat an upload with a condition.

    - gcsfs's default class asks Google by gRPC for the kind of a bucket before each small call. Where only the JSON API
      can be reached, such as at an emulator, it waits for up to a minute each time.
    - gcsfs repeats such an upload. If an answer is lost, the second attempt finds the first one's object, and reports
      it as another writer's.
    """

    async def _request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        once = getattr(GCSFileSystem._request, "__wrapped__", None)  # without gcsfs's decorator
        if once is None or method != "POST" or kwargs.get("ifGenerationMatch") is None:
            return await super()._request(method, *args, **kwargs)
        for pause in _PAUSES_S:
            try:
                return await once(self, method, *args, **kwargs)
            except HttpError as e:
                if str(e.code) != "401":
                    raise
            await asyncio.sleep(pause)
        return await once(self, method, *args, **kwargs)
