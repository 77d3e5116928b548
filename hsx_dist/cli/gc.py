"""``hsx gc`` and ``hsx rm``: what nobody needs any more, and whole runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hsx_dist.config import parse_storage_options
from hsx_dist.errors import NotFound
from hsx_dist.format.manifest import RUN
from hsx_dist.format.runs import count, load_manifest, read_run
from hsx_dist.observe.console import print_json, say
from hsx_dist.observe.units import bytes_text
from hsx_dist.reading.expiry import expired, remove
from hsx_dist.reading.garbage import remove_run, unfinished, unproven
from hsx_dist.reading.liveness import require_dead
from hsx_dist.store import ObjectInfo, Store, open_store

#: A server may be writing; a put that has not changed for so long was one of a process that is gone.
_LONGEST_PUT_S = 86_400.0


def run_gc(path: str, options: Sequence[str], *, delete: bool, watch: float, as_json: bool) -> None:
    """Garbage of a run, or what has expired of a server's: list it, and remove it if ``delete``."""
    store = open_store(path, parse_storage_options(options))
    if _is_run(store):
        _gc_run(store, path, delete=delete, watch=watch, as_json=as_json)
        return
    if next(iter(store.list()), None) is None:
        raise NotFound(f"{path}: expected a run, or where a server stores, and nothing is stored there; check the path")
    names = []
    for name, _ in expired(store):
        names.append(name)
        if delete:
            remove(store, name)
        if not as_json:
            say(f"{'removed' if delete else 'expired'} {name}")
    left = _collect(store, unfinished(store, _LONGEST_PUT_S), "never finished", delete=delete, as_json=as_json)
    if as_json:
        print_json({"path": path, "deleted": delete, "expired": names, "unfinished": [info.name for info in left]})
        return
    say(f"{len(names):,} objects and markers {'removed' if delete else 'have expired; --delete removes them'}")
    _tell_unfinished(left, delete=delete)


def _collect(store: Store, garbage: Iterable[ObjectInfo], why: str, *, delete: bool, as_json: bool) -> list[ObjectInfo]:
    """All of ``garbage``, told one by one with ``why``; removed if ``delete``."""
    found = []
    for info in garbage:
        found.append(info)
        if delete:
            store.delete(info.name)
        if not as_json:
            say(f"{'removed' if delete else why} {info.name}")
    return found


def _tell_unfinished(left: Sequence[ObjectInfo], *, delete: bool) -> None:
    if left:
        done = "removed" if delete else "can go; --delete removes them"
        say(f"{len(left):,} files that were never finished, {bytes_text(sum(info.size for info in left))}, {done}")


def _gc_run(store: Store, path: str, *, delete: bool, watch: float, as_json: bool) -> None:
    attempt = require_dead(store, watch_seconds=watch)
    found = _collect(store, unproven(store, attempt), "no receipt names", delete=delete, as_json=as_json)
    left = _collect(store, unfinished(store), "never finished", delete=delete, as_json=as_json)
    size = sum(info.size for info in found)
    if as_json:
        garbage = [info.name for info in found]
        unfinished_names = [info.name for info in left]
        print_json({"path": path, "deleted": delete, "garbage": garbage, "bytes": size, "unfinished": unfinished_names})
        return
    done = "removed" if delete else "can go; --delete removes them"
    say(f"{len(found):,} parts without a receipt, {bytes_text(size)}, {done}")
    _tell_unfinished(left, delete=delete)


def run_rm(path: str, options: Sequence[str], *, yes: bool, watch: float) -> None:
    """Remove the run at ``path``; without ``yes`` only say what that would be."""
    store = open_store(path, parse_storage_options(options))
    if not yes:
        read_run(store)
        counts = count(load_manifest(store))
        say(
            f"{path}: {counts['samples']:,} samples in {counts['parts']:,} parts, "
            f"{bytes_text(counts['stored_bytes'])}; --yes removes them"
        )
        return
    require_dead(store, watch_seconds=watch)
    removed = remove_run(store)
    left = next(iter(store.list()), None)
    say(f"{removed:,} objects removed" + (f"; {left.name} and others are not the run's, and stay" if left else ""))


def _is_run(store: Store) -> bool:
    try:
        store.head(RUN)
    except NotFound:
        return False
    return True
