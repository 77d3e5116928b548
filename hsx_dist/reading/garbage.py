"""What of a run nobody needs: parts that no receipt names, files that were never finished; and the run as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from hsx_dist.format.manifest import ATTEMPT_DIGITS, CHECK, COMPLETE, RUN
from hsx_dist.format.runs import newest_attempt, read_run, scan_receipts
from hsx_dist.reading.run import CONSUMED
from hsx_dist.store import ObjectInfo, Store

_PART = re.compile(rf"data/part-({ATTEMPT_DIGITS})-.+\.safetensors")
#: What a run consists of, in the order in which it is removed: ``attempts/`` last, by which a removal that was cut
#: off is known as one.
_FOLDERS = ("manifest/", "data/", CONSUMED, "report/", "attempts/")


def unproven(store: Store, attempt: int) -> Iterator[ObjectInfo]:
    """Parts of attempts up to ``attempt`` that no receipt names, as listed.

    Raises:
        FormatError, IntegrityError: the manifest is damaged: then nothing is known to be garbage.
    """
    # Listed first: what is proven meanwhile is then seen as proven.
    found = [info for info in store.list("data/") if _is_part(info.name, attempt)]
    named = {receipt.part for receipt in scan_receipts(store)}
    return (info for info in found if info.name not in named)


def unfinished(store: Store, older_than: float = 0.0) -> Iterator[ObjectInfo]:
    """What puts left of which the process was killed, where the store is a folder: of everything below it, unless it
    changed within ``older_than`` seconds."""
    find = getattr(store, "unfinished", None)
    return iter(()) if find is None else find(older_than)


def remove_run(store: Store, *, on_object: Callable[[str], None] = lambda _: None) -> int:
    """Remove the run: how many objects. What is not a run's own stays. The first to go is ``run.json``, so that nobody
    reads a run of which half is gone; called again it goes on.

    Raises:
        RunError: there is no run, nor what a removal that was cut off left.
    """
    if newest_attempt(store) == 0:
        read_run(store)
    removed = 0
    for name in (RUN, COMPLETE, CHECK):
        store.delete(name)
        on_object(name)
        removed += 1
    for folder in _FOLDERS:
        for info in store.list(folder):
            store.delete(info.name)
            on_object(info.name)
            removed += 1
    for info in unfinished(store):
        if "/" not in info.name or info.name.startswith(_FOLDERS):
            store.delete(info.name)
            on_object(info.name)
            removed += 1
    return removed


def _is_part(name: str, attempt: int) -> bool:
    found = _PART.fullmatch(name)
    return found is not None and int(found[1]) <= attempt
