"""Copies of the tensors that a model captures by reference: layer 0, the embeddings.

Versions: vLLM 0.31, 0.32 and 0.33; both runners. Upstream: no issue is open.

What vLLM does: ``EagleModelMixin._maybe_add_hidden_state`` captures layer 0 as the tensor itself, since there is no
residual to add. The first layer's fused norm then adds to that tensor if its kernel works in place, as on GPUs with
``enforce_eager``. The cache would hold a later stream. A compiled norm owns its inputs too, and may use their memory
again. All other layers are sums in separate memory.

The patch, in every engine of a process that loads this package's plugin:

- ``EagleModelMixin._maybe_add_hidden_state`` captures a copy.
- ``EagleModelMixin.__new__`` records the model, so that ``check_layer_zero`` finds it. Some models set their layers
  without the mixin's method.
- ``SpeculativeConfig.compute_hash`` gets a suffix. This hash is part of the key of vLLM's compile cache, and nothing
  else in the key depends on the plugin: a graph that was compiled without the copy would be loaded.

How a change of vLLM is noticed: ``install`` does not find the two methods, or the class has a ``__new__``. It logs a
warning and patches nothing.
``check_layer_zero`` does not find the engine's model, or not the copy in its compiled graph. Then the connector refuses
layer 0.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: Part of the compile cache's key. Change it when the traced code of this file changes its meaning.
CACHE_KEY = "hsx_dist.captures.1"

#: Models that were built while the patch was installed.
_models: WeakSet[Any] = WeakSet()


def install() -> None:
    """Patch vLLM, once in a process. Call it before a model is built."""
    from vllm.config import SpeculativeConfig
    from vllm.model_executor.models import interfaces

    mixin = getattr(interfaces, "EagleModelMixin", None)
    add = getattr(mixin, "_maybe_add_hidden_state", None)
    compute_hash = getattr(SpeculativeConfig, "compute_hash", None)
    if getattr(add, "hsx", False):
        return
    if mixin is None or add is None or compute_hash is None or "__new__" in vars(mixin):
        log.warning(
            "captures are not copied: this vLLM's models capture in a way that hsx_dist does not know. Install "
            "a tested vLLM release"
        )
        return

    @functools.wraps(add)
    def add_copy(self: Any, captured: list[Any], layer_idx: int, hidden_states: Any, residual: Any) -> list[Any]:
        before = len(captured)
        found = add(self, captured, layer_idx, hidden_states, residual)
        if len(found) > before and found[-1] is hidden_states:
            found[-1] = hidden_states.clone()
        return found

    def new_and_record(cls: Any, *_: Any, **__: Any) -> Any:
        model = super(mixin, cls).__new__(cls)
        _models.add(model)
        return model

    @functools.wraps(compute_hash)
    def hash_with_key(self: Any) -> str:
        return f"{compute_hash(self)}-{CACHE_KEY}"

    add_copy.hsx = True  # type: ignore[attr-defined]
    mixin._maybe_add_hidden_state = add_copy
    mixin.__new__ = staticmethod(new_and_record)
    SpeculativeConfig.compute_hash = hash_with_key


def check_layer_zero(layer_ids: Sequence[int], layers: Iterable[Any], model: str) -> None:
    """Check that the embeddings are captured as a copy, if they are captured.

    Args:
        layer_ids: the layer ids that the engine captures.
        layers: the engine's attention layers. They identify its model among those of other engines in this process.
        model: the model's name, for the error.

    Raises:
        ConfigError: layer 0 is captured, and this model was built or compiled without the patch, or captures with
            other code.
    """
    if 0 not in layer_ids:
        return
    mine = {id(layer) for layer in layers}
    built = [m for m in _models if 0 in getattr(m, "aux_hidden_state_layers", ())]
    found = [m for m in built if any(id(part) in mine for part in m.modules())]
    if not found:
        raise ConfigError(
            f"layer 0 of {model}: expected a model that captures through vLLM's EagleModelMixin, built after the "
            "plugin of hsx_dist was loaded, got none. Capture layers from 1 on. If VLLM_PLUGINS is set, add "
            "hsx_dist to it"
        )
    for one in found:
        if own := _own_capture(type(one)):
            raise ConfigError(
                f"layer 0 of {model}: expected {type(one).__name__} to capture through vLLM's EagleModelMixin, got "
                f"other code in {own}, whose captured tensor the model may change. Capture layers from 1 on"
            )
        if not _compiled_with_copy(one):
            raise ConfigError(
                f"layer 0 of {model}: expected a compiled graph that copies the embeddings, got a graph cached without "
                "hsx_dist. Set VLLM_DISABLE_COMPILE_CACHE=1, or remove torch_compile_cache in VLLM_CACHE_ROOT"
            )


def _own_capture(model: type) -> str | None:
    """Name of a method that appends captured tensors itself, or of a class that does not use the mixin's method."""
    uses_mixin = False
    for name, function in _functions(model):
        names = inspect.unwrap(function).__code__.co_names
        uses_mixin |= "_maybe_add_hidden_state" in names
        if {"aux_hidden_state_layers", "append"} <= set(names):
            return name
    return None if uses_mixin else model.__qualname__


def _functions(model: type) -> Iterator[tuple[str, Any]]:
    from vllm.model_executor.models.interfaces import EagleModelMixin

    for cls in model.__mro__:
        if cls.__module__ != EagleModelMixin.__module__:
            yield from ((f.__qualname__, f) for f in vars(cls).values() if inspect.isfunction(f))


def _compiled_with_copy(model: Any) -> bool:
    """False if the model runs a cached graph whose trace did not go through this file."""
    compiled = getattr(model, "aot_compiled_fn", None)
    return compiled is None or any(s.module == __name__ for s in compiled.source_info().inlined_sources)
