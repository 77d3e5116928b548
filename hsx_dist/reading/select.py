"""Select samples of a run by key, length, split, metadata, and number of tokens that bear a loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hsx_dist.errors import ConfigError, SampleNotFound
from hsx_dist.format.byte_budget import ByteBudget
from hsx_dist.format.part_source import within_memory
from hsx_dist.reading.index import Index
from hsx_dist.reading.sample import Sample, loss_tokens_of

if TYPE_CHECKING:
    from hsx_dist.reading.run import Run

#: Number of parts whose headers are read at once, if a criterion needs them.
_THREADS = 16
#: Memory of the masks that are read at once. One larger mask is read alone.
_MASK_BYTES = 256 << 20

Split = Literal["train", "val"]


class Selection(Sequence[Sample]):
    """Some samples of a run, in the run's order. ``places``: their positions in ``run_index``, int64 ``[n]``.

    Keeps the index that ``places`` refer to, since ``Run.refresh`` changes the positions of samples. Data sets accept
    it in place of a run. Slices are selections, too. ``by_keys``: whether ``keys`` chose the samples. Then a run that
    grows does not change the selection.

    Example:
        >>> selection = run.select(max_tokens=2048)
        >>> selection[0].num_tokens, selection.lengths.tolist()
        (20, [20, 22, 24])
    """

    def __init__(self, run: Run, index: Index, places: np.ndarray[Any, Any], *, by_keys: bool = False):
        self.run = run
        self.run_index = index
        self.places = places
        self.by_keys = by_keys

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Selection(self.run, self.run_index, self.places[i], by_keys=self.by_keys)
        return self.sample(int(self.places[i]))

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(int(i)) for i in self.places)

    def sample(self, place: int) -> Sample:
        """The sample at ``place`` in ``run_index``, selected or not."""
        return self.run.sample_of(self.run_index[place])

    def keys(self) -> list[str]:
        """The keys of the samples.

        Example:
            >>> set(selection.keys()) <= set(run.keys())
            True
        """
        return [self.run_index.keys[i] for i in self.places]

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Number of tokens of each sample, int64 ``[n]``."""
        return self.run_index.tokens[self.places]

    @property
    def groups(self) -> np.ndarray[Any, Any]:
        """Group of each sample, int32 ``[n]``. Samples of a group are stored together: see ``Index``."""
        return self.run_index.group_of[self.places]

    def __repr__(self) -> str:
        return f"Selection({len(self)} of {len(self.run_index)} samples of {self.run.url!r})"


def select(
    run: Run,
    *,
    keys: Iterable[str] | None = None,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    split: Split | None = None,
    val_fraction: float = 0.05,
    where: Callable[[Mapping[str, Any]], bool] | None = None,
    min_loss_tokens: int | None = None,
) -> Selection:
    """The samples of ``run`` that meet all criteria, in the run's order.

    Args:
        keys: only samples with these keys.
        min_tokens, max_tokens: limits of the length, both inclusive.
        split: ``train`` or ``val``. The key alone decides the side of a sample. The side stays the same when the run
            grows, and in another run of the same rows. About ``val_fraction`` of the samples are ``val``.
        where: called with a sample's ``meta``; returns whether to select it. Reads the headers of the parts that the
            criteria above leave.
        min_loss_tokens: minimum number of ones in the stored ``loss_mask``. Reads the masks. In a sample without a
            mask all tokens count.

    Raises:
        SampleNotFound: one of ``keys`` is not in the run.
        ConfigError: a criterion has an invalid value.
        SampleConsumed, StoreError, FormatError: ``where`` or ``min_loss_tokens`` reads a part that was removed after
            use, or that cannot be read. Its samples are not skipped: a state that was taken before the removal would
            not fit the smaller selection.

    Example:
        >>> run.select(min_tokens=22, where=lambda meta: "bad" not in meta)
        Selection(2 of 3 samples of '...runs/demo')
    """
    index = run.index
    chosen = np.ones(len(index), bool)
    if keys is not None:
        chosen[:] = False
        chosen[_places_of(run, index, keys)] = True
    if min_tokens is not None:
        chosen &= index.tokens >= min_tokens
    if max_tokens is not None:
        chosen &= index.tokens <= max_tokens
    if split is not None:
        chosen &= _is_val(index.keys, val_fraction) == _side(split)
    found = Selection(run, index, np.flatnonzero(chosen), by_keys=keys is not None)
    if where is not None:
        found = _filtered(found, lambda sample: bool(where(sample.meta)))
    if min_loss_tokens is not None:
        least, memory = min_loss_tokens, ByteBudget(_MASK_BYTES)

        def has_least(sample: Sample) -> bool:
            with memory.hold(3 * sample.num_tokens), within_memory():
                return loss_tokens_of(sample) >= least

        found = _filtered(found, has_least)
    return found


def _places_of(run: Run, index: Index, keys: Iterable[str]) -> list[int]:
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise ConfigError(f"keys: expected a list of keys, got {keys!r}. Put it into a list")
    found = []
    for key in keys:
        if not isinstance(key, str):
            raise ConfigError(f"keys: expected texts, got {key!r:.100}. Keys of rows without an id are texts, too: '0'")
        place = index.place(key)
        if place is None:
            run[key]  # raises SampleNotFound with the reason, unless a refresh has just added it
            raise SampleNotFound(
                f"{run.url}: expected a sample {key!r} at the last refresh, got none. It is stored now: select again"
            )
        found.append(place)
    return found


def _side(split: str) -> bool:
    if split not in ("train", "val"):
        raise ConfigError(f"split: expected 'train' or 'val', got {split!r}. Use one of these")
    return split == "val"


def _is_val(keys: Sequence[str], fraction: float) -> np.ndarray[Any, Any]:
    if not 0 <= fraction <= 1:
        raise ConfigError(f"val_fraction: expected a number from 0 to 1, got {fraction}. Correct it")
    threshold = int(fraction * 2**64)
    return np.array([key_hash(key, b"split") < threshold for key in keys], bool)


def key_hash(key: str, purpose: bytes) -> int:
    """A hash of the key in ``[0, 2**64)``, different for each purpose."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


def _filtered(selection: Selection, keep: Callable[[Sample], bool]) -> Selection:
    # Group by part, so that each header is read once although the rows of a part may be scattered.
    places, parts = selection.places, selection.run_index.part_of
    by_part = places[np.argsort(parts[places], kind="stable")]
    groups = np.split(by_part, np.flatnonzero(np.diff(parts[by_part])) + 1)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hsx-select") as pool:
        kept = list(pool.map(lambda group: [i for i in group if keep(selection.sample(int(i)))], groups))
    left = np.array(sorted(int(i) for g in kept for i in g), np.int64)
    return Selection(selection.run, selection.run_index, left, by_keys=selection.by_keys)
