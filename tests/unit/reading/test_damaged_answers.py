"""One damaged answer of the store: the reader fetches the bytes again, and nothing keeps the damaged ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hsx_dist import HiddenStatesDataset
from hsx_dist.errors import FormatError
from hsx_dist.format.container import Part
from hsx_dist.reading import Run, open_run, verify_run
from hsx_dist.reading.cache import CachedStore
from hsx_dist.store import Store, open_store
from hsx_dist.testing.faulty_stores import WrappedStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run

SAMPLES = [random_sample(f"a{i}", 40, seed=i) for i in range(6)]
#: What the damaged answer holds.
KINDS = ["header", "token ids", "chunk"]


class Flipping(WrappedStore):
    """Flips one bit in the first ``times`` answers with parts' bytes of one kind."""

    def __init__(self, inner: Store, kind: str, times: int = 1):
        super().__init__(inner)
        self.kind, self.left = kind, times

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        views = super().get_ranges(name, ranges)
        opens = ranges[0][0] == 0
        if self.left and "/data/" in f"/{name}" and opens == (self.kind != "chunk"):
            self.left -= 1
            data = bytearray(views[-1])
            self.flip(data)
            views[-1] = memoryview(bytes(data))
        return views

    def flip(self, data: bytearray) -> None:
        data[{"header": len(data) // 4, "token ids": -1, "chunk": len(data) // 2}[self.kind]] ^= 1


@pytest.fixture
def url(tmp_path: Path) -> str:
    store_run(open_store(f"{tmp_path}/run"), SAMPLES, per_part=3)
    return f"{tmp_path}/run"


def read_through(run: Run, store: Store, cache: Path | None) -> Run:
    cached = store if cache is None else CachedStore(store, cache, 1 << 30, run.id)
    return run.with_store(lambda _: cached)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_damaged_answer_skips_no_sample(url: str, tmp_path: Path, kind: str, cached: bool) -> None:
    run, cache = open_run(url), tmp_path / "cache" if cached else None
    flipping = Flipping(run.store, kind)
    bad = read_through(run, flipping, cache)
    for _ in range(3):
        dataset = HiddenStatesDataset(bad, on_error="skip", threads=1)
        assert ([item["key"] for item in dataset], dataset.skipped) == ([s.key for s in SAMPLES], 0)
    assert flipping.left == 0


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_both_answers_raises_and_a_later_read_is_right(
    url: str, tmp_path: Path, kind: str, cached: bool
) -> None:
    run, cache = open_run(url), tmp_path / "cache" if cached else None
    bad = read_through(run, Flipping(run.store, kind, times=2), cache)
    with pytest.raises(FormatError):
        bad["a2"].load_carrier()
    bad.refresh()  # forgets that the part's header was damaged
    others = [bad] if cache is None else [bad, read_through(open_run(url), run.store, cache)]
    for other in others:
        states, ids = other["a2"].load_carrier()
        assert np.array_equal(states, SAMPLES[2].states)
        assert ids.tolist() == SAMPLES[2].token_ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_cache_entry_is_replaced(url: str, tmp_path: Path, kind: str) -> None:
    """Earlier versions stored answers that were damaged on the way, with a valid checksum of the entry."""
    run, cache = open_run(url), tmp_path / "cache"
    with pytest.raises(FormatError):
        read_through(run, Flipping(run.store, kind, times=2), cache)["a2"].load_carrier()
    asked = Flipping(run.store, kind, times=0)
    read_through(open_run(url), asked, cache)["a2"].load_carrier()
    again = Flipping(run.store, kind, times=9)  # damages all answers that are not in the cache
    read_through(open_run(url), again, cache)["a2"].load_carrier()
    assert again.left == 9


def test_a_scan_and_small_arrays_survive_one_damaged_answer() -> None:
    store = MemoryStore()
    run = Run(store_run(store, SAMPLES[:1], attached={"note": np.arange(4)}) and store)
    name = run.index.parts[0].part or ""
    for work in (
        lambda part: [x.copy() for _, x in part.scan(0)],
        lambda part: part.attached(0)["note"],
        lambda part: part.read(0),
        lambda part: part.load(0).states,
    ):
        part = Part.open(Flipping(run.store, "chunk"), name)
        flipped, sound = work(part), work(Part.open(run.store, name))
        assert all(np.array_equal(a, b) for a, b in zip(flipped, sound, strict=True))
        assert part._store.left == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", [0.02, 0.5, 0.99])
def test_verify_names_a_part_only_if_two_reads_fail(at: float) -> None:
    root = MemoryStore()
    store_run(root, SAMPLES[:3], per_part=3)

    class FlippingBlocks(Flipping):
        def flip(self, data: bytearray) -> None:
            data[int(len(data) * at)] ^= 1

    once = verify_run(FlippingBlocks(root, "block"))
    assert (once.problems, once.parts, once.samples) == ([], 1, 3)
    twice = verify_run(FlippingBlocks(root, "block", times=2))
    assert {problem.part for problem in twice.problems} == {"data/part-0001-w-000001.safetensors"}
