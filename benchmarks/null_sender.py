"""A sender for the engine's side of shipping that has no writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsx_dist.page import Page


class NullSender:
    """Drops pages."""

    def send(self, pages: Sequence[Page], release: Callable[[Page], None]) -> None:
        for page in pages:
            release(page)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
