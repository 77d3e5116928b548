"""Objects whose existence decides: a gateway's page in their place is an error, and no decision."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hsx_dist.errors import Unavailable
from hsx_dist.format.names import attempt_name, closed_name, part_name, receipt_name
from hsx_dist.format.receipt_log import is_closed
from hsx_dist.format.runs import is_fenced, version_1_refuses
from hsx_dist.reading.missing import is_removed, removal_mark
from hsx_dist.store import Store
from hsx_dist.testing.stores import MemoryStore


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
    store.put(name, [b"<html>back soon</html>"])
    with pytest.raises(Unavailable, match=f"{name}: expected a JSON object, got other bytes"):
        ask(store)
    store.put(name, [b'{"damaged'])
    assert ask(store)
