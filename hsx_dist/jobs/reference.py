"""Points of transformers' models: the layers that have them, and their rows, for comparison with stored rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

#: For each point of a layer: the module, and its input or the index of its output.
_OF_LAYER: Mapping[str, tuple[str, str | int]] = {
    "resid_pre": ("input_layernorm", "input"),
    "ln1": ("input_layernorm", 0),
    "q": ("self_attn.q_proj", 0),
    "k": ("self_attn.k_proj", 0),
    "v": ("self_attn.v_proj", 0),
    "q_norm": ("self_attn.q_norm", 0),
    "k_norm": ("self_attn.k_norm", 0),
    "z": ("self_attn.o_proj", "input"),
    "attn_out": ("self_attn.o_proj", 0),
    "resid_mid": ("post_attention_layernorm", "input"),
    "ln2": ("post_attention_layernorm", 0),
    "mlp_post": ("mlp.down_proj", "input"),
    "router_logits": ("mlp.gate", 0),
    "topk_weights": ("mlp.gate", 1),
    "topk_ids": ("mlp.gate", 2),
    "mlp_out": ("mlp", 0),
}
_OF_MODEL: Mapping[str, tuple[str, str | int]] = {
    "embed": ("embed_tokens", 0),
    "resid_final": ("norm", "input"),
    "final_ln": ("norm", 0),
}


class PointReference:
    """Rows of ``points`` (name → layers) of ``model``, a base model of transformers.

    A point whose module transformers names otherwise is left out.
    """

    def __init__(self, model: Any, points: Mapping[str, Collection[int]]):
        self._rows: dict[tuple[str, int], Any] = {}
        self._hooks = []
        decoder = decoder_of(model)
        for point, layers in points.items():
            name, what = _OF_MODEL.get(point) or _OF_LAYER.get(point) or ("", 0)
            for layer in layers if name else ():
                owner = decoder if point in _OF_MODEL else decoder.layers[layer]
                module = _find(owner, name)
                if module is not None:
                    hook = self._hook(point, layer, what)
                    self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def take(self, tokens: int) -> dict[tuple[str, int], Any]:
        """The rows of the model's last call, ``[tokens, width]`` by point and layer."""
        rows = {key: x.reshape(tokens, -1) for key, x in self._rows.items()}
        self._rows.clear()
        return rows

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, point: str, layer: int, what: str | int) -> Callable[..., None]:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            if what == "input":
                found = args[0] if args else next(iter(kwargs.values()))
            elif isinstance(output, tuple):
                found = output[int(what)] if int(what) < len(output) else None
            else:  # a router with one output returns only logits
                found = None if what else output
            if found is not None:
                self._rows[point, layer] = found.clone()  # residuals are added in place in some models

        return hook


def layer_modules(text: Any) -> dict[str, set[int]] | None:
    """For each module that some layers of a model lack, the layers that have it. Loads no weights.

    Args:
        text: the Hugging Face configuration of the decoder.

    Returns:
        None if transformers has no model of this configuration, or torch is not installed: the layers are unknown.
    """
    try:
        import torch
        from transformers import AutoModel

        with torch.device("meta"):
            layers = decoder_of(AutoModel.from_config(text, trust_remote_code=False)).layers
    except (ImportError, ValueError, AttributeError):
        return None
    names = ("self_attn.q_norm", "self_attn.k_norm", "mlp.experts")
    return {name: {i for i, layer in enumerate(layers) if _find(layer, name) is not None} for name in names}


def decoder_of(model: Any) -> Any:
    """The decoder of a transformers model, which has ``layers``."""
    return getattr(model, "language_model", model)


def _find(owner: Any, name: str) -> Any | None:
    found = owner
    for part in name.split("."):
        # Mixtral of transformers 4 has another name for its MLP.
        found = getattr(found, part, None) or (getattr(found, "block_sparse_moe", None) if part == "mlp" else None)
        if found is None:
            return None
    return found
