"""Object stores: one small protocol over files, S3, GCS, Azure and fsspec's other file systems."""

from __future__ import annotations

from hsx_dist.store.base import Buffer, ObjectInfo, Store
from hsx_dist.store.opening import open_store
from hsx_dist.store.retry import RetryPolicy, RetryStore

__all__ = ["open_store", "Store", "ObjectInfo", "Buffer", "RetryStore", "RetryPolicy"]
