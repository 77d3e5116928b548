"""``hsx gc``: what a server stored with a time to live, once that is over."""

from __future__ import annotations

from collections.abc import Sequence

from hsx_dist.cli.tables import print_json
from hsx_dist.config import parse_storage_options
from hsx_dist.reading.expiry import expired, remove
from hsx_dist.store import open_store


def run_gc(path: str, options: Sequence[str], *, delete: bool, as_json: bool) -> None:
    """List what has expired under ``path``, and remove it if ``delete``."""
    store = open_store(path, parse_storage_options(options))
    names = []
    for name, _ in expired(store):
        names.append(name)
        if delete:
            remove(store, name)
        if not as_json:
            print(f"{'removed' if delete else 'expired'} {name}", flush=True)
    if as_json:
        print_json({"path": path, "deleted": delete, "expired": names})
        return
    print(f"{len(names):,} objects and markers {'removed' if delete else 'have expired; --delete removes them'}")
