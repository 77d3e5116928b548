"""Hidden states of language models, from vLLM replicas under Ray to object storage and back.

The public names are loaded when they are first used: reading a run imports neither Ray, vLLM nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hsx_dist.jobs import extract
    from hsx_dist.reading import Run, Sample, load_hidden_states, open_run

__version__ = "0.1.0"

_HOMES = {
    "Run": "hsx_dist.reading",
    "Sample": "hsx_dist.reading",
    "extract": "hsx_dist.jobs",
    "load_hidden_states": "hsx_dist.reading",
    "open_run": "hsx_dist.reading",
}

__all__ = ["Run", "Sample", "__version__", "extract", "load_hidden_states", "open_run"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
