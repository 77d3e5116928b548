"""The sending side of a pool, used by the thread that empties the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hsx_dist.page import Page

#: Minimum size of a call to a writer, if enough pages wait: an empty call costs a writer as much time as a MiB of data.
CALL_BYTES = 1 << 20
#: Default limit of unacknowledged bytes from a sender to writers on other nodes. Until the response, pages occupy the
#: sender's object store in addition to the writer's. Credits count only the writer's.
ABROAD_BYTES = 64 << 20


def sent_bytes(page: Page) -> int:
    """Return the bytes of a page in a call to a writer: its states, metadata and attached arrays."""
    segment = page.segment
    return page.nbytes + len(segment.metadata) + sum(array.nbytes for array in segment.attached.values())


class Sender(Protocol):
    """Sends pages to writers. Used by one thread."""

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        """Send pages. Blocks while the writers are full.

        ``release(page)`` is called, from any thread, as soon as the page's buffer may be reused. It is also called for
        a page that could not be sent, so that a failed writer cannot block the ring. A lost page's sample gets no
        receipt, and so counts as missing.
        """
        ...

    def flush(self) -> None:
        """Block until the writers have accepted or lost every page sent before."""
        ...

    def close(self) -> None: ...
