"""Taps are installed on a model right after it is loaded.

Versions: vLLM 0.31 with the V1 runner; 0.32 and 0.33, both runners. Upstream: no issue is open.

What vLLM does: the model runners load a model through ``BaseModelLoader.load_model``, then run it once to measure its
memory, and compile it in that run. Nothing calls a plugin in between. Hooks that are installed later are not compiled.
Cache-only layers that are registered later get no cache.

The patch: ``load_model`` calls ``tap`` with the engine's own model, not with a drafter. Without a choice of
points in ``additional_config``, ``tap`` does nothing.

How a change of vLLM is noticed: ``install`` does not find the method, and logs a warning. A loader with its own
``load_model`` (tensorizer, modelexpress, weight cache) does not call ours. In both cases the model has no taps, and
``taps_of`` raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger

log = get_logger(__name__)


def install(tap: Callable[[Any, Any], Any]) -> None:
    """Patch vLLM, once in a process. Call it before a model is loaded.

    Args:
        tap: called with the model and vLLM's configuration.
    """
    from vllm.model_executor.model_loader import base_loader

    loader: Any = getattr(base_loader, "BaseModelLoader", None)
    theirs = getattr(loader, "load_model", None)
    if theirs is None:
        log.warning(
            "taps cannot be installed: this vLLM loads models in a way that hsx_dist does not know. Install "
            "a tested vLLM release"
        )
        return
    if getattr(theirs, "hsx", False):
        return

    @functools.wraps(theirs)
    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = theirs(self, vllm_config, model_config, *args, **kwargs)
        if model_config is vllm_config.model_config:
            tap(model, vllm_config)
        return model

    load_model.hsx = True  # type: ignore[attr-defined]
    loader.load_model = load_model


def taps_of(model: Any) -> Any:
    """The taps that were installed on ``model``.

    Raises:
        ConfigError: there are none.
    """
    found = getattr(model, "hsx_taps", None)
    if found is None:
        raise ConfigError(
            f"{type(model).__name__}: expected a model with taps, got none. Use load_format auto, and load the plugin "
            "of hsx_dist (VLLM_PLUGINS, if set, must name hsx_dist)"
        )
    return found
