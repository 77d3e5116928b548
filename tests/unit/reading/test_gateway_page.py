"""Objects whose existence or content decides: a gateway's page in their place is an error, and no decision."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hsx_dist.errors import Fenced, SampleFailed, Unavailable
from hsx_dist.format.conditional_puts import require_conditional_puts
from hsx_dist.format.json_objects import put_own
from hsx_dist.format.names import attempt_name, closed_name, part_name, receipt_name
from hsx_dist.format.receipt_log import ReceiptLog, is_closed, seal_logs
from hsx_dist.format.runs import is_fenced, version_1_refuses
from hsx_dist.reading.expiry import require_conditional_deletes
from hsx_dist.reading.load import load_object
from hsx_dist.reading.missing import is_removed, removal_mark
from hsx_dist.store import Store
from hsx_dist.store.base import replaces_conditionally
from hsx_dist.testing.faulty_stores import WrappedStore
from hsx_dist.testing.stores import MemoryStore
from hsx_dist.writers.sink import PartSink
from tests.unit.format.test_receipt_log import receipt
from tests.unit.writers.small_samples import options, pages

PAGE = b"<html>back soon</html>"
JSON_PAGE = b'{"message": "back soon"}'


class PagedOnce(WrappedStore):
    """The first get of a name that begins with ``prefix`` returns ``page``."""

    def __init__(self, inner: Store, prefix: str, page: bytes = PAGE) -> None:
        super().__init__(inner)
        self._left, self._page = [prefix], page

    def get(self, name: str, most: int | None = None) -> bytes:
        if self._left and name.startswith(self._left[0]):
            self._left.clear()
            return self._page
        return super().get(name, most)


@pytest.fixture
def served() -> MemoryStore:
    """A server's store with the sample ``row1``."""
    store = MemoryStore()
    sink = PartSink(store, options(attempt=0, layout="sample"), lambda _: None)
    for page in pages("row1", 40):
        sink.add(page)
    sink.close()
    return store


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda store: is_closed(store, 1), closed_name(1)),
        (lambda store: is_fenced(store, 1), attempt_name(2)),
        (lambda store: version_1_refuses(store, 1), receipt_name(1, "version-2", 1)),
        (lambda store: is_removed(store, part_name(1, "w", 1), 2), removal_mark(part_name(1, "w", 1))),
    ],
)
def test_a_gateways_page_is_no_object_of_a_run(ask: Callable[[Store], bool], name: str) -> None:
    """A static page answers a HEAD like an object."""
    store = MemoryStore()
    assert not ask(store)
    store.put(name, [PAGE])
    with pytest.raises(Unavailable, match=f"{name}: expected a JSON object, got other bytes"):
        ask(store)
    store.put(name, [b'{"damaged'])
    assert ask(store)


@pytest.mark.parametrize("marker", ["row1.error.json", "row1.safetensors.conflict.json"])
def test_a_gateways_page_is_no_marker(served: MemoryStore, marker: str) -> None:
    name = "row1.safetensors"
    with pytest.raises(Unavailable, match=f"{marker}: expected a JSON object"):
        load_object(PagedOnce(served, marker), name, framework="numpy")
    loaded = load_object(PagedOnce(served, marker), name, framework="numpy", wait=5)
    assert len(loaded["token_ids"]) == 40
    served.put(marker, [b'{"damaged'])
    with pytest.raises(SampleFailed, match="holds no readable reason"):
        load_object(served, name)


@pytest.mark.parametrize("page", [PAGE, JSON_PAGE])
def test_a_gateways_page_hides_no_seal(page: bytes) -> None:
    """Otherwise the writer stores the next receipt behind the seal, where no reader counts it."""
    store = MemoryStore()
    seal_logs(store, {(1, "w"): 0}, "gc")
    log = ReceiptLog(PagedOnce(store, receipt_name(1, "w", 1), page), 1, "w")
    with pytest.raises(Unavailable, match="expected a receipt or a seal, got other bytes"):
        log.append(receipt("a"))
    with pytest.raises(Fenced):
        log.append(receipt("a"))
    assert len(list(store.list("manifest/"))) == 1


def test_a_gateways_page_is_no_object_of_another_process() -> None:
    store = PagedOnce(MemoryStore(), "a")
    assert put_own(store, "a", b'{"other": 1}')
    with pytest.raises(Unavailable):
        put_own(store, "a", b'{"own": 1}')
    assert not put_own(store, "a", b'{"own": 1}')


@pytest.mark.parametrize(
    ("probe", "prefix"),
    [
        (require_conditional_puts, "probe-"),
        (replaces_conditionally, ".hsx-probe-"),
        (require_conditional_deletes, ".hsx-probe-"),
    ],
)
def test_a_gateways_page_is_no_result_of_a_probe(probe: Callable[[Store], bool | None], prefix: str) -> None:
    store = PagedOnce(MemoryStore(), prefix)
    with pytest.raises(Unavailable):
        probe(store)
    assert probe(store) in (True, None)
