from __future__ import annotations

import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from hsx_dist.memory.blocks import BlockPool

MIB = 1 << 20


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    pool = BlockPool(64 * MIB)
    for x in [pool.take(MIB) for _ in range(20)]:
        x[:] = 1
    del x
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for x in [pool.take(MIB) for _ in range(20)]:
        x[:] = 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 20 * 256 / 4, "expected no new page faults"
    assert pool.nbytes == 20 * MIB


@pytest.mark.parametrize("view", [lambda x: x[10:20], lambda x: memoryview(x)[10:20], lambda x: x.view(np.uint16)])
def test_a_view_keeps_its_block(view: object) -> None:
    pool = BlockPool(8 * MIB)
    x = pool.take(MIB)
    x[:] = 7
    kept = view(x)  # type: ignore[operator]
    before = bytes(kept)
    del x
    for _ in range(3):
        pool.take(MIB)[:] = 0
    assert bytes(kept) == before


def test_free_blocks_stay_within_the_limit() -> None:
    pool = BlockPool(8 * MIB)
    rng = np.random.default_rng(0)
    for _ in range(50):
        held = [pool.take(int(n)) for n in rng.integers(1, 3 * MIB, 4)]
        assert sum(x.nbytes for x in held) <= pool.nbytes + 4 * (64 << 10)
        del held
        assert pool.nbytes <= 8 * MIB


def test_blocks_in_use_may_exceed_the_limit_and_are_not_kept() -> None:
    pool = BlockPool(2 * MIB)
    held = [pool.take(MIB) for _ in range(6)]
    assert pool.nbytes == 6 * MIB
    del held
    assert pool.nbytes <= 2 * MIB


def test_released_blocks_are_reused_before_blocks_are_dropped() -> None:
    pool = BlockPool(2 * MIB)
    held = [pool.take(MIB) for _ in range(3)]
    for i in range(3):
        held[i][:] = 7
    for _ in range(10):
        held.pop(0)
        held.append(pool.take(MIB))
        assert held[-1][0] == 7, "expected reused memory, got new memory, which is zero"


def test_a_free_block_is_taken_only_where_it_fits() -> None:
    pool = BlockPool(8 * MIB)
    for n in (4 * MIB, MIB):
        pool.take(n)
    pool.take(MIB - 5)
    assert pool.nbytes == 5 * MIB
    pool.take(2 * MIB)  # not the block of 4 MiB
    assert pool.nbytes == 7 * MIB


def test_many_small_arrays_are_no_mappings() -> None:
    pool = BlockPool(64 * MIB)
    before = Path("/proc/self/maps").read_text().count("\n")
    held = [pool.take(1000) for _ in range(5000)]
    assert Path("/proc/self/maps").read_text().count("\n") - before < 500
    assert pool.nbytes == 0
    assert len(held) == 5000


def test_threads_never_share_a_block() -> None:
    pool = BlockPool(16 * MIB)
    wrong: list[int] = []

    def work(me: int) -> None:
        for i in range(300):
            x = pool.take(100_000 + 7000 * (i % 5))
            x[:] = me
            if not (x == me).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
