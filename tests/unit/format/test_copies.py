"""Which of the segments of a key form its sample."""

from __future__ import annotations

import gc
from typing import Any

from hsx_dist.format.copies import Copies, attempt_name


def test_numbers_of_a_receipt_are_no_keys() -> None:
    """Python's hash of integers has no seed: chosen ones collide, and a dictionary of them takes quadratic time."""
    ends = [7, 8, 9, 10]
    copies = Copies(lambda place: ("part", place), lambda place: (ends[place], b"tokens"))
    for place in range(len(ends)):
        copies.add(place, attempt=3 + place // 2, identity=(10, 1, b""), column=0, index=0, start=0)
    assert copies.sample() == [3]
    copies.add(2, attempt=4, identity=(10, 1, b"other"), column=0, index=0, start=0)
    assert copies.disputed() == {attempt_name(4)}
    todo, dictionaries = [copies], list[dict[Any, Any]]()
    while todo:
        for found in gc.get_referents(todo.pop()):
            if isinstance(found, dict):
                dictionaries.append(found)
            if isinstance(found, dict) or type(found).__module__ == Copies.__module__:
                todo.append(found)
    keys = {type(key) for found in dictionaries for key in found}
    assert bytes in keys
    assert int not in keys
