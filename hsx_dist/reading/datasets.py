"""A data set over a run, for torch's ``DataLoader`` and for loops without it.

Imports torch if it is installed. Import the class as ``hsx_dist.HiddenStatesDataset``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from hsx_dist.errors import ConfigError, FormatError, NotFound, SampleConsumed
from hsx_dist.format.manifest import SampleRecord
from hsx_dist.lazy import cached_property
from hsx_dist.logger import get_logger
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.arguments import require_positive
from hsx_dist.reading.follow import FOLLOWED_MEMBERS, Follower, Iteration, Mark, has_position, require_followable
from hsx_dist.reading.item_reader import ItemReader, Source
from hsx_dist.reading.items import ItemSpec
from hsx_dist.reading.order import EpochPosition, canonical_order, check_state, fingerprint, require_run, restore
from hsx_dist.reading.prefetch import read_ahead
from hsx_dist.reading.retention import rank_of
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Layers, layers_of
from hsx_dist.reading.torch_data import IterableDataset, get_worker_info
from hsx_dist.reading.world import SharedEpoch, warn_if_growing, world_of

if TYPE_CHECKING:
    from hsx_dist.reading.retention import Retention

log = get_logger(__name__)

#: Errors that ``on_error="skip"`` counts. All other errors do not concern a single sample and are raised.
_BAD = (FormatError, NotFound, SampleConsumed)
#: Number of skipped samples that are logged. `skipped` counts all.
_LOGGED = 10


class HiddenStatesDataset(IterableDataset):  # type: ignore[misc, valid-type]
    """The samples of a run as a stream of items. For ``DataLoader``, with any number of ranks and workers.

    Items are dicts: ``input_ids`` int64 ``[T]``, ``loss_mask`` bool ``[T]``, ``hidden_states`` ``[T, L, H]`` in the
    run's dtype, ``layer_ids`` int64 ``[L]``, ``key``. With ``points``, each point under its name replaces states and
    layer ids: ``[T, L, heads, dim]`` if its rows consist of heads, else ``[T, L, width]``.

    Args:
        source: a run's path or URL, an open ``Run``, or a ``Selection`` of a run.
        points: names of points of the model (``Sample.points``) to read in place of the hidden states.
        layers: layer ids, in the order of the result. ``None``: all, in stored order. They apply to all ``points``; a
            mapping gives each point its layer ids.
        tokens: the range to read of every sample: a slice or ``(start, stop)``.
        max_tokens, crop: read at most this many tokens of each sample, from its ``start``, its ``end``, or a
            ``random`` position.
        shuffle: shuffle the parts, and samples within ``shuffle_buffer``. ``seed`` and epoch determine the order.
        rank, world_size: this reader's rank. Default: from torch.distributed, else torchrun's environment. The workers
            of a ``DataLoader`` divide their rank's share.
        loss_mask: for samples without a stored mask: ``ones``, or ``raise``. ``off``: items have no mask.
        rename: name → new name; ``None`` removes it from items. The name of an attached array adds that array, whole:
            ``tokens`` and ``max_tokens`` do not cut it.
        on_error: for a corrupt or missing part: ``raise``, or ``skip`` and count in ``skipped``.
        prefetch_bytes: limit for samples that are being read or wait to be taken. One sample larger than the limit is
            still read.
        threads: number of threads that fetch and decode.
        cache_dir, cache_bytes: cache fetched bytes on a local disk, up to this size. Processes may share the folder.
        repeat: start the next epoch when one ends, forever.
        follow: yield samples as they are proven, until the run is complete. ``follow_options``: ``poll_seconds`` (1),
            ``discover_seconds`` (10, between searches for new writers) and ``stalled_seconds`` (120).
        framework: ``torch``, ``numpy`` (bf16 as float32), or ``auto``: torch if it is installed.
        storage_options: options for fsspec.

    Raises:
        ConfigError: an argument is wrong, or a layer is not in the run.
        RunError, StoreError: as ``open_run``.
        RunStalled: with ``follow``, the run had no driver for ``stalled_seconds``.
        FormatError, NotFound: while iterating, a part is corrupt or missing.

    With ``repeat``, iterating also raises ConfigError for fewer samples than shards, and FormatError if all samples of
    an epoch were skipped.

    With ``follow`` or ``on_error="skip"``, torchdata's ``StatefulDataLoader`` needs ``snapshot_every_n_steps=1``, its
    default. Otherwise it drops items after a resume, by their number, and these may be other items than before.

    Example:
        >>> dataset = HiddenStatesDataset("runs/demo", layers=[15], max_tokens=8, shuffle=True)
        >>> dataset.set_epoch(1)
        >>> items = iter(dataset)
        >>> next(items)["hidden_states"].shape
        torch.Size([8, 1, 576])
        >>> dataset.layers, dataset.layers_of("hidden_states"), dataset.skipped, dataset.run.url.endswith("runs/demo")
        ((15,), (15,), 0, True)
    """

    def __init__(
        self,
        source: Source,
        *,
        points: Sequence[str] | None = None,
        layers: Layers | None = None,
        tokens: slice | tuple[int, int] | None = None,
        max_tokens: int | None = None,
        crop: Literal["start", "end", "random"] = "start",
        shuffle: bool = False,
        shuffle_buffer: int = 1024,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        loss_mask: Literal["ones", "raise", "off"] = "ones",
        rename: Mapping[str, str | None] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        prefetch_bytes: int = 256 << 20,
        threads: int = 16,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 32 << 30,
        repeat: bool = False,
        follow: bool = False,
        follow_options: Mapping[str, Any] | None = None,
        framework: Literal["auto", "torch", "numpy"] = "auto",
        storage_options: Mapping[str, Any] | None = None,
    ):
        spec = ItemSpec(
            *(layers, tokens, max_tokens, crop, loss_mask, rename or {}, framework, seed, points),
        )
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error: expected 'raise' or 'skip', got {on_error!r}")
        require_positive(shuffle_buffer=shuffle_buffer, prefetch_bytes=prefetch_bytes, threads=threads)
        if shuffle:
            require_positive(0, seed=seed)
        if follow:
            require_followable(source, shuffle, repeat)
        self._reader = ItemReader(source, spec, storage_options, cache_dir, cache_bytes)
        self._shuffle, self._buffer, self._seed = shuffle, shuffle_buffer, seed
        self._rank, self._world = world_of(rank, world_size)
        if not follow:
            warn_if_growing(self._reader.selection, self._world)
        self._on_error, self._prefetch, self._threads = on_error, prefetch_bytes, threads
        self._repeat, self._follow = repeat, dict(follow_options or {}) if follow else None
        self._epoch = SharedEpoch()
        self._resume: Mapping[str, Any] | None = None
        self._progress: Iteration | None = None
        #: Number of times that the position was discarded. Positions of data sets over this one are then void.
        self.rewinds = 0
        #: Number of samples that ``on_error="skip"`` skipped so far, in this process.
        self.skipped = 0

    @property
    def run(self) -> Run:
        """The run, opened."""
        return self._reader.run

    @property
    def states(self) -> tuple[str, ...]:
        """The names under which items hold states, before renaming: the points, or ``hidden_states``."""
        return self._reader.spec.states

    @property
    def layers(self) -> tuple[int, ...]:
        """vLLM's ids of an item's layers, in the item's order.

        Empty if ``layers`` is ``None`` and the run does not list its layers.
        """
        return self.layers_of(HIDDEN_STATES)

    def layers_of(self, point: str) -> tuple[int, ...]:
        """Layer ids of ``point`` in an item, in the item's order. ``ConfigError``: as ``Run.layers_of``."""
        wanted = layers_of(self._reader.spec.layers, point)
        return self.run.layers_of(point) if wanted is None else tuple(wanted)

    def name_layers(self) -> None:
        """Select the layers of ``layers_of`` by id from now on, also if ``layers`` was ``None``.

        Code that joins rows of several samples needs this: samples may store other layers, or in another order.
        If the run does not list its layers, and for points with ``follow``, items stay as stored. Then a sample whose
        layers differ from earlier ones raises ``ConfigError`` while iterating.
        """
        self._reader.one_order = True
        if self._reader.spec.layers is None and not (self._reader.spec.points and self.follows):
            named = {name: self.layers_of(name) for name in self.states}
            self._reader.spec = replace(self._reader.spec, layers={k: v for k, v in named.items() if v} or None)

    @property
    def framework(self) -> str:
        """``auto``, ``torch`` or ``numpy``, as given."""
        return self._reader.spec.framework

    @property
    def follows(self) -> bool:
        """Whether the data set yields samples as they are proven (``follow``). A resume may change their order."""
        return self._follow is not None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration shuffles by, also in the workers of a ``DataLoader``. Counts from 0.

        The next iteration begins this epoch. If a state of this or a later epoch was loaded, it continues that state.
        """
        self._epoch.set(epoch)
        if self._follow is not None:
            return
        if self._resume is not None:
            stays = epoch <= self._resume["epoch"]
        else:
            now = self._progress
            stays = now is not None and not now.ended and isinstance(now.at, EpochPosition) and now.at.epoch == epoch
        if not stays:
            self.rewind()

    def rewind(self) -> None:
        """Discard the position: the next iteration begins the current epoch."""
        self._resume = self._progress = None
        self.rewinds += 1

    def __len__(self) -> int:
        """Number of samples of this rank in an epoch, over all its workers."""
        if self._follow is not None:
            raise TypeError(
                "expected a data set without follow for its length, got follow: the run may still grow. Do not use len"
            )
        return len(range(self._rank, len(self._reader.selection), self._world))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._recorded(*self.begin(), self.rewinds)

    def begin(self) -> tuple[Iterator[dict[str, Any]], Iteration]:
        """Begin an iteration. Return its items and its progress.

        The progress is that of the new iteration from now on. A loader saves states before an iteration's first item.
        """
        resume = None if self._resume is None or self.outdated(self._resume) else self._resume
        progress = Iteration(self._position(resume))
        if resume is not None:
            self.skipped = self.loaded_state(resume).get("skipped", self.skipped)
        self._resume, self._progress = None, progress
        if isinstance(progress.at, Follower):
            return self._followed(progress, progress.at), progress
        return self._ordered(progress, progress.at), progress

    def outdated(self, state: Mapping[str, Any]) -> bool:
        """Whether ``set_epoch`` asked for a later epoch than that of ``state``. Loaders load states after that call."""
        return self._follow is None and self._epoch.asked() > state["epoch"]

    def _recorded(self, items: Iterator[dict[str, Any]], progress: Iteration, rewinds: int) -> Iterator[dict[str, Any]]:
        if rewinds != self.rewinds:  # ``set_epoch`` was called before the first item
            items, progress = self.begin()
        for item in items:
            self._progress = progress  # also if ``set_epoch`` was called during the iteration
            yield item
            del item

    def _position(self, resume: Mapping[str, Any] | None) -> EpochPosition | Follower:
        """The position of ``resume``, or the beginning of the current epoch."""
        shards, shard = self._shards()
        if self._follow is None:
            if resume is None:
                return EpochPosition(self._epoch.get(), shards, shard)
            return restore(resume, self._fingerprint, shards, shard, len(self._reader.selection))
        if resume is not None and (resume["shards"], resume["shard"]) != (shards, shard):
            raise ConfigError(
                f"state: expected the state of shard {shard} of {shards}, got that of shard {resume['shard']} of "
                f"{resume['shards']}. With follow, resume with the same ranks and workers"
            )
        return Follower(self.run.place, state=resume and resume["position"], **self._follow)

    # -- without follow ----------------------------------------------------------------------------------------------

    def _ordered(self, progress: Iteration, at: EpochPosition) -> Iterator[dict[str, Any]]:
        shards, shard = at.shards, at.shard
        if self._repeat and shard >= len(self._reader.selection):
            raise ConfigError(
                f"repeat: expected a sample for each of {shards} shards (ranks times workers), got "
                f"{len(self._reader.selection)} samples of {self.run.url}. Use fewer workers or ranks"
            )
        while True:
            whole, skipped = at.taken == 0 and not at.history, self.skipped
            yield from self._one_epoch(at)
            if not self._repeat:
                progress.ended = True
                return
            if whole and at.taken == self.skipped - skipped:  # the next epoch would skip all of them too
                raise FormatError(
                    f"{self.run.url}: expected a sample that can be read, got none of a whole epoch: all "
                    f"{at.taken} were skipped. `hsx verify` lists the damaged parts"
                )
            at = progress.at = EpochPosition(at.epoch + 1, shards, shard)

    def _one_epoch(self, at: EpochPosition) -> Iterator[dict[str, Any]]:
        selection, reader = self._reader.selection, self._reader
        order = canonical_order(
            selection.groups, shuffle=self._shuffle, buffer=self._buffer, seed=self._seed, epoch=at.epoch
        )
        places = selection.places[at.mine(order)[at.taken :]]
        tasks = ((int(place), reader.nbytes(int(place))) for place in places)
        epoch, memory = at.epoch, self._reader.memory(self._prefetch)
        for place, future in read_ahead(
            lambda place: reader.make(place, epoch, memory), tasks, threads=self._threads, max_bytes=memory.ahead
        ):
            item = self._outcome(selection.run_index.keys[place], future)
            at.taken += 1
            if item is not None:
                yield item
                del item

    def _outcome(self, key: str, future: Future[dict[str, Any]]) -> dict[str, Any] | None:
        error = future.exception()
        if error is None:
            return future.result()
        if self._on_error == "raise" or not isinstance(error, _BAD) or isinstance(error, ConfigError):
            raise error
        self.skipped += 1
        if self.skipped <= _LOGGED:
            log.warning("sample %s skipped, %d so far: %s", key, self.skipped, error)
        return None

    # -- with follow ---------------------------------------------------------------------------------------------------

    def _followed(self, progress: Iteration, follower: Follower) -> Iterator[dict[str, Any]]:
        shards, shard = self._shards()
        reader, memory = self._reader, self._reader.memory(self._prefetch)

        def tasks(arrivals: Iterable[SampleRecord | None]) -> Iterator[tuple[SampleRecord | None, int]]:
            for r in arrivals:
                if r is None:
                    yield None, 0
                elif rank_of(r.key, shards) == shard:
                    yield r, reader.spec.nbytes(self.run, r.key, r.num_tokens, r.raw_bytes, r.stored_bytes)

        def make(record: SampleRecord | None) -> dict[str, Any]:
            assert record is not None, "read_ahead does not call make for pauses"
            return reader.make_of(record, 0, memory)

        for arrivals in (follower, follower.computed_again()):
            for record, future in read_ahead(make, tasks(arrivals), threads=self._threads, max_bytes=memory.ahead):
                assert record is not None, "read_ahead does not yield pauses"
                gone = isinstance(future.exception(), NotFound)
                if gone and arrivals is not follower:
                    continue  # the first pass skipped it
                item = self._outcome(record.key, future)
                if arrivals is not follower:
                    follower.given(record)
                elif gone:
                    follower.lost(record)
                else:
                    follower.done(record)
                if item is not None:
                    yield item
                    del item
        progress.ended = True

    def retention(self, consumer: str = "default", *, consumers: Sequence[str] | None = None) -> Retention:
        """A ``Retention`` for this rank: ``ack(key)`` marks a sample as used.

        Parts that all ``consumers`` have used are removed. Arguments and errors: as ``Retention``.

        Example:
            >>> dataset.retention("train", consumers=["train", "probe"]).state_dict()["used"]
            []
        """
        from hsx_dist.reading.retention import Retention

        return Retention(self.run.place, consumer, consumers=consumers, rank=self._rank, world_size=self._world)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position of this process's iteration, to the sample; JSON types. ``merge_states`` joins ranks.

        Example:
            >>> state = dataset.state_dict()
            >>> state["epoch"], state["taken"]
            (1, 1)
        """
        if self._progress is None or self._resume is not None:
            return self.next_state()
        return self.state_of(self._progress)

    def next_state(self) -> dict[str, Any]:
        """The state of the next iteration, which a loaded state may have moved."""
        return self.start_state() if self._resume is None else self.loaded_state(self._resume)

    def loaded_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A loaded state with this process's shard. A merged state has none, and could not be merged again."""
        if self._follow is not None or state["taken"]:
            return dict(state)
        shards, shard = self._shards()
        # Each shard loads a merged state. Only the first counts its skipped samples, so that a sum over ranks is right.
        skipped = {} if shard == state["shard"] else {"skipped": 0}
        return {**state, "shards": shards, "shard": shard, **skipped}

    def start_state(self) -> dict[str, Any]:
        """The state before the first sample of the current epoch."""
        return self.state_of(Iteration(self._position(None)))

    def state_of(self, progress: Iteration) -> dict[str, Any]:
        """The state of an iteration of this data set."""
        return self.mark_of(progress)()

    def mark_of(self, progress: Iteration) -> Mark:
        """Mark the present state of an iteration. Cheap enough for each item."""
        about = {"run": self.run.id, "skipped": self.skipped}
        if isinstance(progress.at, EpochPosition):
            found = progress.at.to_dict(self._fingerprint) | about
            return lambda: found
        (shards, shard), position = self._shards(), progress.at.mark()
        return lambda: {"follow": True, "shards": shards, "shard": shard, "position": position(), **about}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from ``state``.

        Raises:
            ConfigError: it is the state of another data set; or, when iteration begins, of another shard.
            RunMismatch: it is the state of another run, such as a run that was removed from the same place.

        Example:
            >>> dataset.load_state_dict(state)
            >>> len(list(dataset)) == len(dataset) - 1
            True
        """
        check_state(state, {})
        if bool(state.get("follow")) != (self._follow is not None):
            raise ConfigError(
                f"state: expected the state of a data set with follow={self._follow is not None}, got one with "
                f"follow={bool(state.get('follow'))}. Use the same follow"
            )
        if self._follow is not None:
            check_state(state, FOLLOWED_MEMBERS, required=("shards", "shard", "position"))
        else:
            shards, samples = (state.get("shards") or 1, state.get("shard") or 0), len(self._reader.selection)
            restore(state, self._fingerprint, *shards, samples)
        position = {} if self._follow is None else state["position"]
        require_run(state, self.run.place, lambda: has_position(self.run.store, position))
        if self._follow is None:
            self._epoch.load(state["epoch"])
        self._resume = dict(state)

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        selection = self._reader.selection
        return fingerprint(self._seed, self._shuffle, self._buffer, selection.keys(), selection.groups)

    def _shards(self) -> tuple[int, int]:
        """(number of shards, this shard). Shards are ranks times workers; ``shard % world_size`` is the rank."""
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        return self._world * workers, worker * self._world + self._rank
