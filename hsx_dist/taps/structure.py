"""Find the modules of a loaded vLLM model that have the points, by the modules' attributes, not by the model's class.

Nothing here imports vLLM. A model that does not fit is refused with an error that names the expected module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from hsx_dist.errors import ConfigError

#: Source of a row: a module's output, its input, the residual stream at a norm, or the result of a router.
RowSource = Literal["output", "input", "stream", "ids", "weights"]


@dataclass(frozen=True, slots=True)
class Read:
    """The source of one layer's rows of a point: ``width`` columns from ``start`` of ``source`` of ``module``."""

    module: Any
    source: RowSource
    width: int
    start: int = 0
    #: Length of a head, if a row consists of heads.
    head: int | None = None


@dataclass(slots=True)
class Structure:
    """A model's points."""

    num_layers: int
    reads: dict[str, dict[int, Read]] = field(default_factory=dict)
    #: By point: the reason if this model has the point but it cannot be captured.
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def has(self) -> dict[str, set[int]]:
        """Return the layers that have each point."""
        return {point: set(layers) for point, layers in self.reads.items()}

    def add(self, point: str, layer: int, read: Read) -> None:
        """Record the source of ``point`` in ``layer``.

        Raises:
            ConfigError: another layer's row has another width.
        """
        of_point = self.reads.setdefault(point, {})
        for other, first in of_point.items():
            if first.width != read.width:
                raise _error(f"{point}: {first.width} numbers a row, as in layer {other}", read.width, layer)
            break
        of_point[layer] = read


def find_structure(model: nn.Module, hidden: int, tensor_parallel: int = 1, *, embeds_first: bool = False) -> Structure:
    """Find the points of ``model``.

    Args:
        model: as vLLM loads it.
        hidden: the model's hidden size.
        tensor_parallel: the number of ranks.
        embeds_first: vLLM computes embeddings before the model's forward pass, where no tap can write.

    Raises:
        ConfigError: a module or shape is not supported; the message names the expected one.
    """
    decoder = _decoder(model)
    found = Structure(len(decoder.layers))
    if embeds_first:
        found.refused["embed"] = "expected no images and no prompt embeddings, got an engine that accepts them"
    else:
        found.add("embed", 0, Read(decoder.embed_tokens, "output", hidden))
    windows = set()
    for i, layer in enumerate(decoder.layers):
        _norms(found, layer, i, hidden)
        attention = _child(layer, i, "attention", ("qkv_proj", "o_proj", "attn"))
        windows.add(getattr(attention.attn, "sliding_window", None))
        _attention(found, attention, i, hidden, tensor_parallel)
        _mlp(found, layer, i, hidden, tensor_parallel)
    if len(windows) > 1:
        raise _error("the same attention window in all layers (one group of cache blocks)", sorted(map(str, windows)))
    found.add("resid_final", 0, Read(decoder.norm, "stream", hidden))
    found.add("final_ln", 0, Read(decoder.norm, "output", hidden))
    for i, read in (*found.reads["resid_pre"].items(), (found.num_layers, found.reads["resid_final"][0])):
        found.add("hidden_states", i, read)
    return found


def _decoder(model: nn.Module) -> Any:
    found = [m for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList)]
    if len(found) != 1:
        raise _error("one module with layers", f"{len(found)} in {type(model).__name__}")
    for name in ("embed_tokens", "norm"):
        if not isinstance(getattr(found[0], name, None), nn.Module):
            raise _error(f"a module {name} next to layers", f"none in {type(found[0]).__name__}")
    return found[0]


def _child(layer: nn.Module, i: int, what: str, names: tuple[str, ...], *others: tuple[str, ...]) -> Any:
    options = (names, *others)
    found = [m for m in layer.children() if any(all(hasattr(m, n) for n in option) for option in options)]
    if len(found) != 1:
        wanted = " or ".join(", ".join(option) for option in options)
        raise _error(f"one {what} module with {wanted}", f"{len(found)} in {type(layer).__name__}", i)
    return found[0]


def _norms(found: Structure, layer: nn.Module, i: int, hidden: int) -> None:
    names = [name for name, m in layer.named_children() if "norm" in type(m).__name__.lower()]
    if sorted(names) != ["input_layernorm", "post_attention_layernorm"]:
        raise _error("the norms input_layernorm and post_attention_layernorm", names, i)
    for norm, stream, normed in (
        ("input_layernorm", "resid_pre", "ln1"),
        ("post_attention_layernorm", "resid_mid", "ln2"),
    ):
        module = getattr(layer, norm)
        weight = getattr(module, "weight", None)
        if weight is not None and tuple(weight.shape) != (hidden,):
            raise _error(f"{norm} of {hidden} numbers", tuple(weight.shape), i)
        found.add(stream, i, Read(module, "stream", hidden))
        found.add(normed, i, Read(module, "output", hidden))


