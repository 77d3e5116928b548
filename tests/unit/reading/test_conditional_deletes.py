"""``hsx gc`` first tests with a probe object whether the store's conditional deletes keep newer objects."""

from __future__ import annotations

import pytest

from hsx_dist.errors import StoreError, Unavailable
from hsx_dist.reading.expiry import require_conditional_deletes
from hsx_dist.store import open_store
from hsx_dist.store.base import replaces_conditionally
from hsx_dist.store.prefix import PrefixStore
from hsx_dist.testing.stores import MemoryStore


class Ignoring(MemoryStore):
    """A server that ignores the condition of a delete."""

    def delete_version(self, name, version):  # noqa: ARG002
        self.delete(name)
        return True


class Refusing(MemoryStore):
    def delete_version(self, name, version):  # noqa: ARG002
        return False


@pytest.mark.parametrize("kind", [Ignoring, Refusing, lambda: PrefixStore(MemoryStore(), "x")])
def test_a_store_without_conditional_deletes_is_refused_and_nothing_is_deleted(kind):
    store = kind()
    store.put("old.error.json", [b'{"key": "old", "error": "x", "expires": 1000}'])
    with pytest.raises(StoreError, match=r"expected a store with conditional deletes.*lifecycle rules"):
        require_conditional_deletes(store)
    assert [info.name for info in store.list()] == ["old.error.json"]


class LosingAnswers(MemoryStore):
    """A library that repeats each successful conditional call, and reports the repetition's result."""

    def put_version(self, name, buffers, version):
        super().put_version(name, buffers, version)
        return super().put_version(name, buffers, version)

    def delete_version(self, name, version):
        super().delete_version(name, version)
        return super().delete_version(name, version)


def test_probes_check_the_stored_object_and_not_the_answers():
    store = LosingAnswers()
    require_conditional_deletes(store)
    assert replaces_conditionally(store)
    assert list(store.list()) == []


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_probe_leaves_no_object(tmp_path, kind):
    store = open_store(str(tmp_path)) if kind == "folder" else MemoryStore()
    require_conditional_deletes(store)
    assert list(store.list()) == []


class Unheard(MemoryStore):
    """A gateway's page answers a conditional delete: the object stays."""

    def __init__(self, call):
        super().__init__()
        self.left = call

    def delete_version(self, name, version):
        self.left -= 1
        return self.left == 0 or super().delete_version(name, version)


@pytest.mark.parametrize("call", [1, 2])
def test_a_gateways_page_in_place_of_a_delete_is_no_result_of_the_probe(call):
    store = Unheard(call)
    with pytest.raises(Unavailable, match="expected no object after its delete, got one"):
        require_conditional_deletes(store)
    require_conditional_deletes(store)
    assert list(store.list()) == []
