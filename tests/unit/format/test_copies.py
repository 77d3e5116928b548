"""Which of the segments of a key form its sample."""

from __future__ import annotations

import gc

from hsx_dist.format.copies import Copies, attempt_name, identity_of


def test_numbers_of_a_receipt_are_no_keys() -> None:
    """Python's hash of integers, and of tuples of them, has no seed: chosen ones collide. A dictionary of them takes
    quadratic time."""
    ends, identity = [7, 8, 9, 10], identity_of(10, 1, b"")
    copies = Copies(lambda place: ("part", place), lambda place: (ends[place], b"tokens"))
    for place in range(len(ends)):
        copies.add(place, attempt=3 + place // 2, identity=identity, column=0, index=0, start=0)
    assert copies.sample() == [3]
    copies.add(2, attempt=4, identity=identity_of(10, 1, b"other"), column=0, index=0, start=0)
    assert copies.disputed() == {attempt_name(4)}
    todo, keys = [copies], set[type]()
    while todo:
        for found in gc.get_referents(todo.pop()):
            if isinstance(found, dict | set):
                keys |= set(map(type, found))
            if isinstance(found, dict) or type(found).__module__ == Copies.__module__:
                todo.append(found)
    assert keys == {bytes}
