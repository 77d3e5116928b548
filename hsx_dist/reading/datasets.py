"""A data set over a run, for torch's ``DataLoader`` and loops without it.

Loads torch where it is installed, as the data set must be torch's for ``DataLoader`` to know them; import it by
``hsx_dist.HiddenStatesDataset``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from hsx_dist.errors import ConfigError, FormatError, NotFound, SampleConsumed
from hsx_dist.format.json_objects import count, or_null, text
from hsx_dist.logger import get_logger
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.follow import Arrival, Follower, has_position, position_check
from hsx_dist.reading.item_reader import ItemReader, Source
from hsx_dist.reading.items import ItemSpec
from hsx_dist.reading.order import EpochPosition, canonical_order, check_state, fingerprint, require_run, restore
from hsx_dist.reading.prefetch import read_ahead
from hsx_dist.reading.retention import rank_of
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Layers, layers_of
from hsx_dist.reading.select import Selection
from hsx_dist.reading.world import SharedNumber, world_of

if importlib.util.find_spec("torch") is not None:
    from torch.utils.data import IterableDataset, get_worker_info
else:  # numpy arrays, and loops of one's own
    IterableDataset = object

    def get_worker_info() -> Any:
        return None


if TYPE_CHECKING:
    from hsx_dist.reading.retention import Retention

log = get_logger(__name__)

#: What ``on_error="skip"`` counts; whatever else goes wrong is no property of one sample, and is raised.
_BAD = (FormatError, NotFound, SampleConsumed)
#: Members of the state of a data set that follows.
_FOLLOWED = {
    **dict.fromkeys(("shards", "shard", "skipped"), count),
    "run": or_null(text),
    "position": position_check,
}
#: Skipped samples that are logged one by one. All are counted in `skipped`.
_LOGGED = 10


def _require_positive(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name}: expected at least 1, came {value}")


def require_tokens(dataset: HiddenStatesDataset, idle: int) -> None:
    """``ConfigError`` instead of reading a data set that repeats for ever: ``idle`` items in a row gave no token."""
    if not dataset.follows and idle > len(dataset):
        raise ConfigError(
            "tokens, only_loss, exclude_ids: expected some tokens, got none of a whole epoch. Change them"
        )


def _require_followable(source: Source, shuffle: bool, repeat: bool) -> None:
    if shuffle or repeat:
        raise ConfigError(
            "follow: expected no shuffle and no repeat: samples come in the order in which they are proven"
        )
    if isinstance(source, Selection):
        raise ConfigError("follow: expected a run, came a selection of what it has now; what comes is not selected")


class HiddenStatesDataset(IterableDataset):  # type: ignore[misc, valid-type]
    """Samples of a run, one after the other; for ``DataLoader``, with any number of ranks and workers.

    Args:
        source: a run's path or URL, an open ``Run``, or a ``Selection`` of one.
        points: names of other points of the model than the hidden states, as ``Sample.points`` has them.
        layers: ids of layers, in the order wanted; ``None``: all, as stored. Of several ``points`` the same ones, or a
            mapping: point → its layers.
        tokens: a range of every sample: a slice or ``(start, stop)``.
        max_tokens, crop: at most so many tokens of each sample, from its ``start``, its ``end``, or a ``random`` place.
        shuffle: part-wise and within ``shuffle_buffer`` samples, the same way for the same ``seed`` and epoch.
        rank, world_size: who reads; by default torch.distributed's, or torchrun's environment. Workers of a
            ``DataLoader`` divide their rank's share.
        loss_mask: for samples without an attached one: ``ones``, ``raise``; ``off``: no mask in items.
        rename: name → another, ``None``: leave it out. A name of an attached array adds it.
        on_error: what a corrupt or missing part does: ``raise``, or ``skip`` and count (``skipped``).
        prefetch_bytes: of samples being read or waiting to be asked for, at most (one larger sample fits always).
        threads: that fetch and decode.
        cache_dir, cache_bytes: keep what was fetched on a local disk, up to that size; processes may share it.
        repeat: begin the next epoch when one ends, without end.
        follow: yield samples as they are proven, until the run is complete; see ``Follower`` (``follow_options``).
        framework: ``torch``, ``numpy`` (bf16 as float32), or ``auto``: torch where it is installed.

    Items are dicts: ``input_ids`` int64 ``[T]``, ``loss_mask`` bool ``[T]``, ``hidden_states`` ``[T, L, H]`` in the
    run's dtype, ``layer_ids`` int64 ``[L]``, ``key``. With ``points``, instead of states and layer ids, each point
    under its own name: ``[T, L, heads, dim]`` where its rows are made of heads, else ``[T, L, width]``.

    Raises:
        ConfigError: an argument is wrong, or a layer is not in the run.
        RunError, StoreError: as ``open_run``. Iterating: FormatError, NotFound for what is corrupt or missing. With
            ``repeat``: ConfigError for fewer samples than shards, FormatError where all of an epoch was skipped.
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
            *(layers, tokens, max_tokens, crop, loss_mask, dict(rename or {}), framework, seed, points),
        )
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error: expected 'raise' or 'skip', came {on_error!r}")
        _require_positive(shuffle_buffer=shuffle_buffer, prefetch_bytes=prefetch_bytes, threads=threads)
        if follow:
            _require_followable(source, shuffle, repeat)
        self._reader = ItemReader(source, spec, storage_options, cache_dir, cache_bytes)
        self._shuffle, self._buffer, self._seed = shuffle, shuffle_buffer, seed
        self._rank, self._world = world_of(rank, world_size)
        self._on_error, self._prefetch, self._threads = on_error, prefetch_bytes, threads
        self._repeat, self._follow = repeat, dict(follow_options or {}) if follow else None
        self._epoch = SharedNumber()
        self._resume: Mapping[str, Any] | None = None
        self._progress: EpochPosition | None = None
        self._follower: Follower | None = None
        #: Samples that ``on_error="skip"`` left out so far, in this process.
        self.skipped = 0

    @property
    def run(self) -> Run:
        return self._reader.run

    @property
    def states(self) -> tuple[str, ...]:
        """The names under which items hold states, before renaming: the points, or ``hidden_states``."""
        return tuple(self._reader.spec.points or (HIDDEN_STATES,))

    @property
    def layers(self) -> tuple[int, ...]:
        """vLLM's ids of an item's layers, in its order; empty where all are wanted and the run does not tell them."""
        return self.layers_of(HIDDEN_STATES)

    def layers_of(self, point: str) -> tuple[int, ...]:
        """The layers of ``point`` in an item, in its order. ``ConfigError``: as ``Run.layers_of``."""
        wanted = layers_of(self._reader.spec.layers, point)
        return self.run.layers_of(point) if wanted is None else tuple(wanted)

    def name_layers(self) -> None:
        """Items have from now on the layers of ``layers_of``, by their ids, also where none were asked for. Whoever
        joins rows of several samples needs that: a sample may store others, or in another order.

        Where the run does not tell its layers, and with ``follow`` for points, items stay as stored.
        """
        if self._reader.spec.layers is None and not (self._reader.spec.points and self.follows):
            named = {name: self.layers_of(name) for name in self.states}
            self._reader.spec = replace(self._reader.spec, layers={k: v for k, v in named.items() if v} or None)

    @property
    def framework(self) -> str:
        """``auto``, ``torch`` or ``numpy``, as given."""
        return self._reader.spec.framework

    @property
    def follows(self) -> bool:
        """Whether it yields samples as they are proven (``follow``). A resume may change their order."""
        return self._follow is not None

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration shuffles by; reaches the workers of a ``DataLoader`` too."""
        self._epoch.set(epoch)

    def __len__(self) -> int:
        """Samples of this rank in an epoch, of all its workers."""
        if self._follow is not None:
            raise TypeError("a run that is followed has no length yet")
        return len(range(self._rank, len(self._reader.selection), self._world))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._followed() if self._follow is not None else self._ordered()

    # -- a run that is there -----------------------------------------------------------------------------------------

    def _ordered(self) -> Iterator[dict[str, Any]]:
        shards, shard = self._shards()
        resume, self._resume = self._resume, None
        progress = EpochPosition(self._epoch.get(), shards, shard)
        if resume is not None:
            progress = restore(resume, self._fingerprint, shards, shard)
            self.skipped = resume.get("skipped", self.skipped)
        self._progress = progress
        if self._repeat and shard >= len(self._reader.selection):
            raise ConfigError(
                f"repeat: expected a sample for each of {shards} shards (ranks times workers), got "
                f"{len(self._reader.selection)} samples of {self.run.url}. Use fewer workers or ranks"
            )
        while True:
            whole, skipped = progress.taken == 0 and not progress.history, self.skipped
            yield from self._one_epoch(progress)
            if not self._repeat:
                return
            if whole and progress.taken == self.skipped - skipped:  # the next epoch would skip all of them, too
                raise FormatError(
                    f"{self.run.url}: expected a sample that can be read, got none of a whole epoch: all "
                    f"{progress.taken} were skipped. `hsx verify` names what is damaged"
                )
            progress = self._progress = EpochPosition(progress.epoch + 1, shards, shard)

    def _one_epoch(self, progress: EpochPosition) -> Iterator[dict[str, Any]]:
        selection, reader = self._reader.selection, self._reader
        order = canonical_order(
            selection.groups, shuffle=self._shuffle, buffer=self._buffer, seed=self._seed, epoch=progress.epoch
        )
        places = selection.places[progress.mine(order)[progress.taken :]]
        tasks = ((int(place), reader.nbytes(int(place))) for place in places)
        epoch, empty = progress.epoch, self._reader.memory(self._prefetch)
        for place, future in read_ahead(
            lambda place: reader.make(place, epoch, empty), tasks, threads=self._threads, max_bytes=self._prefetch
        ):
            item = self._outcome(selection.run_index.keys[place], future)
            progress.taken += 1
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
            log.warning("%s: skipped, %d so far: %s", key, self.skipped, error)
        return None

    # -- a run that is written -----------------------------------------------------------------------------------------

    def _followed(self) -> Iterator[dict[str, Any]]:
        shards, shard = self._shards()
        resume, self._resume = self._resume, None
        if resume is not None and (resume["shards"], resume["shard"]) != (shards, shard):
            raise ConfigError(
                f"state: expected the state of shard {shard} of {shards}, came that of shard {resume['shard']} of "
                f"{resume['shards']}; a run that is followed goes on with the same ranks and workers"
            )
        position = None
        if resume is not None:
            position, self.skipped = resume["position"], resume.get("skipped", self.skipped)
        follower = self._follower = Follower(self.run.place, state=position, **(self._follow or {}))
        reader, empty = self._reader, self._reader.memory(self._prefetch)

        def tasks(arrivals: Iterable[Arrival | None]) -> Iterator[tuple[Arrival | None, int]]:
            for arrival in arrivals:
                if arrival is None:
                    yield None, 0
                elif rank_of(arrival.record.key, shards) == shard:
                    r = arrival.record
                    yield arrival, reader.spec.nbytes(self.run, r.key, r.num_tokens, r.raw_bytes, r.stored_bytes)

        def make(arrival: Arrival | None) -> dict[str, Any]:
            assert arrival is not None, "read_ahead runs no pauses"
            return reader.spec.make(self.run.sample_of(arrival.record), 0, empty)

        for arrivals in (follower, follower.computed_again()):
            for arrival, future in read_ahead(make, tasks(arrivals), threads=self._threads, max_bytes=self._prefetch):
                assert arrival is not None, "read_ahead yields no pauses"
                gone = isinstance(future.exception(), NotFound)
                if gone and arrivals is not follower:
                    continue  # it was skipped before
                item = self._outcome(arrival.record.key, future)
                if arrivals is not follower:
                    follower.given(arrival)
                elif gone:
                    follower.lost(arrival)
                else:
                    follower.done(arrival)
                if item is not None:
                    yield item
                    del item

    def retention(self, consumer: str = "default", *, consumers: Sequence[str] | None = None) -> Retention:
        """``ack(key)`` of this rank's samples; parts that all ``consumers`` have used are removed."""
        from hsx_dist.reading.retention import Retention

        return Retention(self.run.place, consumer, consumers=consumers, rank=self._rank, world_size=self._world)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where this process's iteration stands, to the sample; JSON types. ``merge_states`` joins ranks."""
        if self._resume is not None:  # loaded, and not gone on from yet
            if self._follow is not None or self._resume["taken"]:
                return dict(self._resume)
            shards, shard = self._shards()  # a merged state is of none, and could not be merged again
            return {**self._resume, "shards": shards, "shard": shard}
        if self._follower is not None:
            return self._state_of(self._follower.position)
        return self.start_state() if self._progress is None else self._state_of(self._progress)

    def start_state(self) -> dict[str, Any]:
        """The state before the first sample of the epoch that is set."""
        shards, shard = self._shards()
        return self._state_of({} if self._follow is not None else EpochPosition(self._epoch.get(), shards, shard))

    def _state_of(self, at: EpochPosition | dict[str, Any]) -> dict[str, Any]:
        """``at``: the progress in an epoch, or a follower's position."""
        if isinstance(at, EpochPosition):
            found = at.to_dict(self._fingerprint)
        else:
            shards, shard = self._shards()
            found = {"follow": True, "shards": shards, "shard": shard, "position": at}
        return {**found, "run": self.run.id, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where ``state`` was taken.

        Raises:
            ConfigError: it is the state of another data set; or, when iteration begins, of another shard.
            RunMismatch: it is of another run, such as one that was removed from the same place.
        """
        check_state(state, {})
        if bool(state.get("follow")) != (self._follow is not None):
            raise ConfigError("state: expected that of a data set with the same follow")
        if self._follow is not None:
            check_state(state, _FOLLOWED, required=("shards", "shard", "position"))
        else:
            restore(state, self._fingerprint, state.get("shards") or 1, state.get("shard") or 0)
            self._epoch.set(state["epoch"])
        require_run(state, self.run.place, lambda: has_position(self.run.store, state.get("position", {})))
        self._resume = dict(state)

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        selection = self._reader.selection
        return fingerprint(self._seed, self._shuffle, self._buffer, selection.keys(), selection.groups)

    def _shards(self) -> tuple[int, int]:
        """(how many, which): ranks times workers, a rank's own being those that are its rank modulo the ranks."""
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        return self._world * workers, worker * self._world + self._rank
