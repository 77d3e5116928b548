from __future__ import annotations

from hsx_dist.format import key_index
from hsx_dist.format.key_index import KeyIndex


def test_keys_are_found_before_and_after_they_were_sorted(monkeypatch):
    monkeypatch.setattr(key_index, "_RECENT", 7)
    keys = [f"k{i}" for i in range(1000)]
    index = KeyIndex(lambda place: keys[place])
    for place, key in enumerate(keys):
        assert index.find(key) is None
        index.add(key, place)
        assert index.find(key) == place
    assert len(index) == 1000
    assert [index.find(key) for key in keys] == list(range(1000))
    assert index.find("other") is None


def test_keys_with_equal_hashes_are_found(monkeypatch):
    monkeypatch.setattr(key_index, "_RECENT", 2)
    monkeypatch.setattr(key_index, "hash", lambda _: 5, raising=False)
    keys = [f"k{i}" for i in range(20)]
    index = KeyIndex(lambda place: keys[place])
    for place, key in enumerate(keys):
        index.add(key, place)
    assert [index.find(key) for key in keys] == list(range(20))
    assert index.find("other") is None
