"""Where objects go: one small protocol over files, S3, GCS and whatever else fsspec speaks."""

from __future__ import annotations

from hsx_dist.store.base import Buffer, ObjectInfo, Store

__all__ = ["Buffer", "ObjectInfo", "Store"]
