"""A conformance suite for stores. Subclass ``StoreSuite`` in a pytest module and give it a ``store``:

class TestMyStore(StoreSuite):
    @pytest.fixture
    def store(self):
        return MyStore(...)  # empty, and used by one test only
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

import numpy as np
import pytest

from hsx_dist.errors import AlreadyExists, NotFound, StoreError
from hsx_dist.store import Buffer, ObjectInfo, Store
from hsx_dist.store.base import Conditional, replaces_conditionally

_BAD_NAMES = ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\x00b", pytest.param("a\ud800", id="surrogate")]
_ODD_NAMES = ["a b", "%20", "a+b", "key~0123", "ä/ß.bin", "a=b/c&d", "x.y.z", "a%2Fb", "quo'te", "日本"]


class StoreSuite:
    """Tests that every ``Store`` must pass.

    ``racers``: number of threads that race for one name. ``has_conditional_deletes``, ``has_conditional_puts``: whether
    the store has these methods of ``Conditional``.
    """

    racers = 8
    has_conditional_deletes = True
    has_conditional_puts = True

    @pytest.fixture
    def store(self) -> Store:
        """An empty store that only one test uses."""
        raise NotImplementedError("expected a fixture `store` in the subclass, got none. Override it")

    # -- put and get ---------------------------------------------------------------------------------------------

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert isinstance(store.url, str)
        assert store.url

    def test_put_then_get(self, store: Store) -> None:
        store.put("data/a.bin", [b"hello"])
        assert store.get("data/a.bin") == b"hello"

    @pytest.mark.parametrize(
        "buffers",
        [
            [],
            [b""],
            [b"", b"ab", b""],
            [b"ab", bytearray(b"cd"), memoryview(b"ef")],
            [np.arange(7, dtype=np.uint16), np.zeros((3, 5), np.uint32), np.arange(3).data],
            [np.empty((0, 4), np.uint16), b"x"],
            [bytes([i % 256]) for i in range(1500)],
        ],
    )
    def test_buffers_are_concatenated_in_order(self, store: Store, buffers: list[Buffer]) -> None:
        expected = b"".join(b.tobytes() if isinstance(b, (np.ndarray, memoryview)) else bytes(b) for b in buffers)
        store.put("joined", buffers)
        assert store.get("joined") == expected
        assert store.head("joined").size == len(expected)

    def test_strided_buffer_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            store.put("strided", [np.arange(10)[::2]])
        with pytest.raises(NotFound):
            store.head("strided")

    def test_put_replaces(self, store: Store) -> None:
        store.put("a", [b"a longer one"])
        store.put("a", [b"short"])
        assert store.get("a") == b"short"
        assert store.head("a") == ObjectInfo("a", 5)

    def test_large_object(self, store: Store) -> None:
        """The object is larger than the pieces that back ends send. Its buffers cross every boundary of pieces."""
        rng = np.random.default_rng(0)
        buffers: list[Buffer] = [rng.integers(0, 256, n, np.uint8) for n in (1, 17 << 20, 3, (23 << 20) + 5, 11)]
        store.put("large", buffers)
        whole = b"".join(np.asarray(b).tobytes() for b in buffers)
        assert store.head("large").size == len(whole)
        assert store.get("large") == whole

    def test_get_with_a_limit_returns_only_the_first_bytes(self, store: Store) -> None:
        store.put("a/b", [b"0123456789"])
        store.put("empty", [b""])
        for most in (1, 9, 10, 11, 1 << 20, 1 << 33):
            assert store.get("a/b", most) == b"0123456789"[:most], most
            assert store.get("empty", most) == b"", most
            for missing in ("a/c", "a"):
                with pytest.raises(NotFound):
                    store.get(missing, most)

    @pytest.mark.parametrize("name", _ODD_NAMES)
    def test_names_are_kept_as_they_are(self, store: Store, name: str) -> None:
        store.put(name, [name.encode()])
        assert store.get(name) == name.encode()
        assert store.head(name).name == name
        assert [i.name for i in store.list()] == [name]
        assert [bytes(v) for v in store.get_ranges(name, [(0, 1)])] == [name.encode()[:1]]
        store.delete(name)
        assert list(store.list()) == []

    @pytest.mark.parametrize("name", _BAD_NAMES)
    def test_names_that_leave_the_store_are_refused(self, store: Store, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.put(name, [b"x"]),
            lambda: store.put_if_absent(name, b"x"),
            lambda: store.get(name),
            lambda: store.get_ranges(name, [(0, 1)]),
            lambda: store.head(name),
            lambda: store.delete(name),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="expected a relative object name"):
                call()

    # -- put if absent -------------------------------------------------------------------------------------------

    def test_put_if_absent_creates_once(self, store: Store) -> None:
        store.put_if_absent("attempts/1", b"mine")
        with pytest.raises(AlreadyExists, match="attempts/1"):
            store.put_if_absent("attempts/1", b"yours")
        with pytest.raises(AlreadyExists):
            store.put_if_absent("attempts/1", b"mine")
        assert store.get("attempts/1") == b"mine"

    def test_put_if_absent_concatenates_buffers(self, store: Store) -> None:
        store.put_if_absent("a", [b"ab", b"", np.arange(3, dtype=np.uint16), memoryview(b"cd")])
        assert store.get("a") == b"ab" + np.arange(3, dtype=np.uint16).tobytes() + b"cd"
        store.put_if_absent("b", [])
        assert store.get("b") == b""

    def test_put_if_absent_fails_after_put(self, store: Store) -> None:
        store.put("a", [b"1"])
        with pytest.raises(AlreadyExists):
            store.put_if_absent("a", b"2")
        store.delete("a")
        store.put_if_absent("a", b"2")
        assert store.get("a") == b"2"

    def test_exactly_one_of_racing_creators_succeeds(self, store: Store) -> None:
        start = threading.Barrier(self.racers)

        def create(i: int) -> int | None:
            start.wait()
            try:
                store.put_if_absent("race", f"racer {i}".encode())
            except AlreadyExists:
                return None
            return i

        with ThreadPoolExecutor(self.racers) as pool:
            winners = [i for i in pool.map(create, range(self.racers)) if i is not None]
        assert len(winners) == 1
        assert store.get("race") == f"racer {winners[0]}".encode()

    # -- ranges --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "ranges",
        [
            [],
            [(0, 0)],
            [(0, 10)],
            [(5, 6), (0, 1)],
            [(0, 300_000), (300_000, 300_001)],
            [(10, 20), (15, 30), (10, 20), (12, 13)],
            [(0, 10), (100_000, 100_010), (299_990, 300_001), (7, 7)],
        ],
    )
    def test_ranges(self, store: Store, ranges: list[tuple[int, int]]) -> None:
        data = np.random.default_rng(1).integers(0, 256, 300_001, np.uint8).tobytes()
        store.put("ranged", [data])
        got = store.get_ranges("ranged", ranges)
        assert [bytes(v) for v in got] == [data[a:b] for a, b in ranges]
        assert all(isinstance(v, memoryview) for v in got)

    @pytest.mark.parametrize("bad", [(-1, 3), (3, 2), (0, 11), (10, 11), (50, 60), (0, 2**62)])
    def test_ranges_beyond_the_object_are_refused(self, store: Store, bad: tuple[int, int]) -> None:
        store.put("ten", [b"0123456789"])
        with pytest.raises(ValueError, match="ten"):
            store.get_ranges("ten", [(0, 1), bad])
        with pytest.raises(ValueError, match="ten"):
            store.get_ranges("ten", [bad])

    # -- missing objects -----------------------------------------------------------------------------------------

    def test_errors_of_missing_objects_name_the_object_and_the_store(self, store: Store) -> None:
        store.put("there/it/is", [b"x"])
        calls: list[Callable[[str], object]] = [
            store.get,
            store.head,
            lambda name: store.get_ranges(name, [(0, 1)]),
            lambda name: store.get_ranges(name, [(0, 1), (10_000_000, 10_000_001)]),
        ]
        for name in ("missing", "there/missing", "there/it/is/not", "there/it"):
            for call in calls:
                with pytest.raises(NotFound) as told:
                    call(name)
                assert name in str(told.value)
                assert store.url in str(told.value)

    def test_errors_pickle(self, store: Store) -> None:
        with pytest.raises(StoreError) as told:
            store.get("missing")
        again = pickle.loads(pickle.dumps(told.value))  # noqa: S301
        assert type(again) is type(told.value)
        assert str(again) == str(told.value)

    def test_delete(self, store: Store) -> None:
        store.put("a/b", [b"1"])
        store.put("a/c", [b"2"])
        store.delete("a/b")
        store.delete("a/b")
        store.delete("never/was")
        with pytest.raises(NotFound):
            store.head("a/b")
        assert store.get("a/c") == b"2"

    def test_a_conditional_delete_keeps_a_newer_version(self, store: Store) -> None:
        """A store without conditional deletes has no such method, or raises ``StoreError``."""
        conditional = cast(Conditional, store)
        store.put("sub/a", [b"old"])
        if not isinstance(store, Conditional) or not self.has_conditional_deletes:
            with pytest.raises((AttributeError, StoreError), match=r"conditional deletes|has no attribute"):
                conditional.version("sub/a")
            return
        old = conditional.version("sub/a")
        store.put("sub/a", [b"new"])
        assert conditional.delete_version("sub/a", old) is False
        assert store.get("sub/a") == b"new"
        new = conditional.version("sub/a")
        assert new != old
        assert conditional.delete_version("sub/a", new) is True
        assert conditional.delete_version("sub/a", new) is False
        for missing in ("sub/a", "never/was"):
            with pytest.raises(NotFound):
                conditional.version(missing)
        assert list(store.list()) == []

    def test_a_conditional_put_keeps_a_newer_version(self, store: Store) -> None:
        conditional = cast(Conditional, store)
        store.put("sub/a", [b"old"])
        if not isinstance(store, Conditional) or not self.has_conditional_puts:
            with suppress(StoreError):
                assert not replaces_conditionally(store)
            assert [info.name for info in store.list()] == ["sub/a"]
            return
        assert replaces_conditionally(store)
        old = conditional.version("sub/a")
        store.put("sub/a", [b"new"])
        assert conditional.put_version("sub/a", [b"x"], old) is False
        assert store.get("sub/a") == b"new"
        new = conditional.version("sub/a")
        assert conditional.put_version("sub/a", [b"new", b"er"], new) is True
        assert store.get("sub/a") == b"newer"
        assert conditional.put_version("sub/a", [b"x"], new) is False
        store.delete("sub/a")
        assert conditional.put_version("sub/a", [b"x"], new) is False
        assert list(store.list()) == []

    # -- listing -------------------------------------------------------------------------------------------------

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert list(store.list()) == []
        assert list(store.list("data/")) == []

    def test_list_is_recursive_and_sorted_by_the_whole_name(self, store: Store) -> None:
        names = ["a-b", "a/b/c", "a/b-c", "a.b", "b", "a/c", "aa/x", "a0", "Z/z", "m/0002/w/000001", "m/0001/w/000010"]
        for name in names:
            store.put(name, [name.encode()])
        assert list(store.list()) == [ObjectInfo(n, len(n)) for n in sorted(names)]

    def test_list_by_prefix_and_after(self, store: Store) -> None:
        names = [
            "a-b",
            "a/b/c",
            "a/bb",
            "ab",
            "b",
            "m/0001/v/1",
            "m/0001/w/1",
            "m/0001/w/2",
            "m/0001/w/3",
            "m/0002/v/1",
        ]
        for name in names:
            store.put(name, [b"."])
        for prefix in ("a", "a/", "a/b", "a-", "m/0001/", "m/0", "x", "a/b/c", "a/b/c/"):
            for after in (None, "a", "a/b", "a/b/c", "a/z", "m/0001/w/2", "~"):
                expected = [n for n in sorted(names) if n.startswith(prefix) and (after is None or n > after)]
                assert [i.name for i in store.list(prefix, after)] == expected, (prefix, after)

    def test_list_is_never_stale(self, store: Store) -> None:
        seen = []
        for i in range(5):
            store.put(f"d/{i}", [b"x" * i])
            seen.append([(o.name, o.size) for o in store.list("d/")])
        store.put("d/0", [b"longer"])
        store.delete("d/4")
        assert seen == [[(f"d/{j}", j) for j in range(i + 1)] for i in range(5)]
        assert [(o.name, o.size) for o in store.list("d/")] == [("d/0", 6), ("d/1", 1), ("d/2", 2), ("d/3", 3)]

    # -- several at once -----------------------------------------------------------------------------------------

    def test_concurrent_use(self, store: Store) -> None:
        def work(i: int) -> bool:
            data = bytes([i]) * (10_000 + i)
            store.put(f"c/{i}", [data[:100], data[100:]])
            ranges = store.get_ranges(f"c/{i}", [(0, 5), (9_000, 9_005)])
            return store.get(f"c/{i}") == data and [bytes(r) for r in ranges] == [bytes([i]) * 5] * 2

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(32)))
        assert len(list(store.list("c/"))) == 32

    def test_an_object_is_replaced_whole(self, store: Store) -> None:
        """A reader gets the old bytes or the new bytes, never a mixture."""
        old, new = b"o" * 200_000, b"n" * 200_000
        store.put("whole", [old])
        done = threading.Event()
        torn: list[bytes] = []

        def read() -> None:
            while not done.is_set():
                got = store.get("whole")
                if got not in (old, new):
                    torn.append(got)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for i in range(20):
                store.put("whole", [(new, old)[i % 2][:70_000], (new, old)[i % 2][70_000:]])
        finally:
            done.set()
            reader.join()
        assert not torn
