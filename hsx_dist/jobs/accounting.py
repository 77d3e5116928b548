"""Input rows that receipts account for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hsx_dist.errors import Fenced, HsxError, RunMismatch
from hsx_dist.format.manifest import Manifest, RowFate
from hsx_dist.inputs.rows import Row
from hsx_dist.observe.console import Console

#: Reads the input from its beginning.
Rows = Callable[[], Iterator[Row | RowFate]]
#: Rows, and bytes of their JSON, that are compared at once. As Python objects, they take up to 12 times as much.
_BLOCK_ROWS, _BLOCK_BYTES = 64, 1 << 20


def same_rows(rows: Rows) -> Rows:
    """Return ``rows``, which raises ``RunMismatch`` if a pass has other rows than the first pass.

    The driver counts the rows in one pass, and computes them in another. If a file was removed in between, the driver
    would mark the run as complete without the file's rows. Blocks of rows are compared before they are yielded, so that
    no row of another input is computed.
    """
    known: list[bytes] = []  # a running hash after each block of the first whole pass

    def read() -> Iterator[Row | RowFate]:
        total, digest, own, source = 0, hashlib.blake2b(digest_size=8), list[bytes](), rows()
        while True:
            block, size = list[Row | RowFate](), 0
            while len(block) < _BLOCK_ROWS and size < _BLOCK_BYTES and (row := next(source, None)) is not None:
                body = row.body if isinstance(row, Row) else b""
                digest.update(f"{row.key}\0{len(body)}\0".encode("utf-8", "surrogatepass"))
                digest.update(body)
                block.append(row)
                size += len(body)
            own.append(digest.digest())
            if known and own[-1] != known[min(len(own), len(known)) - 1]:
                raise RunMismatch(
                    f"expected the rows of an earlier pass over the input, got others after row {total}: the input "
                    "changed while the run read it. Start the same command again"
                )
            if not block:  # the hash of the last block again
                known[:] = known or own
                return
            total += len(block)
            yield from block

    return read


def accounted(row: Row | RowFate, manifest: Manifest, *, retry_poison: bool = False) -> bool:
    """Whether a row's outcome is final. A refused row stays refused while its content is the same, as the settings are.
    A poison row stays poison, unless ``retry_poison``. A failed row is tried again."""
    if isinstance(row, RowFate):  # unreadable now, perhaps readable when it was stored
        return row.key in manifest.refused or row.key in manifest.samples
    if row.key in manifest.samples:
        return row.number_key not in manifest.refused
    fate = manifest.refused.get(row.key) or manifest.failed.get(row.key)
    if fate is None or fate.content != row.content:
        return False
    return fate.fate == "refused" or (fate.fate == "poison" and not retry_poison)


def remaining(rows: Rows, manifest: Manifest, *, retry_poison: bool = False) -> Iterator[Row | RowFate | None]:
    """Rows that are still to be computed, and ``None`` for each other row, so that the caller can stop in between.
    Before a row that was refused earlier and is readable now, the withdrawal of its earlier outcome is yielded.

    A refused row that has another reason now is yielded too, to store this reason. It is accounted for, so that no
    fleet starts for a reason alone."""
    for row in rows():
        if accounted(row, manifest, retry_poison=retry_poison):
            known = manifest.refused.get(row.key)
            yield row if isinstance(row, RowFate) and known and known.reason != row.reason else None
            continue
        if isinstance(row, Row) and row.number_key in manifest.refused:
            yield RowFate(row.number_key, row.row, "withdrawn", "the row was corrected", 0)
        if isinstance(row, RowFate) or row.key not in manifest.samples:
            yield row


@contextmanager
def logging_missing_rows(rows: Rows, manifest: Manifest, console: Console) -> Iterator[None]:
    """If the attempt ends with an error, log the rows without a receipt that this driver knows."""
    try:
        yield
    except Fenced:
        raise  # the newer driver computes these rows
    except HsxError as e:
        first: list[str] = []
        missing = 0
        with suppress(RunMismatch):  # other rows than before: ``e`` is this error, or the next start finds it
            for row in rows():
                if accounted(row, manifest):
                    continue
                missing += 1
                if len(first) < 5:
                    first.append(row.key)
        some = ", ".join(first) + (", …" if missing > 5 else "")
        console.print(
            f"ended by {type(e).__name__}: {missing} rows are not stored ({some}); samples with a receipt stay. "
            "Correct the cause, then start the command again: it skips the rows with a stored sample",
            soft_wrap=True,
        )
        raise
