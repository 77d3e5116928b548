"""gcsfs through GCS's JSON API, with one attempt for a conditional upload."""

from __future__ import annotations

from typing import Any

from gcsfs.core import GCSFileSystem  # part of an extra


class JsonGcs(GCSFileSystem):  # type: ignore[misc]
    """gcsfs's file system for the JSON API. It does not repeat an upload with a condition.

    - gcsfs's default class asks Google by gRPC for the kind of a bucket before each small call. Where only the JSON API
      can be reached, such as at an emulator, it waits for up to a minute each time.
    - gcsfs repeats such an upload. If an answer is lost, the second attempt finds the first one's object, and reports
      it as another writer's.
    """

    async def _request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        once = getattr(GCSFileSystem._request, "__wrapped__", None)  # without gcsfs's decorator
        if once is not None and method == "POST" and kwargs.get("ifGenerationMatch") is not None:
            return await once(self, method, *args, **kwargs)
        return await super()._request(method, *args, **kwargs)
