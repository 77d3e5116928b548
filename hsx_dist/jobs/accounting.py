"""Input rows that receipts account for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hsx_dist.errors import Fenced, HsxError
from hsx_dist.format.manifest import Manifest, RowFate
from hsx_dist.inputs.rows import Row
from hsx_dist.observe.console import Console

#: Reads the input from its beginning.
Rows = Callable[[], Iterator[Row | RowFate]]


def count_rows(rows: Rows, manifest: Manifest, *, retry_poison: bool = False) -> tuple[int, int]:
    """Return the number of all rows, and the number of rows that no receipt accounts for."""
    total = todo = 0
    for row in rows():
        total += 1
        todo += not accounted(row, manifest, retry_poison=retry_poison)
    return total, todo


def accounted(row: Row | RowFate, manifest: Manifest, *, retry_poison: bool = False) -> bool:
    """Whether a row's outcome is final. A refused row stays refused while its content is the same, because a resume has
    the same settings. A poison row stays poison, unless ``retry_poison``. A failed row is tried again."""
    if isinstance(row, RowFate):
        return row.key in manifest.refused
    if row.key in manifest.samples:
        return row.number_key not in manifest.refused
    fate = manifest.refused.get(row.key) or manifest.failed.get(row.key)
    if fate is None or fate.content != row.content:
        return False
    return fate.fate == "refused" or (fate.fate == "poison" and not retry_poison)


def remaining(rows: Rows, manifest: Manifest, *, retry_poison: bool = False) -> Iterator[Row | RowFate]:
    """Yield rows without a final outcome. If a row was refused earlier and is readable now, first yields the withdrawal
    of its earlier outcome."""
    for row in rows():
        if accounted(row, manifest, retry_poison=retry_poison):
            continue
        if isinstance(row, Row) and row.number_key in manifest.refused:
            yield RowFate(row.number_key, row.row, "withdrawn", "the row was corrected", 0)
        if isinstance(row, RowFate) or row.key not in manifest.samples:
            yield row


@contextmanager
def telling_what_is_missing(rows: Rows, manifest: Manifest, console: Console) -> Iterator[None]:
    """If the attempt ends with an error, log the rows without a receipt that this driver knows."""
    try:
        yield
    except Fenced:
        raise  # the newer driver computes these rows
    except HsxError as e:
        first: list[str] = []
        missing = 0
        for row in remaining(rows, manifest):
            missing += 1
            if len(first) < 5:
                first.append(row.key)
        some = ", ".join(first) + (", …" if missing > 5 else "")
        console.print(
            f"ended by {type(e).__name__}: {missing} rows are not stored ({some}); samples with a receipt stay, and "
            "the same command continues from there",
            soft_wrap=True,
        )
        raise
