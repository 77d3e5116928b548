"""The part that runs inside vLLM. Importing this package does not import vLLM; access to the class does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hsx_dist.connector.connector import HiddenStatesConnector

__all__ = ["HiddenStatesConnector"]


def __getattr__(name: str) -> Any:
    if name != "HiddenStatesConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hsx_dist.connector.connector import HiddenStatesConnector

    return HiddenStatesConnector
