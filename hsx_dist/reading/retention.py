"""``HiddenStatesDataset.retention``: remove a part after every consumer has used all samples in it.

This includes samples that another part also holds, because a reader may use either copy.

A consumer may have several ranks. The hash of a key assigns each sample to a rank (``rank_of``). A rank that has used
its samples of a part stores the mark ``consumed/PART/CONSUMER.RANKofWORLD.json``. The receipts stay: a resumed
extraction sees the rows as done, and later readers get ``SampleConsumed``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hsx_dist.errors import AlreadyExists, ConfigError, RunError
from hsx_dist.format.json_objects import list_of, or_null, text
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.manifest_reader import ManifestReader
from hsx_dist.format.place import Place
from hsx_dist.format.presence import unlisted
from hsx_dist.format.runs import all_receipts, is_complete
from hsx_dist.format.segments import SegmentTable
from hsx_dist.reading.missing import covers_every_copy, mark_of, marks_folder, removal_mark
from hsx_dist.reading.order import check_state, require_run
from hsx_dist.reading.select import key_hash
from hsx_dist.reading.world import world_of
from hsx_dist.store import ObjectInfo

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MARK = re.compile(r"([A-Za-z0-9_-]{1,64})\.([0-9]{1,9})of([0-9]{1,9})\.json")


def rank_of(key: str, world_size: int) -> int:
    """The rank that reads the sample, of ``world_size`` ranks, if the data set has ``follow``."""
    return key_hash(key, b"follow") % world_size


class Retention:
    """Records the samples that one rank of one consumer has used. Removes parts that all ``consumers`` have used.

    Call it from one process per rank: the training process, not the workers of a ``DataLoader``.
    ``HiddenStatesDataset.retention`` makes one with the data set's rank. No setting of a run forbids the removal.

    Args:
        place: the run, ``Run.place``.
        consumer: this consumer's name: letters, digits, ``_`` and ``-``.
        consumers: names of all consumers. Default: this consumer alone.
        rank, world_size: this rank of the consumer.

    Raises:
        ConfigError: a name or a rank is wrong, or ``consumers`` lacks ``consumer``.

    Example:
        >>> used = HiddenStatesDataset("runs/other", follow=True).retention("train")
        >>> key = open_run("runs/other").at(0).key
        >>> used.ack(key)
        >>> used.state_dict()["used"] == [key]
        True
    """

    def __init__(
        self,
        place: Place,
        consumer: str = "default",
        *,
        consumers: Sequence[str] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        rank, world_size = world_of(rank, world_size)
        self._place, self._store = place, place.store
        self._me = f"{consumer}.{rank}of{world_size}.json"
        self._consumers = frozenset(consumers or [consumer])
        bad = [name for name in {consumer, *self._consumers} if not _NAME.fullmatch(name)]
        if bad:
            raise ConfigError(f"consumers: expected names of letters, digits, '_' and '-', got {bad[0]!r}. Rename it")
        if consumer not in self._consumers:
            raise ConfigError(
                f"consumers: expected all consumers, also {consumer!r}, got {sorted(self._consumers)}. Add it"
            )
        self._rank, self._world = rank, world_size
        self._reader, self._manifest = ManifestReader(), Manifest()
        self._used: set[str] = set()
        self._marked: set[str] = set()
        self._due: set[str] = set()  # parts to check; a part stays here if the store fails
        # Two positions of each part, else one key at a time would take quadratic time.
        #: By part: all segments before this slot are of samples, which this rank needs no more.
        self._done: dict[str, int] = {}
        #: By part: this rank needs no sample before this slot. Segments before it may still become part of a sample.
        self._passed: dict[str, int] = {}
        self._going_on = False  # whether the store said so in this call: one request for all parts

    def ack(self, *keys: str) -> None:
        """Record that this rank of this consumer has used these samples and needs them no more.

        The run may store a copy of a used sample later, if rows were computed again. Call ``ack()`` without keys at the
        end, and while the extraction pauses, to mark the parts of such copies. A used sample whose part was lost stays
        used if it is computed again.

        Raises:
            RunError: a key was never a sample of the run, or belongs to another rank. Or the run was removed.
            StoreError: the store failed.
        """
        with self._place.explaining():
            self._ack(keys)

    def _ack(self, keys: Sequence[str]) -> None:
        if not keys or not all(map(self._known, keys)):
            self._find_parts()
        for key in keys:
            known = self._known(key)
            if not known or rank_of(key, self._world) != self._rank:
                raise RunError(
                    f"{self._store.url}: expected a sample of rank {self._rank} of {self._world} to acknowledge, "
                    f"got {key!r}, which {'another rank reads' if known else 'is not in the run'}. "
                    "Acknowledge only samples that this rank has read"
                )
            self._used.add(key)
            self._due |= self._manifest.parts_of(key)
        marked = len(self._marked)
        self._mark_due()
        if len(self._marked) > marked and self._manifest.parts.keys() <= self._marked:
            self._find_parts()  # later parts may have copies of used samples alone: no unknown key would lead to them
            self._mark_due()

    def _known(self, key: str) -> bool:
        """Whether the rank may have read the sample. Its part may be lost since."""
        return key in self._manifest.samples or bool(self._manifest.parts_of(key, lost=True))

    def _find_parts(self) -> None:
        self._refresh()
        self._due |= self._manifest.parts.keys() - self._marked  # parts without samples of this rank too

    def _mark_due(self) -> None:
        self._going_on = False
        for part in sorted(self._due):
            self._mark(part)
            self._due.discard(part)

    def state_dict(self) -> dict[str, Any]:
        """The used samples of parts that are not used up. Store the state with the trainer's checkpoint.

        The state omits a sample when all parts with copies are used up. If another copy is stored later, and this state
        is loaded, the part of that copy is kept.

        Example:
            >>> state = used.state_dict()
        """
        parts = ((key, self._manifest.parts_of(key)) for key in sorted(self._used))
        open_ = [key for key, found in parts if not found or not found <= self._marked]
        return {"run": self._place.id, "used": open_}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            RunMismatch: the state is from another run.
            ConfigError: the state is damaged.

        Example:
            >>> used.load_state_dict(state)
        """
        check_state(state, {"run": or_null(text), "used": list_of(text)}, required=("used",))
        require_run(state, self._place, lambda: self._has(state["used"]))
        self._used.update(state["used"])

    def _has(self, keys: Sequence[str]) -> bool:
        """Whether receipts name all ``keys``."""
        missing = set(keys)
        for receipt in all_receipts(self._store):
            missing.difference_update(receipt.table.keys())
        return not missing

    def _refresh(self) -> None:
        """Read new receipts. Reading all receipts for every new part would take longer and longer."""
        with self._place.reading():
            if (take := self._reader.fetch(self._store)) is not None:
                take()
        self._manifest = self._reader.manifest or self._manifest

    def _mark(self, part: str) -> None:
        if not self._used_up(part):
            return
        folder = marks_folder(part)
        with suppress(AlreadyExists):  # an earlier process of this rank stored it
            self._store.put_if_absent(folder + self._me, mark_of(part))
        marks = list(self._store.list(folder))
        if all(mark.name != folder + self._me for mark in marks):
            raise unlisted(self._store, folder + self._me, "other marks")
        if used_by_all(marks, self._consumers):
            # Store the mark before deleting the part: a missing part without the mark counts as lost.
            every_copy = all(covers_every_copy(part, mark) for mark in marks if mark.name != removal_mark(part))
            self._store.put(removal_mark(part), [mark_of(part, every_copy=every_copy)])
            self._store.delete(part)
        self._marked.add(part)

    def _used_up(self, part: str) -> bool:
        receipt = self._manifest.parts.get(part)
        if receipt is None:
            return False  # an attempt has declared it lost
        table, samples = receipt.table, self._manifest.samples
        done = self._done.get(part, 0)
        while done < len(table) and table.key(done) in samples and not self._needs(table.key(done)):
            done += 1
        self._done[part] = done
        if done == len(table):
            return True
        if not self._pass(part, table, max(done, self._passed.get(part, 0))):
            return False
        # The attempt that stored the other segments may still store the rest of their samples.
        if self._going_on or not is_complete(self._store):
            self._going_on = True
            return False
        self._refresh()  # the manifest may be older than the run's end
        return self._pass(part, table, done)

    def _pass(self, part: str, table: SegmentTable, slot: int) -> bool:
        """Whether this rank needs no sample from ``slot`` on."""
        while slot < len(table) and not self._needs(table.key(slot)):
            slot += 1
        self._passed[part] = slot
        return slot == len(table)

    def _needs(self, key: str) -> bool:
        return key not in self._used and key in self._manifest.samples and rank_of(key, self._world) == self._rank


def used_by_all(marks: Iterable[ObjectInfo], consumers: frozenset[str]) -> bool:
    """Whether every rank of every consumer stored its mark. ``marks``: the objects in a part's folder."""
    ranks: dict[str, dict[int, set[int]]] = {}
    for info in marks:
        found = _MARK.fullmatch(info.name.rpartition("/")[2])
        if found and int(found[2]) < int(found[3]):
            ranks.setdefault(found[1], {}).setdefault(int(found[3]), set()).add(int(found[2]))
    return all(any(len(done) == world for world, done in ranks.get(name, {}).items()) for name in consumers)
