"""The cache on a local disk: same bytes, a size limit, damage, and processes that share it."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from hsx_dist import HiddenStatesDataset
from hsx_dist.reading.cache import CachedStore
from hsx_dist.store import open_store
from hsx_dist.testing.runs import store_run
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore

RANGES = [(i * 1000, i * 1000 + 1000) for i in range(64)]


def filled() -> MemoryStore:
    store = MemoryStore()
    store.put("a", [bytes(i % 251 for i in range(64_000))])
    return store


def test_what_was_fetched_is_not_fetched_again(tmp_path: Path) -> None:
    inner = filled()
    store = CachedStore(inner, tmp_path / "c", 1 << 20)
    first = [bytes(v) for v in store.get_ranges("a", RANGES[:5])]
    inner.reset()
    again = [bytes(v) for v in CachedStore(inner, tmp_path / "c", 1 << 20).get_ranges("a", RANGES[3:7])]
    assert inner.bytes_read == 2000
    assert again[:2] == first[3:]
    assert again == [inner.objects["a"][a:b] for a, b in RANGES[3:7]]


def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    inner = filled()
    store = CachedStore(inner, tmp_path / "c", 1 << 20)
    store.get_ranges("a", RANGES[:1])
    [path] = (tmp_path / "c").glob("??/*")
    for damaged in (path.read_bytes()[:-1], b"", b"x" + path.read_bytes()[1:]):
        path.write_bytes(damaged)
        assert bytes(store.get_ranges("a", RANGES[:1])[0]) == inner.objects["a"][:1000]


def test_it_stays_below_its_size(tmp_path: Path) -> None:
    inner = filled()
    store = CachedStore(inner, tmp_path / "c", 10_000)
    for r in RANGES:
        assert bytes(store.get_ranges("a", [r])[0]) == inner.objects["a"][r[0] : r[1]]
        # It looks each time a 64th of the limit has come in: here at every range.
        assert sum(p.stat().st_size for p in (tmp_path / "c").glob("??/*")) <= 10_000
    inner.reset()
    store.get_ranges("a", RANGES[-4:])
    assert inner.bytes_read == 0


def read_all(url: str, cache: str, seed: int) -> list[str]:
    dataset = HiddenStatesDataset(url, shuffle=True, seed=seed, cache_dir=cache, cache_bytes=30_000, framework="numpy")
    return sorted(i["key"] for i in dataset)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn"])
def test_processes_share_it(tmp_path: Path, method: str) -> None:
    url, cache = str(tmp_path / "run"), str(tmp_path / "cache")
    samples = [random_sample(f"s{i:02d}", 30, seed=i) for i in range(30)]
    store_run(open_store(url), samples)
    with ProcessPoolExecutor(3, multiprocessing.get_context(method)) as pool:
        futures = [pool.submit(read_all, url, cache, seed) for seed in range(3)]
        assert [f.result() for f in futures] == [[s.key for s in samples]] * 3
