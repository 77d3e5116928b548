"""A driver's attempt of a run: open or start the run, take its next attempt, complete the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import ObjectsMissing, RunError, RunMismatch
from hsx_dist.format.conditional_puts import require_conditional_puts
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.place import REMOVAL_ERRORS, Place, find_place, start_run
from hsx_dist.format.runs import (
    close_attempt,
    load_manifest,
    refuse_version_1,
    seal_attempts,
    take_attempt,
    write_complete,
)
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.jobs.meaning import differences
from hsx_dist.observe.console import Console
from hsx_dist.reading.missing import missing_parts
from hsx_dist.store import Store
from hsx_dist.text import bounded

#: Limit of the settings that one error lists.
_MOST_SHOWN = 20


def open_or_start_run(config: ExtractConfig, root: Store, meaning: dict[str, Any]) -> tuple[Place, Manifest]:
    """Open the run at the output, or start one. Returns the run and its manifest.

    ``config``: with the revisions as the user wrote them. ``meaning``: ``run_meaning``.

    Raises:
        ConfigError: as ``begin_attempt``, if there is no run. Nothing is stored.
        RunMismatch: the stored run has other settings, or ``resume`` forbids to start or to continue a run.
        RunError: objects of an unfinished removal are left at the output.
    """
    place = find_place(root)
    if place is None:
        if config.resume == "must":
            raise RunMismatch(
                f"resume: expected a run at {root.url} for resume=must, got none. Check output, or set resume=allow"
            )
        # Before the description: a store that ignores the condition could replace another driver's run.
        _require_conditional_puts(config, root)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"meaning": meaning, "settings": config.public(), "created": created}
        try:
            return start_run(root, about), Manifest()
        except RunError:
            # Another driver started the run first (a job that was submitted twice): this one continues that run.
            place = find_place(root)
            if place is None or config.resume == "never":
                raise
    if config.resume == "never":
        raise RunMismatch(
            f"resume: expected no run at {root.url} for resume=never, got one. Choose another output, or set "
            "resume=allow"
        )
    differ = differences(place.info, meaning, config.meaning())
    if differ:
        # Names and values of a stored object may be long, and have control characters.
        lines = "; ".join(
            f"{bounded(name, 200)}={bounded(repr(has), 200)} (stored: {bounded(repr(had), 200)})"
            for name, had, has in differ[:_MOST_SHOWN]
        )
        more = f", and {len(differ) - _MOST_SHOWN} more" if len(differ) > _MOST_SHOWN else ""
        raise RunMismatch(
            f"{root.url}: expected the settings of the stored run, got {lines}{more}. Use the stored settings, choose "
            "another output, or remove the run (hsx rm)"
        )
    with unless_removed(place):
        return place, load_manifest(place.store)


_SINGLE_DRIVER = (
    ". To finish an existing run in a store that ignores the condition, set store.single_driver=true, and run one "
    "driver at a time"
)


def _require_conditional_puts(config: ExtractConfig, store: Store) -> None:
    if not config.store.single_driver:
        require_conditional_puts(store, _SINGLE_DRIVER)


def begin_attempt(config: ExtractConfig, place: Place) -> int:
    """Take the run's next attempt. Earlier drivers and writers are fenced.

    Raises:
        ConfigError: the store has no conditional writes, so that two drivers could own the run.
        RunError: the run was removed meanwhile.
        StoreError: the store failed.
    """
    _require_conditional_puts(config, place.store)
    about = {"host": os.uname().nodename, "pid": os.getpid(), "settings": config.public()}
    attempt = take_attempt(place.store, about)
    require_not_removed(place)
    return attempt


def take_over(place: Place, attempt: int, console: Console) -> tuple[RowLedger, Manifest]:
    """Seal the receipt logs of all earlier writers, and read the manifest.

    Returns the attempt's ledger and the manifest. Parts with a receipt that are missing in the store are recorded as
    lost.

    Raises:
        StoreError, FormatError: as ``load_manifest``.
    """
    store = place.store
    sealed = seal_attempts(store, attempt - 1, attempt)
    if place.version == 1:
        refuse_version_1(store, attempt)
    manifest = load_manifest(store, sealed)
    ledger = RowLedger(store, attempt, manifest)
    if lost := missing_parts(store, manifest, place.version):
        before = len(manifest.samples)
        ledger.declare_lost(lost)
        console.print(
            f"{len(lost)} parts that receipts name are not in the store ({lost[0]}, …): "
            f"{before - len(manifest.samples)} samples are computed again",
            soft_wrap=True,
            markup=False,
        )
    return ledger, manifest


def complete(place: Place, ledger: RowLedger, attempt: int, manifest: Manifest, rows: int) -> None:
    """Mark the run as complete. The receipts in ``manifest`` account for all ``rows``.

    Adds later receipts of writers that were treated as dead.

    Raises:
        Fenced: a newer attempt was taken.
        StoreError: the store failed, or lacks parts. For example, a node lost the mount of a shared folder meanwhile.
    """
    ledger.read_new_receipts(close_attempt(place.store, attempt))
    if lost := missing_parts(place.store, manifest, place.version):
        raise ObjectsMissing(
            f"{place.store.url}: expected the parts that receipts name, got {len(lost)} missing parts ({lost[0]}, …). "
            "Check that all nodes use the same store, and start the same command again: it computes their samples again"
        )
    write_complete(place.store, attempt, manifest, {"rows": rows})


def require_not_removed(place: Place) -> None:
    """Raise ``RunError`` if the run was removed."""
    if place.removed():
        raise RunError(
            f"{place.root.url}: expected the run that this driver works on, got the mark of its removal, or no "
            f"{place.pointer}: its samples are lost. Start the extraction again, at an output that no other process "
            "removes"
        )


@contextmanager
def unless_removed(place: Place) -> Iterator[None]:
    """Raise ``RunError`` if the run was removed meanwhile, also instead of errors that the removal may have caused."""
    try:
        yield
    except REMOVAL_ERRORS:
        require_not_removed(place)
        raise
    require_not_removed(place)
