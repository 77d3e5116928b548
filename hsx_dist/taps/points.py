"""The points of a model that can be captured, and a user's choice among them.

A point is a tensor with one row per token. ``H`` is the hidden size; layer ``i`` counts from 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hsx_dist.errors import ConfigError

Width = Literal["hidden", "q", "kv", "mlp", "experts", "top_k"]


@dataclass(frozen=True, slots=True)
class Point:
    """A tensor of a model that can be captured.

    Attributes:
        formula: the definition, in terms of the other points.
        width: kind of the row's length.
        per_layer: False for a point that exists once in a model.
        sharded: True if each tensor-parallel rank has a part of the row.
        alias_of: another name of this point; an alias is not stored twice.
        dtype: the dtype in every model; None: the model's compute dtype (for ``router_logits``: the router's).
    """

    name: str
    formula: str
    width: Width = "hidden"
    per_layer: bool = True
    sharded: bool = False
    alias_of: str | None = None
    dtype: Literal["int32", "float32"] | None = None


#: The stream at every layer, by the ids of the setting ``layers``: ``k`` is ``resid_pre`` of layer ``k``, ``N`` is
#: ``resid_final``.
HIDDEN_STATES = "hidden_states"

#: In the order of computation, which is the order of columns.
POINTS: dict[str, Point] = {
    p.name: p
    for p in (
        Point(HIDDEN_STATES, "id k below N: resid_pre of layer k; id N: resid_final. N is the number of layers"),
        Point("embed", "embed_tokens(token)", per_layer=False),
        Point("resid_pre", "the residual stream that enters the layer; of layer 0, the embeddings"),
        Point("ln1", "input_layernorm(resid_pre)"),
        Point("q", "q_proj(ln1): before q_norm and before rotary", "q", sharded=True),
        Point("k", "k_proj(ln1): before k_norm and before rotary", "kv", sharded=True),
        Point("v", "v_proj(ln1)", "kv", sharded=True),
        Point("q_norm", "q_norm(q), by head, before rotary", "q", sharded=True),
        Point("k_norm", "k_norm(k), by head, before rotary", "kv", sharded=True),
        Point("z", "attention(rotary(q_norm or q), rotary(k_norm or k), v), by head, before o_proj", "q", sharded=True),
        Point("attn_out", "o_proj(z)"),
        Point("resid_mid", "resid_pre + attn_out"),
        Point("ln2", "post_attention_layernorm(resid_mid)"),
        Point("mlp_in", "ln2", alias_of="ln2"),
        Point(
            "mlp_post", "act(gate_proj(ln2)) * up_proj(ln2), before down_proj; not of an MoE layer", "mlp", sharded=True
        ),
        Point("router_logits", "gate(ln2), before softmax", "experts"),
        Point("topk_ids", "experts of the token, in the router's order", "top_k", dtype="int32"),
        Point("topk_weights", "weights of these experts, as the router gives them", "top_k", dtype="float32"),
        Point("mlp_out", "mlp(ln2): down_proj(mlp_post), or the weighted sum of the experts"),
        Point("resid_final", "the residual stream after the last layer, before the final norm", per_layer=False),
        Point("final_ln", "norm(resid_final)", per_layer=False),
    )
}

#: Points that a model lacks are omitted. ``full`` is every point, each stored once: it has the hidden states as
#: ``resid_pre`` and ``resid_final``.
PRESETS: dict[str, tuple[str, ...]] = {
    "hidden-states": (HIDDEN_STATES,),
    "attention": ("q", "k", "v", "z", "attn_out"),
    "mlp": ("ln2", "mlp_post", "router_logits", "topk_ids", "topk_weights", "mlp_out"),
    "residual": ("embed", "resid_pre", "resid_mid", "resid_final"),
    "full": tuple(name for name, p in POINTS.items() if p.alias_of is None and name != HIDDEN_STATES),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The points that an engine captures.

    Attributes:
        points: for each stored point its layers, ascending. A point that exists once in a model has the layer 0.
        aliases: the requested name of a stored point, if it differs.
    """

    points: dict[str, tuple[int, ...]]
    aliases: dict[str, str]


