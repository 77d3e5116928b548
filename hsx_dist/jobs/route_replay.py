"""transformers' model with the experts that the engine chose, for comparison of MoE models.

Below float32, rounding decides between experts with nearly equal logits. One such flip changes the row in all later
layers, and attention carries the change to all later rows of the sequence. In a deep model nearly every row then
follows a flip, so that rows without one are too few to compare. With the engine's experts no row has to be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hsx_dist.jobs.reference import decoder_of


def expert_blocks(model: Any) -> dict[int, torch.nn.Module]:
    """For each MoE layer of a transformers model the module that routes: the parent of its ``experts``.

    Empty for a model whose layers have another name than ``layers``.
    """
    found = {}
    for i, layer in enumerate(getattr(decoder_of(model), "layers", ())):
        for path, _ in layer.named_modules():
            owner, _, name = path.rpartition(".")
            if name == "experts":
                found[i] = layer.get_submodule(owner)
    return found


class RouteReplay(TorchFunctionMode):
    """Inside this context routers use the experts of ``routes``: layer → ids ``[T, top_k]``.

    It replaces the result of the router's ``topk``. The model computes the experts' weights from its own logits, by its
    own rule. ``own`` has the model's own choice for each layer with replaced experts, ``[T, top_k]``. A layer is not in
    ``own`` if its router calls no ``topk`` of this shape, or if the ids are out of range.
    """

    def __init__(self, blocks: Mapping[int, torch.nn.Module], routes: Mapping[int, torch.Tensor]):
        super().__init__()
        self.own: dict[int, torch.Tensor] = {}
        self._routes = {layer: ids.long() for layer, ids in routes.items() if layer in blocks}
        self._blocks = blocks
        self._layer: int | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> RouteReplay:
        for layer in self._routes:
            block = self._blocks[layer]
            self._hooks.append(block.register_forward_pre_hook(partial(self._set, layer)))
            self._hooks.append(block.register_forward_hook(partial(self._set, None)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._layer is None or func not in (torch.topk, torch.Tensor.topk):
            return found
        ids, chosen = self._routes[self._layer], found.indices
        scores = args[0] if args else kwargs["input"]
        # Grouped routers call topk for groups first.
        if chosen.shape[-1:] != ids.shape[-1:] or chosen.numel() != ids.numel():
            return found
        if int(ids.min()) < 0 or int(ids.max()) >= scores.shape[-1]:
            return found
        self.own[self._layer] = chosen.reshape(ids.shape)
        ids = ids.reshape(chosen.shape)
        return type(found)((scores.gather(-1, ids), ids))

    def _set(self, layer: int | None, *_: Any) -> None:
        self._layer = layer
