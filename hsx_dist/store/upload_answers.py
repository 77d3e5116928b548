"""Proof that a service stored an upload. A proxy, or a page to log in, may answer 200 and store nothing."""

from __future__ import annotations

from collections.abc import Mapping

from hsx_dist.errors import StoreError, Unavailable
from hsx_dist.store.base import Store
from hsx_dist.store.faults import unless_missing

#: Scheme → what the answer to an upload states of the stored object.
_STATED = {"s3": "ETag", "s3a": "ETag", "gs": "generation", "gcs": "generation"}


def require_stored(store: Store, name: str, answer: object, size: int) -> None:
    """Check the ``answer`` to an upload of ``size`` bytes to S3 or GCS.

    s3fs and gcsfs return no answer to an upload in pieces: then the store must have an object of that size.

    Raises:
        StoreError: the object was stored with another size.
        Unavailable: nothing proves that the object was stored. The page of a gateway passes, so a retry may store it.
    """
    stated = _STATED.get(store.url.partition("://")[0])
    if stated is None:
        return
    if isinstance(answer, Mapping):
        proven = bool(answer.get(stated))
        expected = f"an answer that states its {stated}"
        if proven and str(answer.get("size", size)) != str(size):
            # gcsfs ends each object with the line ``--==0==--``. GCS cuts an object that has this line itself.
            raise StoreError(
                f"put {store.url}/{name}: expected {size} stored bytes, got another number: gcsfs's request cut the "
                "object. Use obstore (store.backend)"
            )
    else:
        expected = f"an object of {size} bytes"
        proven = False
        with unless_missing():
            proven = store.head(name).size == size
    if not proven:
        raise Unavailable(
            f"put {store.url}/{name}: expected {expected}, got another answer: the object may not be stored. Check "
            "that the endpoint is the store, and no proxy"
        )
