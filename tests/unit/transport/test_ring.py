from __future__ import annotations

import random

import pytest

from hsx_dist.transport.ring import ALIGN, Ring


def test_allocations_are_aligned_and_do_not_overlap():
    ring = Ring(1024)
    offsets = [ring.allocate(100) for _ in range(8)]
    assert offsets == [i * 128 for i in range(8)]
    assert ring.allocate(1) is None


def test_allocations_larger_than_the_ring_raise():
    with pytest.raises(ValueError, match="expected at most 1024 bytes"):
        Ring(1024).allocate(1025)


def test_space_is_freed_in_order_of_allocation():
    ring = Ring(256)
    a, b = ring.allocate(128), ring.allocate(128)
    assert a is not None
    assert b is not None
    ring.free(b)
    assert ring.allocate(128) is None  # a is older, and still allocated
    ring.free(a)
    assert ring.allocate(256) == 0


def test_a_wrapped_ring_never_allocates_bytes_in_use():
    rng = random.Random(7)
    ring = Ring(64 * ALIGN)
    live: dict[int, int] = {}
    handed_out = refused = 0
    for _ in range(20_000):
        if live and rng.random() < 0.5:
            # Mostly the oldest first, as pages are shipped, but not always.
            offset = next(iter(live)) if rng.random() < 0.8 else rng.choice(list(live))
            ring.free(offset)
            del live[offset]
        else:
            size = rng.randint(1, 20 * ALIGN)
            offset = ring.allocate(size)
            if offset is None:
                refused += 1
                continue
            handed_out += 1
            end = offset + size
            assert end <= ring.capacity
            assert all(end <= o or o + s <= offset for o, s in live.items())
            live[offset] = size
    assert handed_out > 1000
    assert refused > 1000
    for offset in live:
        ring.free(offset)
    assert ring.used_bytes == 0
    assert ring.allocate(ring.capacity) == 0


def test_claims_stay_within_their_limit_and_one_larger_than_it_is_claimed_alone():
    ring = Ring(1024, most_claimed=100)
    assert ring.claim(60)
    assert ring.claim(40)
    assert not ring.claim(1)
    ring.unclaim(60)
    assert not ring.claim(101)
    ring.unclaim(40)
    assert ring.claim(101)
    assert not ring.claim(0)
    assert ring.allocate(1024) == 0  # claims do not limit the ring: a sample that was admitted continues
    ring.unclaim(101)
    assert ring.claimed_bytes == 0
