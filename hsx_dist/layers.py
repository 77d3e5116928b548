"""Which layers are meant: from what a user writes to vLLM's layer ids.

Layer id ``k`` is the residual stream that enters layer ``k``: 0 the embeddings, ``N`` (the model's number of layers)
the last layer's output *before* the final norm. A model of ``N`` layers has ids 0 … ``N``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from hsx_dist.errors import ConfigError

_HOOK = re.compile(r"blocks\.(0|[1-9][0-9]{0,4})\.hook_resid_(pre|post)")


def resolve_layers(spec: Sequence[int | str] | str | int, num_layers: int) -> tuple[int, ...]:
    """The layer ids that ``spec`` means for a model of ``num_layers`` layers, ascending.

    ``spec`` is an id, a list of ids, or a string such as ``"2,15,last"``. Negative ids count from the end: ``-1``, like
    ``"last"``, is ``num_layers``. ``"all"`` is every id, and ``"eagle3"`` what EAGLE-3 draft trainers take: an early, a
    middle and a late layer, and the last. Raises ConfigError for an id out of range, an id given twice, or another
    word.
    """
    items = _items(spec)
    if len(items) == 1 and items[0] == "all":
        return tuple(range(num_layers + 1))
    if len(items) == 1 and items[0] == "eagle3":
        return _eagle3(num_layers)
    ids = [_layer_id(item, num_layers) for item in items]
    twice = sorted(i for i, n in Counter(ids).items() if n > 1)
    if twice:
        raise ConfigError(
            f"layers: expected every layer once, came {_shown(spec)}, in which {_shown(twice)} stands more than once "
            f"(the ids are 0 … {num_layers}, and -1 or last is {num_layers}); name each layer once"
        )
    return tuple(sorted(ids))


def _eagle3(num_layers: int) -> tuple[int, ...]:
    ids = (2, num_layers // 2, num_layers - 3, num_layers)
    if num_layers < 7 or len(set(ids)) < len(ids):
        raise ConfigError(
            f"layers: expected a model of at least 7 layers for eagle3 (layers 2, N/2, N-3 and N), "
            f"came one of {num_layers}; give the ids (0 … {num_layers}) yourself"
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
            f"layers: expected layer ids, such as 2,15,last, came {_shown(spec)}; name at least one, no empty ones"
        )
    return items


def _layer_id(item: int | str, num_layers: int) -> int:
    if item == "last":
        return num_layers
    try:
        layer = int(item if type(item) is int else str(item))  # str: 1.5 and True are no ids
    except ValueError:
        alone = f"; {item} stands alone, not in a list" if item in ("all", "eagle3") else ""
        raise ConfigError(
            f"layers: expected ids 0 … {num_layers}, negative ones from the end, or last, "
            f"came {item!r}{alone}; correct it"
        ) from None
    if not -num_layers - 1 <= layer <= num_layers:
        raise ConfigError(
            f"layers: expected ids 0 … {num_layers} (the model has {num_layers} layers; {num_layers} is the last one's "
            f"output), or -1 … {-num_layers - 1} from the end, came {layer}; correct it"
        )
    return layer if layer >= 0 else num_layers + 1 + layer


def _shown(value: object) -> str:
    return ", ".join(str(v) for v in value) if isinstance(value, (list, tuple)) else repr(value)


def layer_of_hook(hook_name: str) -> int:
    """The layer id of SAELens' and TransformerLens' name of a residual stream: ``blocks.K.hook_resid_pre`` is K,
    ``blocks.K.hook_resid_post`` is K+1. ``ConfigError``: the hook is of something else."""
    found = _HOOK.fullmatch(hook_name)
    if found is None:
        raise ConfigError(
            f"hook_name: expected blocks.K.hook_resid_post or blocks.K.hook_resid_pre, got {hook_name!r}. Other hooks "
            "are no layers of a run"
        )
    return int(found[1]) + (found[2] == "post")


def hook_of_layer(layer: int) -> str:
    """``blocks.0.hook_resid_pre`` of layer 0, else ``blocks.K.hook_resid_post`` of layer K+1."""
    return f"blocks.{layer - 1}.hook_resid_post" if layer else "blocks.0.hook_resid_pre"
