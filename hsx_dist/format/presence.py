"""Whether an object exists, which its name in a listing does not decide: a store may list too few names."""

from __future__ import annotations

from hsx_dist.errors import NotFound, ObjectsMissing
from hsx_dist.store import Store

_WEB = ("http://", "https://")


def exists(store: Store, name: str) -> bool:
    """Whether ``store`` has the object ``name``.

    Gets its first byte. A HEAD proves nothing: a gateway may answer it with the status 200 and the size of a page.
    Web servers get a HEAD, because one without ranges would send the whole object.
    """
    try:
        if store.url.startswith(_WEB):
            store.head(name)
        else:
            store.get(name, 1)
    except NotFound:
        return False
    return True


def is_missing(store: Store, name: str) -> bool:
    """Whether there is no object ``name``, after a first answer said so.

    Lists the name: one 404 of a gateway may pass for the store's, and a gateway sends no listing. Web servers, which
    may list no folders, get a HEAD.
    """
    if store.url.startswith(_WEB):
        return not exists(store, name)
    return all(info.name != name for info in store.list(name))


def unlisted(store: Store, name: str, others: str) -> ObjectsMissing:
    """The error of a listing without ``name``, which was stored before. ``others``: what the listing may lack too."""
    if exists(store, name):
        return ObjectsMissing(
            f"{store.url}/{name}: expected a listing with this object, which exists, got one without it: {others} may "
            "be missing too. Try again, or use another store"
        )
    return ObjectsMissing(
        f"{store.url}/{name}: expected this object, which was stored before, got none: it was removed, perhaps by "
        "hand. Start the same command again"
    )
