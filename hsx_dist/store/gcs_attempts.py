"""gcsfs with one attempt for a conditional upload."""

from __future__ import annotations

from typing import Any

from gcsfs import GCSFileSystem  # part of an extra


class OnceGcs(GCSFileSystem):  # type: ignore[misc]
    """gcsfs's file system. gcsfs does not repeat an upload with a condition.

    If an answer is lost, the second attempt finds the first one's object, and reports it as another writer's.
    """

    async def _request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        once = getattr(GCSFileSystem._request, "__wrapped__", None)  # without gcsfs's decorator
        if once is not None and method == "POST" and kwargs.get("ifGenerationMatch") is not None:
            return await once(self, method, *args, **kwargs)
        return await super()._request(method, *args, **kwargs)
