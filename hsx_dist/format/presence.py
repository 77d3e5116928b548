"""Whether an object exists, which its name in a listing does not decide: a store may list too few names."""

from __future__ import annotations

from hsx_dist.errors import NotFound, ObjectsMissing
from hsx_dist.store import Store


def exists(store: Store, name: str) -> bool:
    """Whether ``store`` has the object ``name``.

    Gets its first byte. A HEAD proves nothing: a gateway may answer it with the status 200 and the size of a page.
    Web servers get a HEAD, because one without ranges would send the whole object.
    """
    try:
        if store.url.startswith(("http://", "https://")):
            store.head(name)
        else:
            store.get(name, 1)
    except NotFound:
        return False
    return True


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
