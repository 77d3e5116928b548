"""The sending side of a pool, as the thread that empties the ring sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hsx_dist.page import Page

#: What a call to a writer should carry at least: a call by itself costs a writer as much time as a MiB in it.
CALL_BYTES = 1 << 20
#: What a sender may have at other nodes' writers, where nobody says: their credits are of their nodes' object stores,
#: and pages lie in the sender's as well until they are answered.
ABROAD_BYTES = 64 << 20


class Sender(Protocol):
    """Hands pages to writers. Used by one thread."""

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        """Pass pages on; blocks while the writers have no room.

        ``release(page)`` is called, from any thread, as soon as the page's buffer may be reused: also when the page
        could not be passed on, for the ring must go round whatever the writers do (what was lost has no receipt, and
        receipts are all that counts).
        """
        ...

    def flush(self) -> None:
        """Wait until every page sent before has been taken by its writer."""
        ...

    def close(self) -> None: ...