def _attention(found: Structure, attention: Any, i: int, hidden: int, ranks: int) -> None:
    qkv, out = attention.qkv_proj, attention.o_proj
    for name in ("num_heads", "num_kv_heads", "head_size"):
        if not isinstance(getattr(qkv, name, None), int):
            raise _error(f"qkv_proj.{name}", f"none in {type(qkv).__name__}", i)
    dim = qkv.head_size
    q, kv = qkv.num_heads * dim, qkv.num_kv_heads * dim
    _shape(i, "qkv_proj's output", q + 2 * kv, getattr(qkv, "output_size_per_partition", None))
    _shape(i, "o_proj's input", q, getattr(out, "input_size_per_partition", None))
    _shape(i, "o_proj's output", hidden, getattr(out, "output_size", None))
    _reduced(getattr(out, "reduce_results", False), "o_proj", i, ranks)
    for point, start, width in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
        found.add(point, i, Read(qkv, "output", width, start, dim))
    for point, width in (("q_norm", q), ("k_norm", kv)):
        if isinstance(norm := getattr(attention, point, None), nn.Module):
            _head_norm(found, norm, point, i, width, dim)
    found.add("z", i, Read(attention.attn, "output", q, 0, dim))
    found.add("attn_out", i, Read(out, "output", hidden))


def _head_norm(found: Structure, norm: Any, point: str, i: int, width: int, dim: int) -> None:
    """Add a norm of each head. Refuse a norm over all heads: several ranks gather its rows, which are no shards."""
    weight = getattr(norm, "weight", None)
    if weight is not None and tuple(weight.shape) != (dim,):
        found.refused[point] = f"expected a norm of each head, {dim} numbers, got one of {tuple(weight.shape)}"
    else:
        found.add(point, i, Read(norm, "output", width, 0, dim))


def _mlp(found: Structure, layer: nn.Module, i: int, hidden: int, ranks: int) -> None:
    mlp = _child(layer, i, "MLP", ("down_proj",), ("experts", "gate"))
    found.add("mlp_out", i, Read(mlp, "output", hidden))
    if hasattr(mlp, "experts"):
        _moe(found, mlp, i, ranks)
        return
    down = mlp.down_proj
    _shape(i, "down_proj's output", hidden, getattr(down, "output_size", None))
    _reduced(getattr(down, "reduce_results", False), "down_proj", i, ranks)
    if type(getattr(down, "quant_method", None)).__name__ == "UnquantizedLinearMethod":
        found.add("mlp_post", i, Read(down, "input", down.input_size_per_partition))
    else:
        found.refused["mlp_post"] = "the input of a quantised down_proj may be quantised"


def _moe(found: Structure, moe: Any, i: int, ranks: int) -> None:
    experts = getattr(moe.gate, "output_size", None)
    if not isinstance(experts, int):
        raise _error("gate.output_size", f"none in {type(moe.gate).__name__}", i)
    found.add("router_logits", i, Read(moe.gate, "output", experts))
    router, config = getattr(moe.experts, "router", None), getattr(moe.experts, "moe_config", None)
    _reduced(not getattr(config, "skip_final_all_reduce", False), "experts", i, ranks)
    top_k = getattr(config, "experts_per_token", None)
    if not callable(getattr(router, "select_experts", None)) or not isinstance(top_k, int):
        reason = f"expected experts.router.select_experts and experts.moe_config, got {type(moe.experts).__name__}"
    elif getattr(moe.experts, "is_monolithic", False):
        reason = "the kernel of these experts computes the routing, so that no tap can read it"
    else:
        found.add("topk_ids", i, Read(router, "ids", top_k))
        found.add("topk_weights", i, Read(router, "weights", top_k))
        return
    found.refused |= dict.fromkeys(("topk_ids", "topk_weights"), reason)


def _shape(layer: int, what: str, wanted: int, got: object) -> None:
    if got != wanted:
        raise _error(f"{what} of {wanted} numbers", got, layer)


def _reduced(reduced: bool, name: str, layer: int, ranks: int) -> None:
    """Refuse an output that is not reduced over several ranks: it is a part of a sum."""
    if ranks > 1 and not reduced:
        raise _error(f"{name} with reduce_results", "partial sums", layer)


def _error(wanted: str, got: object, layer: int | None = None) -> ConfigError:
    where = "" if layer is None else f" in layer {layer}"
    return ConfigError(f"taps: expected {wanted}{where}, got {got}. Use source: cache for this model")


def modules_of(structure: Structure, points: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int, int, Read]]:
    """Yield, for each chosen point and layer: the point, the layer's position among its chosen layers, the layer, the
    read."""
    for point, layers in points.items():
        for at, layer in enumerate(layers):
            yield point, at, layer, structure.reads[point][layer]
