"""The cache on a local disk: equal bytes, a size limit, damage, and sharing between processes."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from hsx_dist import HiddenStatesDataset
from hsx_dist.format.checksum import crc32c
from hsx_dist.reading.cache import CachedStore
from hsx_dist.store import open_store
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run
from tests.harness.users import as_root

RANGES = [(i * 1000, i * 1000 + 1000) for i in range(64)]


def filled() -> MemoryStore:
    store = MemoryStore()
    store.put("a", [bytes(i % 251 for i in range(64_000))])
    return store


def test_fetched_ranges_are_not_fetched_again(tmp_path: Path) -> None:
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


def test_the_cache_stays_below_its_size(tmp_path: Path) -> None:
    inner = filled()
    store = CachedStore(inner, tmp_path / "c", 10_000)
    for r in RANGES:
        assert bytes(store.get_ranges("a", [r])[0]) == inner.objects["a"][r[0] : r[1]]
        # It checks after each 64th of the limit: here before every range.
        assert sum(p.stat().st_size for p in (tmp_path / "c").glob("??/*")) <= 10_000
    inner.reset()
    store.get_ranges("a", RANGES[-4:])
    assert inner.bytes_read == 0


def test_no_neighbour_keeps_the_cache_above_its_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    neighbour = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(neighbour, fcntl.LOCK_EX)
    store = CachedStore(filled(), tmp_path, 10_000)
    store.get_ranges("a", RANGES)
    os.close(neighbour)
    assert 8_000 <= sum(p.stat().st_size for p in tmp_path.glob("??/*")) <= 10_000


def test_no_range_is_added_if_files_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    inner = filled()
    store = CachedStore(inner, tmp_path, 10_000)
    with monkeypatch.context() as patch:
        patch.setattr("os.unlink", refused)
        for r in RANGES:
            assert bytes(store.get_ranges("a", [r])[0]) == inner.objects["a"][r[0] : r[1]]
    assert sum(p.stat().st_size for p in tmp_path.glob("??/*")) <= 10_000
    assert caplog.text.count("no range is added, because files cannot be removed") == 1
    monkeypatch.setattr("hsx_dist.reading.cache._chance.random", lambda: 0)  # a check is due
    store.get_ranges("a", RANGES[-1:])
    inner.reset()
    store.get_ranges("a", RANGES[-1:])
    assert inner.bytes_read == 0


def test_a_range_above_the_limit_removes_no_others(tmp_path: Path) -> None:
    inner = filled()
    store = CachedStore(inner, tmp_path, 10_000)
    store.get_ranges("a", [RANGES[0], (0, 20_000)])
    inner.reset()
    store.get_ranges("a", RANGES[:1])
    assert inner.bytes_read == 0


def test_files_of_other_programs_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    mine = tmp_path / "ab" / "notes.txt"
    mine.write_bytes(bytes(20_000))
    os.utime(mine, (0, 0))
    store = CachedStore(filled(), tmp_path, 10_000)
    for r in RANGES:
        store.get_ranges("a", [r])
    assert mine.exists()


def _plant(folder: Path, store: CachedStore, kind: str, victim: Path) -> None:
    """Files of another user in the place of the cache's files for ``RANGES[0]``."""
    below, name = store._place("a", RANGES[0])
    if kind == "folder link":
        (folder / below).symlink_to(victim)
        return
    (folder / below).mkdir()
    path = folder / below / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(victim / "forged")
    else:
        path.write_bytes((victim / "forged").read_bytes())
        os.chown(path if kind == "file" else path.parent, 65534, 65534)


@as_root
@pytest.mark.parametrize("kind", ["fifo", "link", "folder link", "file", "folder"])
def test_files_of_another_user_are_neither_read_nor_changed(tmp_path: Path, kind: str) -> None:
    inner, folder, victim = filled(), tmp_path / "c", tmp_path / "victim"
    victim.mkdir()
    forged = b"forged" * 100
    for name in ("forged", CachedStore(inner, folder, 1)._place("a", RANGES[0])[1]):
        (victim / name).write_bytes(forged + crc32c(memoryview(forged)).to_bytes(4, "little"))
    before = {p.name: p.read_bytes() for p in victim.iterdir()}
    store = CachedStore(inner, folder, 1)  # so small that it removes each new entry
    _plant(folder, store, kind, victim)
    for _ in range(2):
        assert bytes(store.get_ranges("a", RANGES[:1])[0]) == inner.objects["a"][:1000]
    store._evict(0)
    assert {p.name: p.read_bytes() for p in victim.iterdir()} == before


def test_cache_files_are_readable_by_this_user_alone(tmp_path: Path) -> None:
    store = CachedStore(filled(), tmp_path / "c", 1 << 20)
    store.get_ranges("a", RANGES[:1])
    store._evict(0)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "c").rglob("*") if p.is_file()} == {0o600}


def read_all(url: str, cache: str, seed: int) -> list[str]:
    dataset = HiddenStatesDataset(url, shuffle=True, seed=seed, cache_dir=cache, cache_bytes=30_000, framework="numpy")
    return sorted(i["key"] for i in dataset)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn"])
def test_processes_share_the_cache(tmp_path: Path, method: str) -> None:
    url, cache = str(tmp_path / "run"), str(tmp_path / "cache")
    samples = [random_sample(f"s{i:02d}", 30, seed=i) for i in range(30)]
    store_run(open_store(url), samples)
    with ProcessPoolExecutor(3, multiprocessing.get_context(method)) as pool:
        futures = [pool.submit(read_all, url, cache, seed) for seed in range(3)]
        assert [f.result() for f in futures] == [[s.key for s in samples]] * 3
