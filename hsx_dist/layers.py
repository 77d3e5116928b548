"""Conversion of users' layer specifications to vLLM's layer ids.

Layer id ``k`` is the residual stream that enters layer ``k``: 0 the embeddings, ``N`` (the model's number of layers)
the last layer's output *before* the final norm. A model of ``N`` layers has ids 0 … ``N``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from hsx_dist.errors import ConfigError
from hsx_dist.page import HIDDEN_STATES

_HOOK = re.compile(r"blocks\.(0|[1-9][0-9]{0,4})\.(\w+(?:\.\w+)?)")
#: Points by TransformerLens' names. Its normalised streams are taken before the norm's weight, and have no point.
_POINTS = {
    "attn.hook_q": "q",
    "attn.hook_k": "k",
    "attn.hook_v": "v",
    "attn.hook_z": "z",
    "hook_attn_out": "attn_out",
    "hook_resid_mid": "resid_mid",
    "mlp.hook_post": "mlp_post",
    "hook_mlp_out": "mlp_out",
}


def resolve_layers(spec: Sequence[int | str] | str | int, num_layers: int) -> tuple[int, ...]:
    """Return the layer ids of ``spec`` for a model of ``num_layers`` layers, ascending.

    ``spec`` is an id, a list of ids, or a string such as ``"2,15,last"``. Negative ids count from the end: ``-1``, like
    ``"last"``, is ``num_layers``. ``"all"`` is every id. ``"eagle3"`` is an early, a middle and a late layer, and the
    last one, for EAGLE-3 draft trainers.

    Raises:
        ConfigError: an id is out of range or given twice, or a word is unknown.
    """
    if is_all(spec):
        return tuple(range(num_layers + 1))
    items = _items(spec)
    if len(items) == 1 and items[0] == "eagle3":
        return _eagle3(num_layers)
    ids = [_layer_id(item, num_layers) for item in items]
    twice = sorted(i for i, n in Counter(ids).items() if n > 1)
    if twice:
        raise ConfigError(
            f"layers: expected every layer once, got {_shown(spec)} with {_shown(twice)} more than once "
            f"(the ids are 0 … {num_layers}, and -1 or last is {num_layers}). Name each layer once"
        )
    return tuple(sorted(ids))


def is_all(spec: Sequence[int | str] | str | int) -> bool:
    """Whether ``spec`` is ``"all"``, in any spelling that ``resolve_layers`` accepts. Raises as it does."""
    return _items(spec) == ["all"]


def _eagle3(num_layers: int) -> tuple[int, ...]:
    ids = (2, num_layers // 2, num_layers - 3, num_layers)
    if num_layers < 7 or len(set(ids)) < len(ids):
        raise ConfigError(
            f"layers: expected a model of at least 7 layers for eagle3 (layers 2, N/2, N-3 and N), "
            f"got one of {num_layers}. Give the ids (0 … {num_layers}) yourself"
        )
    return tuple(sorted(ids))


def _items(spec: Sequence[int | str] | str | int) -> list[int | str]:
    if isinstance(spec, str):
        items: list[int | str] = [part.strip().lower() for part in spec.strip().strip("[]").split(",")]
    elif isinstance(spec, int):
        items = [spec]
    else:
        items = [part.strip().lower() if isinstance(part, str) else part for part in spec]
    if not items or "" in items:
        raise ConfigError(
            f"layers: expected layer ids, such as 2,15,last, got {_shown(spec)}. Name at least one, no empty ones"
        )
    return items


def _layer_id(item: int | str, num_layers: int) -> int:
    if item == "last":
        return num_layers
    try:
        layer = int(item if type(item) is int else str(item))  # str: refuses 1.5 and True
    except ValueError:
        if item in ("all", "eagle3"):
            meant = "every id" if item == "all" else f"2, N/2, N-3 and N, here N = {num_layers}"
            raise ConfigError(
                f"layers: expected {item} alone, got it in a list. Give layers={item} ({meant}), or write the ids"
            ) from None
        raise ConfigError(
            f"layers: expected ids 0 … {num_layers}, negative ones from the end, last, all, or eagle3, got {item!r}. "
            "Use one of these"
        ) from None
    if not -num_layers - 1 <= layer <= num_layers:
        raise ConfigError(
            f"layers: expected ids 0 … {num_layers} (the model has {num_layers} layers; {num_layers} is the last one's "
            f"output), or -1 … {-num_layers - 1} from the end, got {layer}. Use one of these"
        )
    return layer if layer >= 0 else num_layers + 1 + layer


def _shown(value: object) -> str:
    return ", ".join(str(v) for v in value) if isinstance(value, (list, tuple)) else repr(value)


def point_of_hook(hook_name: str) -> tuple[str, int]:
    """Return the point and layer of a hook's name in SAELens and TransformerLens.

    ``blocks.K.hook_resid_pre`` is layer K of ``hidden_states``, ``blocks.K.hook_resid_post`` is layer K+1.
    ``blocks.K.attn.hook_z`` is layer K of ``z``.

    Raises:
        ConfigError: no point has this name.
    """
    found = _HOOK.fullmatch(hook_name)
    if found is not None and found[2] in ("hook_resid_pre", "hook_resid_post"):
        return HIDDEN_STATES, int(found[1]) + (found[2] == "hook_resid_post")
    if found is None or found[2] not in _POINTS:
        raise ConfigError(
            f"hook_name: expected blocks.K. and one of hook_resid_pre, hook_resid_post, {', '.join(_POINTS)}, got "
            f"{hook_name!r}. Choose one of them: a run has no points for other hooks"
        )
    return _POINTS[found[2]], int(found[1])


def hook_of_layer(layer: int) -> str:
    """Return ``blocks.0.hook_resid_pre`` for layer 0, and ``blocks.K.hook_resid_post`` for layer K+1."""
    return f"blocks.{layer - 1}.hook_resid_post" if layer else "blocks.0.hook_resid_pre"
