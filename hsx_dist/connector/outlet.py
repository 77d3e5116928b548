"""What the worker half sees of a transport: where pages go, and what must be known of their requests."""

from __future__ import annotations

from hsx_dist.connector.step import Expect, Skip
from hsx_dist.page import Segment
from hsx_dist.transport.local_end import LocalEnd
from hsx_dist.transport.shipping import Copied


class Outlet:
    """For samples of a run, whose receipts prove what is stored. ``StoreOutlet`` is for a connector without a run.

    What steps call takes no lock that a writer or the network holds; ``prepared`` and, of what is not stored, ``skip``
    may wait for a local file system.
    """

    def __init__(self, end: LocalEnd):
        self.end = end
        self.ring, self.meter, self.memory = end.ring, end.meter, end.memory

    def admit(self, _: Segment, /) -> bool:
        """Whether the first page of a sample may be submitted now. If False, its blocks stay held. Returns at once."""
        return True

    def submit(self, *pages: Copied) -> None:
        """Ship pages whose copies were started, in the order in which they end. Returns at once."""
        self.end.submit(*pages)

    def expect(self, expected: Expect) -> None:
        """A request of this rank's was scheduled for the first time, and its step begins. Returns at once."""

    def prepared(self) -> None:
        """Block until the lock files of all expected and skipped requests exist. Then their step ends."""

    def skip(self, skip: Skip) -> None:
        """Nothing of a request will be shipped by this rank. Returns at once."""
        for column in skip.columns:
            self.end.skip(skip.key, skip.reason, column, skip.of)

    @property
    def pending(self) -> int:
        """What was submitted, and is not shipped yet (or not stored yet, where this process stores)."""
        return self.end.pending

    def close(self, timeout: float | None = None) -> None:
        """Ship what was submitted, for at most ``timeout`` seconds."""
        self.end.close(timeout)