def plan_capture(capture: Mapping[str, Any], num_layers: int, has: Mapping[str, Collection[int]]) -> Plan:
    """Resolve ``capture: {points: {NAME: LAYERS}}`` or ``{preset: NAME}`` for one model.

    ``LAYERS`` is a list of layers, one layer, ``last``, or ``all``. Negative layers count from the end.

    Args:
        capture: the user's setting.
        num_layers: the model's number of decoder layers.
        has: for each point of the model, the layers that have it (``structure.Structure.has``).

    Raises:
        ConfigError: an unknown key, preset or point, a layer out of range or given twice, or a point that this model,
            or one of the chosen layers, does not have.
    """
    if set(capture) not in ({"points"}, {"preset"}):
        raise ConfigError(
            f"capture: expected either points or preset, got {', '.join(sorted(capture)) or 'nothing'}. Set one of them"
        )
    if "preset" in capture:
        return Plan(_preset(capture["preset"], has), {})
    chosen = capture["points"]
    if not isinstance(chosen, Mapping) or not chosen:
        raise ConfigError(f"capture.points: expected a table such as {{q: [0, 15]}}, got {chosen!r}. Name a point")
    points: dict[str, set[int]] = {}
    aliases: dict[str, str] = {}
    for name, layers in chosen.items():
        point = POINTS.get(name)
        if point is None:
            raise ConfigError(f"capture.points: expected names among {', '.join(POINTS)}, got {name!r}. Correct it")
        stored = point.alias_of or name
        if stored != name:
            aliases[name] = stored
        points.setdefault(stored, set()).update(_layers(point, layers, num_layers, has.get(stored, ())))
    return Plan({name: tuple(sorted(points[name])) for name in POINTS if name in points}, aliases)


def _preset(name: object, has: Mapping[str, Collection[int]]) -> dict[str, tuple[int, ...]]:
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"capture.preset: expected one of {', '.join(PRESETS)}, got {name!r}. Correct it")
    return {p: tuple(sorted(has[p])) for p in POINTS if p in PRESETS[name] and has.get(p)}


def _layers(point: Point, spec: object, num_layers: int, has: Collection[int]) -> set[int]:
    name = point.name
    if name == HIDDEN_STATES:
        num_layers += 1
    if not has:
        raise ConfigError(f"capture.points.{name}: expected a point of this model, got a point that it lacks. Omit it")
    if spec == "all":
        return set(has)
    if not point.per_layer:
        raise ConfigError(f"capture.points.{name}: expected all (the model has this point once), got {spec!r}. Set all")
    items: Sequence[object] = (
        [spec] if isinstance(spec, (int, str)) else spec if isinstance(spec, (list, tuple)) else []
    )
    layers = [_layer(name, item, num_layers) for item in items]
    if not layers or len(set(layers)) < len(layers):
        raise ConfigError(f"capture.points.{name}: expected each layer once, or all, got {spec!r}. Correct it")
    if lacking := sorted(set(layers) - set(has)):
        raise ConfigError(
            f"capture.points.{name}: expected layers among {sorted(has)}, got {lacking}, which lack this point. "
            "Omit these layers"
        )
    return set(layers)


def _layer(name: str, item: object, num_layers: int) -> int:
    if item == "last":
        return num_layers - 1
    if type(item) is not int or not -num_layers <= item < num_layers:  # ``type`` excludes True and False
        raise ConfigError(
            f"capture.points.{name}: expected layers 0 to {num_layers - 1}, -1 to {-num_layers} from the end, last, or "
            f"all, got {item!r}. Correct it"
        )
    return item % num_layers


def shard_of(point: str, rank: int, ranks: int, kv_heads: int) -> int | None:
    """Return the index of the part of a row that ``rank`` stores, or None if an earlier rank has the same numbers.

    Args:
        ranks: tensor-parallel size.
        kv_heads: key-value heads of the whole model. With fewer heads than ranks, several ranks have the same head.
    """
    if not POINTS[point].sharded:
        return 0 if rank == 0 else None
    copies = max(1, ranks // kv_heads) if POINTS[point].width == "kv" else 1
    return rank // copies if rank % copies == 0 else None
