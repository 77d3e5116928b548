"""The identity of a run's input, so that a resume with another input is refused.

Receipts have a hash of each sample's input row. The identity has no paths: data moves between machines, and each
submitted job has another working folder. It has no number of rows, as a run may be extended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsx_dist.errors import RunMismatch
from hsx_dist.format.manifest import Manifest, RowFate
from hsx_dist.format.place import Place
from hsx_dist.inputs.rows import Row
from hsx_dist.jobs.accounting import Rows, accounted


def count_rows(place: Place, rows: Rows, manifest: Manifest, *, retry_poison: bool = False) -> tuple[int, int]:
    """Count the input's rows, and compare each stored one with the row that its sample was made of.

    Returns:
        The number of rows, and the number of rows that no receipt accounts for.

    Raises:
        RunMismatch: a stored row has other content now, or no row of the input is stored although the run has samples.
    """
    # Receipts of earlier versions have no content. Their runs recorded the first rows.
    first: Mapping[str, str] = place.info.get("first_rows") or {}
    total = todo = 0
    stored = not manifest.samples
    unread: dict[str, RowFate] = {}  # default key of an unreadable row → the row, if a sample has this key
    for row in rows():
        total += 1
        todo += not accounted(row, manifest, retry_poison=retry_poison)
        if (content := manifest.content_of(row.key)) is not None:
            stored = True
            _require_content(place, row, content, first.get(row.key), manifest)
        if isinstance(row, RowFate) and (default := _default_key(row.key)) and manifest.content_of(default):
            sample = manifest.samples.get(default)
            # A key without a file is the row's number. Numbers of rows in files shift when an earlier file grows.
            if sample is not None and (":" in default or sample.row in (None, row.row)):
                unread[default] = row
    if unread:
        # Each sample is of its unreadable row, unless another row has this key as its id now.
        for row in rows():
            unread.pop(row.key, None)
        for key, fate in unread.items():
            _require_content(place, fate, manifest.content_of(key) or "", None, manifest)
    if not stored:
        raise RunMismatch(
            f"{place.root.url}: expected the input of the stored samples, got none of their rows (such as "
            f"{next(iter(manifest.samples))!r}). Choose another output, or the same input"
        )
    return total, todo


def _default_key(number_key: str) -> str | None:
    """Return the key that an unreadable row without an id had when it was readable. None: the key is an id."""
    file, mark, number = number_key.rpartition("#")
    if not mark or len(number) < 8 or not (number.isascii() and number.isdecimal()):
        return None
    return f"{file}:{number}" if file else str(int(number))


def _require_content(
    place: Place, row: Row | RowFate, content: str, old_content: str | None, manifest: Manifest
) -> None:
    if isinstance(row, RowFate):
        if content:  # earlier versions accepted some rows that this version refuses
            raise RunMismatch(
                f"{place.root.url}: expected the input of the stored samples, got row {row.row} ({row.key!r}), which "
                f"is refused now: {row.reason}. Choose another output, or the same input"
            )
        return
    if (row.content != content) if content else (old_content is not None and row.old_content != old_content):
        of, twice = manifest.samples[row.key].row, ""
        if of not in (None, row.row):
            # The reader finds duplicates only among the rows that it takes: the stored row may be in another shard.
            twice = f"The sample is of row {of}. If that row has this id too, give one of them another id. "
        raise RunMismatch(
            f"{place.root.url}: expected the input of the stored samples, got other content in row {row.row} "
            f"({row.key!r}). {twice}Choose another output, or the same input"
        )


def run_seed(run: Mapping[str, Any], sampling_params: Mapping[str, Any]) -> str:
    """The seed from which the rows' seeds are derived: the user's, else the run's id."""
    given = sampling_params.get("seed")
    return f"seed {given}" if given is not None else str(run.get("id") or run.get("created") or "")
