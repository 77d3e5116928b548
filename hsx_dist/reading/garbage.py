"""What of a run nobody needs: parts that no receipt names; and the run as a whole."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from hsx_dist.errors import RunError
from hsx_dist.format.manifest import COMPLETE, RUN
from hsx_dist.format.runs import newest_attempt, read_complete, read_heartbeat, read_run, scan_receipts
from hsx_dist.reading.run import CONSUMED
from hsx_dist.store import ObjectInfo, Store

_PART = re.compile(r"data/part-(\d{4,})-.+\.safetensors")
#: An attempt beats every few seconds; one that is silent for so long is dead.
WATCH_SECONDS = 45.0
#: What a run consists of, in the order in which it is removed: ``attempts/`` last, by which a removal that was cut
#: off is known as one.
_FOLDERS = ("manifest/", "data/", CONSUMED, "report/", "attempts/")


def require_dead(
    store: Store,
    *,
    watch_seconds: float = WATCH_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """The newest attempt, once it is known that nobody is at work on the run; 0 when there was none.

    At once where it has said that it ended, else after its heartbeat has stood still for ``watch_seconds``.

    Raises:
        RunError: somebody is at work.
    """
    attempt = newest_attempt(store)
    complete = read_complete(store)
    if attempt == 0 or (complete is not None and complete["attempt"] >= attempt):
        return attempt
    first = read_heartbeat(store, attempt)
    if first is not None and first.get("state") != "running":
        return attempt
    end = clock() + watch_seconds
    while clock() < end:
        sleep(min(1.0, watch_seconds))
        now = read_heartbeat(store, attempt)
        if newest_attempt(store) != attempt or (now or {}).get("value") != (first or {}).get("value"):
            raise RunError(
                f"{store.url}: expected a run that nobody works on, and attempt {newest_attempt(store)} is alive; stop "
                "it, or wait for its end"
            )
    return attempt


def unproven(store: Store, attempt: int) -> Iterator[ObjectInfo]:
    """Parts of attempts up to ``attempt`` that no receipt names, as listed.

    Raises:
        FormatError, IntegrityError: the manifest is damaged: then nothing is known to be garbage.
    """
    # Listed first: what is proven meanwhile is then seen as proven.
    found = [info for info in store.list("data/") if _is_part(info.name, attempt)]
    named = {receipt.part for receipt in scan_receipts(store)}
    return (info for info in found if info.name not in named)


def remove_run(store: Store, *, on_object: Callable[[str], None] = lambda _: None) -> int:
    """Remove the run: how many objects. What is not a run's own stays. The first to go is ``run.json``, so that nobody
    reads a run of which half is gone; called again it goes on.

    Raises:
        RunError: there is no run, nor what a removal that was cut off left.
    """
    if newest_attempt(store) == 0:
        read_run(store)
    removed = 0
    for name in (RUN, COMPLETE):
        store.delete(name)
        on_object(name)
        removed += 1
    for folder in _FOLDERS:
        for info in store.list(folder):
            store.delete(info.name)
            on_object(info.name)
            removed += 1
    return removed


def _is_part(name: str, attempt: int) -> bool:
    found = _PART.fullmatch(name)
    return found is not None and int(found[1]) <= attempt
