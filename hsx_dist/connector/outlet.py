"""Interface of a transport for the worker half: it ships pages, and gets the events of their requests."""

from __future__ import annotations

from hsx_dist.connector.step import Expect, Skip
from hsx_dist.page import Segment
from hsx_dist.transport.local_end import LocalEnd
from hsx_dist.transport.shipping import Copied


class Outlet:
    """Outlet for a run's samples, whose storage is proved by receipts. ``StoreOutlet`` is for a connector without a
    run.

    Methods that steps call take no lock that a writer or the network holds. ``prepared``, and ``skip`` for requests
    that are not stored, may wait for a local file system.
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
        """Handle the first scheduling of one of this rank's requests. Called when its step begins. Returns at once."""

    def prepared(self) -> None:
        """Block until the lock files of all expected and skipped requests exist. Called at the end of their step."""

    def skip(self, skip: Skip) -> None:
        """Handle a request of which this rank ships nothing. Returns at once."""
        for column in skip.columns:
            self.end.skip(skip.key, skip.reason, column, skip.of, final=skip.final)

    @property
    def pending(self) -> int:
        """Number of submitted pages and reports that are not shipped yet. ``StoreOutlet`` adds unstored samples."""
        return self.end.pending

    def close(self, timeout: float | None = None) -> None:
        """Ship the submitted pages, for at most ``timeout`` seconds."""
        self.end.close(timeout)
