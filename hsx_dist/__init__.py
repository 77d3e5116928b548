"""Hidden states of language models, from vLLM replicas under Ray to object storage and back.

The public names are imported at their first use: reading a run imports neither Ray, vLLM nor torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.byteorder != "little":
    # States are handled as numpy's native integers. A big-endian machine would swap their bytes.
    raise ImportError("hsx_dist: expected a little-endian machine, got a big-endian one. Use another machine")

if TYPE_CHECKING:
    from hsx_dist.config import ExtractConfig, load_config
    from hsx_dist.errors import (
        AlreadyExists,
        ConfigError,
        Denied,
        EngineError,
        Fenced,
        FormatError,
        HsxError,
        InputError,
        IntegrityError,
        NotFound,
        ObjectsMissing,
        RunError,
        RunMismatch,
        RunStalled,
        SampleConflict,
        SampleConsumed,
        SampleExpired,
        SampleFailed,
        SampleNotFound,
        StoreError,
        Unavailable,
        UnknownCodec,
    )
    from hsx_dist.format.codecs import register_codec
    from hsx_dist.jobs.extract import extract
    from hsx_dist.model_parts.attention import AttentionPatterns
    from hsx_dist.model_parts.logit_lens import LogitLens
    from hsx_dist.page import object_name, sample_key
    from hsx_dist.reading import Run, Sample, load_hidden_states, open_run
    from hsx_dist.reading.datasets import HiddenStatesDataset
    from hsx_dist.reading.map_dataset import HiddenStatesMapDataset
    from hsx_dist.reading.mixing import MixedDataset
    from hsx_dist.reading.order import merge_states
    from hsx_dist.reading.packed import PackedContexts
    from hsx_dist.reading.token_batches import TokenBatches

__version__ = "0.1.0"

_NAMES = {
    "hsx_dist.jobs.extract": ["extract"],
    "hsx_dist.format.codecs": ["register_codec"],
    "hsx_dist.reading": ["open_run", "load_hidden_states", "Run", "Sample"],
    "hsx_dist.reading.datasets": ["HiddenStatesDataset"],
    "hsx_dist.reading.map_dataset": ["HiddenStatesMapDataset"],
    "hsx_dist.reading.mixing": ["MixedDataset"],
    "hsx_dist.reading.order": ["merge_states"],
    "hsx_dist.reading.packed": ["PackedContexts"],
    "hsx_dist.reading.token_batches": ["TokenBatches"],
    "hsx_dist.model_parts.attention": ["AttentionPatterns"],
    "hsx_dist.model_parts.logit_lens": ["LogitLens"],
    "hsx_dist.page": ["object_name", "sample_key"],
    "hsx_dist.config": ["ExtractConfig", "load_config"],
    "hsx_dist.errors": [
        "HsxError",
        "ConfigError",
        "InputError",
        "StoreError",
        "NotFound",
        "AlreadyExists",
        "Denied",
        "ObjectsMissing",
        "Unavailable",
        "FormatError",
        "UnknownCodec",
        "IntegrityError",
        "RunError",
        "RunMismatch",
        "Fenced",
        "SampleNotFound",
        "SampleConflict",
        "SampleConsumed",
        "RunStalled",
        "SampleExpired",
        "SampleFailed",
        "EngineError",
    ],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "AlreadyExists",
    "AttentionPatterns",
    "ConfigError",
    "Denied",
    "EngineError",
    "ExtractConfig",
    "Fenced",
    "FormatError",
    "HiddenStatesDataset",
    "HiddenStatesMapDataset",
    "HsxError",
    "InputError",
    "IntegrityError",
    "LogitLens",
    "MixedDataset",
    "NotFound",
    "ObjectsMissing",
    "PackedContexts",
    "Run",
    "RunError",
    "RunMismatch",
    "RunStalled",
    "Sample",
    "SampleConflict",
    "SampleConsumed",
    "SampleExpired",
    "SampleFailed",
    "SampleNotFound",
    "StoreError",
    "TokenBatches",
    "Unavailable",
    "UnknownCodec",
    "__version__",
    "extract",
    "load_config",
    "load_hidden_states",
    "merge_states",
    "object_name",
    "open_run",
    "register_codec",
    "sample_key",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
