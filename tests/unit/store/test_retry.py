from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.errors import AlreadyExists, Denied, NotFound, Unavailable
from hsx_dist.store import Buffer, ObjectInfo, RetryPolicy, RetryStore
from hsx_dist.store.local import LocalStore
from tests.harness.traced_memory import trace_memory


class Flaky:
    """A store in a dict. Each call first does the next step of ``plan``."""

    url = "flaky://"

    def __init__(self, *plan: Exception | str | None):
        self.plan = iter(plan)
        self.objects: dict[str, bytes] = {}
        self.calls = 0

    def _next(self) -> bool:
        """Whether the call succeeds although its answer is lost."""
        self.calls += 1
        step = next(self.plan, None)
        if isinstance(step, Exception):
            raise step
        return step == "lose the answer"

    def put(self, name: str, buffers: Sequence[Buffer]) -> None:
        self._next()
        self.objects[name] = b"".join(bytes(b) for b in buffers)

    def put_if_absent(self, name: str, data: bytes) -> None:
        lost = self._next()
        if name in self.objects:
            raise AlreadyExists(name)
        self.objects[name] = data
        if lost:
            raise Unavailable("the answer was lost")

    def get(self, name: str, most: int | None = None) -> bytes:
        if name not in self.objects:
            raise NotFound(name)
        return self.objects[name][:most]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        self._next()
        return [memoryview(self.objects[name])[a:b] for a, b in ranges]

    def head(self, name: str) -> ObjectInfo:
        self._next()
        return ObjectInfo(name, len(self.get(name)))

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        for name in sorted(self.objects):
            if name.startswith(prefix) and (after is None or name > after):
                self._next()
                yield ObjectInfo(name, len(self.objects[name]))

    def delete(self, name: str) -> None:
        self._next()
        self.objects.pop(name, None)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def _retrying(inner: Flaky, seconds: float = 100.0) -> tuple[RetryStore, Clock]:
    clock = Clock()
    return RetryStore(inner, RetryPolicy(seconds=seconds), sleep=clock.sleep, clock=lambda: clock.now), clock


def test_temporary_errors_are_retried() -> None:
    inner = Flaky(Unavailable("busy"), Unavailable("busy"), None)
    store, clock = _retrying(inner)
    store.put("a", [b"1"])
    assert inner.objects == {"a": b"1"}
    assert len(clock.pauses) == 2


@pytest.mark.parametrize("refusal", [Denied("no"), NotFound("no"), ValueError("no")])
def test_a_refusal_is_not_retried(refusal: Exception) -> None:
    inner = Flaky(refusal)
    store, clock = _retrying(inner)
    with pytest.raises(type(refusal), match=r"^no$"):
        store.head("a")
    assert (inner.calls, clock.pauses) == (1, [])


def test_retries_end_at_the_time_limit_and_the_error_counts_them() -> None:
    inner = Flaky(*[Unavailable("busy")] * 10_000)
    store, clock = _retrying(inner, 60)
    with pytest.raises(Unavailable, match=r"^busy \(tried \d+ times in \d+ s\)$"):
        store.delete("a")
    assert 30 < clock.now < 60
    assert max(clock.pauses) <= RetryPolicy.__dataclass_fields__["longest_pause"].default


def test_zero_retry_seconds_means_one_try() -> None:
    inner = Flaky(Unavailable("busy"))
    store, clock = _retrying(inner, 0)
    with pytest.raises(Unavailable, match=r"^busy$"):
        store.get_ranges("a", [])
    assert (inner.calls, clock.pauses) == (1, [])


def test_pauses_grow_and_are_jittered() -> None:
    """Also in processes with the same seed: vLLM seeds each replica's."""
    random.seed(0)
    _, a = _pauses(8)
    random.seed(0)
    _, b = _pauses(8)
    assert a != b
    assert all(p <= 0.1 * 2**i for i, p in enumerate(a))


def _pauses(n: int) -> tuple[RetryStore, list[float]]:
    store, clock = _retrying(Flaky(*[Unavailable("busy")] * n))
    store.put("a", [b""])
    return store, clock.pauses


def test_a_lost_answer_to_a_create_is_no_conflict() -> None:
    store, _ = _retrying(Flaky("lose the answer"))
    store.put_if_absent("a", b"mine")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("a", b"mine")


def test_a_create_that_another_won_stays_a_conflict() -> None:
    inner = Flaky(Unavailable("busy"))
    inner.objects["a"] = b"theirs"
    store, _ = _retrying(inner)
    with pytest.raises(AlreadyExists):
        store.put_if_absent("a", b"mine")


@pytest.mark.traced
@pytest.mark.parametrize("theirs", ["same", "another byte", "shorter", "longer"])
def test_a_found_object_is_compared_in_pieces(tmp_path: Path, theirs: str) -> None:
    """A sample may have gigabytes, and several threads may lose their answers at once."""
    size = 40 << 20
    mine = [np.ones(size // 2, np.uint8), memoryview(b"\1" * 3), np.ones((2, size // 4), np.uint8)]
    other = np.ones((2, size // 4), np.uint8)
    other[1, -1] = 2
    found = {"same": mine, "another byte": [*mine[:2], other], "shorter": mine[:2], "longer": [*mine, b"x"]}[theirs]

    class Lossy(LocalStore):
        lost = False

        def put_if_absent(self, name: str, data: bytes | Sequence[Buffer]) -> None:
            if self.lost:
                return super().put_if_absent(name, data)
            self.lost = True
            self.put(name, found)
            raise Unavailable("the answer was lost")

    store = RetryStore(Lossy(str(tmp_path)), sleep=Clock().sleep)
    trace_memory()
    with nullcontext() if theirs == "same" else pytest.raises(AlreadyExists):
        store.put_if_absent("a", mine)
    assert tracemalloc.get_traced_memory()[1] < size // 2


def test_an_interrupted_listing_is_continued() -> None:
    inner = Flaky(None, None, Unavailable("busy"), None, Unavailable("busy"))
    inner.objects = {f"{i}": b"" for i in range(6)}
    store, clock = _retrying(inner)
    assert [o.name for o in store.list(after="0")] == ["1", "2", "3", "4", "5"]
    assert len(clock.pauses) == 2


@pytest.mark.parametrize("moment", [0, 1])
def test_unfinished_files_are_listed_again_if_the_mount_was_gone(tmp_path: Path, moment: int) -> None:
    """The mount is gone before the listing, or in its middle."""
    run, away = tmp_path / "run", tmp_path / "away"
    for name in ("a", "b"):
        LocalStore(run).put(f"{name}/x", [b"1"])
        (run / name / ".hsx-unfinished-1").touch()
    inner = LocalStore(run)
    if moment == 0:
        run.rename(away)

    def back(_: float) -> None:
        if away.exists():
            away.rename(run)

    class Leaving(LocalStore):
        def unfinished(self, *more: Any) -> Iterator[ObjectInfo]:
            found = inner.unfinished(*more)
            if moment == 1 and not gone:
                yield next(found)
                gone.append(True)
                run.rename(away)
            yield from found

    gone: list[bool] = []
    store = RetryStore(Leaving(run), RetryPolicy(seconds=100.0), sleep=back)
    assert [o.name for o in store.unfinished()] == ["a/.hsx-unfinished-1", "b/.hsx-unfinished-1"]
