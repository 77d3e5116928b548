"""The check that a store refuses to create an object twice."""

from __future__ import annotations

import uuid
from contextlib import suppress

from hsx_dist.errors import AlreadyExists, ConfigError, Denied, NotFound, StoreError
from hsx_dist.format.json_objects import get_json, put_own
from hsx_dist.store import Store

_FIRST = b'{"put": "first"}'


def require_conditional_puts(store: Store, hint: str = "") -> None:
    """Check that the store refuses a second put of one name. Attempts, receipts, seals and clients' keys depend on it.

    ``hint``: ends the error's message.

    Raises:
        ConfigError: the store replaces the object.
        StoreError: raised by the store.
    """
    name, said = f"probe-{uuid.uuid4().hex}", "a store that replaces it"
    try:
        put_own(store, name, _FIRST)  # succeeds even if the first response is lost and a retry finds the object
        try:
            store.put_if_absent(name, b"{}")
        except AlreadyExists:
            if get_json(store, name) == _FIRST:
                return
    except (Denied, NotFound):
        raise
    except StoreError as e:
        if e.retryable:
            raise
        said = str(e)
    finally:
        with suppress(StoreError):
            store.delete(name)
    raise ConfigError(
        f"{store.url}: expected a store that refuses to create an object twice (If-None-Match), got {said}: two "
        f"processes could replace each other's objects, and lose samples. Use a store with conditional puts{hint}"
    )
