"""``AttentionPatterns``: which tokens each head attends to, from stored queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.format.json_objects import MemberCheck, anything, object_of, or_null
from hsx_dist.model_parts.config_numbers import count, positive
from hsx_dist.model_parts.model_files import ModelFiles
from hsx_dist.model_parts.rotary import rotate, rotation
from hsx_dist.reading.column import StoredPoint
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Sample
from hsx_dist.reading.whole import require_whole

#: No model has more. A head has tokens x tokens weights, but may take one number of a stored row.
_MOST_HEADS = 1024
#: Points before and after the norm of each head.
_PLAIN, _NORMED = ("q", "k"), ("q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a family of models computes the patterns from ``q`` and ``k``.

    ``head_norm``: an RMSNorm of each head, with one weight for all heads. ``scale``: scale of the scores; ``head_dim``
    means one over its square root. ``theta``: default base of the rotary positions.
    """

    head_norm: bool = False
    scale: Literal["head_dim", "attention_multiplier"] = "head_dim"
    theta: float = 10_000.0


#: ``model_type`` of the language model → its rule. A test holds each against the classes of transformers.
ATTENTION_RULES: dict[str, AttentionRule] = {
    **dict.fromkeys(("arcee", "gemma", "llama", "mistral", "phi3", "qwen2", "qwen2_moe", "seed_oss"), AttentionRule()),
    **dict.fromkeys(("mixtral", "solar_open"), AttentionRule(theta=1_000_000.0)),
    **dict.fromkeys(("dots1", "qwen3", "qwen3_moe"), AttentionRule(head_norm=True)),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), AttentionRule(scale="attention_multiplier")),
}

_MEMBERS: dict[str, MemberCheck] = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), or_null(count)),
    "attention_multiplier": or_null(positive),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), or_null(object_of(anything))),
}


class AttentionPatterns:
    """Attention of stored samples, from the points ``q`` and ``k`` and the configuration of their model.

    ``config.json`` has the rotary positions and the scale. For a family with a norm of each head (Qwen3), the points
    ``q_norm`` and ``k_norm`` are read if the sample has them. Otherwise torch reads the norm's weights from the model.

    Args:
        model: a run whose model is the built-in one or an id of the Hugging Face hub; or a model's folder or id. A run
            never names a folder.

    Raises:
        ConfigError: the model cannot be loaded; its family's attention is not one of ``ATTENTION_RULES``.
        FormatError: a file of the model is damaged.

    Example:
        >>> points = open_run("runs/points")
        >>> patterns = AttentionPatterns(points)
        >>> patterns.layers(points.at(0))
        (15,)
    """

    def __init__(self, model: Run | str) -> None:
        if isinstance(model, str):
            self._files = ModelFiles(None, model, _MEMBERS)
        else:
            self._files = ModelFiles(model, None, _MEMBERS)
        self.model = self._files.model
        kind = self._files.config.get("model_type")
        rule = ATTENTION_RULES.get(kind or "")
        if rule is None:
            raise ConfigError(
                f"{self.model}: expected a model whose attention hsx_dist computes, one of the types "
                f"{', '.join(sorted(ATTENTION_RULES))}; got model_type {kind!r:.100}. Compute it with "
                "the model's own code"
            )
        self._rule = rule

    def layers(self, sample: Sample) -> tuple[int, ...]:
        """Return the layers of the sample that have the points for a pattern."""
        return stored_layers(sample, *self._pairs())

    def pattern(self, sample: Sample, layer: int, max_tokens: int = 128) -> np.ndarray[Any, Any]:
        """Compute the attention of the sample's first ``max_tokens`` tokens: float32 ``[heads, n, n]``.

        ``[h, i, j]`` is how much token *i* attends to token *j* in head *h*. Each row sums to 1; later tokens are 0. A
        token attends to earlier tokens only, so the omitted tokens do not change the result.

        Raises:
            ConfigError: the sample lacks ``q`` or ``k`` of the layer, lacks tokens before its last one, or has other
                heads than the model. Or the model's attention window is shorter than the tokens.
            FormatError: stored bytes are wrong; ``IntegrityError``: they changed.

        Example:
            >>> patterns.pattern(points.at(0), layer=15, max_tokens=8).shape
            (9, 8, 8)
        """
        self._check(sample)
        tokens = min(max_tokens, sample.num_tokens)
        if max_tokens < 1:
            raise ConfigError(f"max_tokens: expected at least 1, got {max_tokens}")
        window = self._files.config.get("sliding_window")  # 0 or null: none
        if isinstance(window, int) and 0 < window < tokens:
            raise ConfigError(
                f"max_tokens: expected at most the model's attention window of {window}, got {tokens}. Lower max_tokens"
            )
        q, k = self._queries_and_keys(sample, layer, tokens)
        turns = rotation(self.model, self._files.config, q.shape[-1], tokens, self._rule.theta)
        q, k = (rotate(rows, turns).swapaxes(0, 1) for rows in (q, k))
        scale = q.shape[-1] ** -0.5
        if self._rule.scale == "attention_multiplier":
            scale = self._files.config.get("attention_multiplier") or 1.0
        with np.errstate(over="ignore", invalid="ignore"):  # non-finite rows give non-finite patterns
            scores = (q * np.float32(scale)) @ k.repeat(len(q) // len(k), axis=0).swapaxes(1, 2)
            scores = np.where(np.tri(tokens, dtype=bool), scores, np.float32("-inf"))
            weights: np.ndarray[Any, Any] = np.exp(scores - scores.max(-1, keepdims=True))
            return weights / weights.sum(-1, keepdims=True)

    def _pairs(self) -> tuple[tuple[str, str], ...]:
        return (_NORMED, _PLAIN) if self._rule.head_norm else (_PLAIN,)

    def _queries_and_keys(self, sample: Sample, layer: int, tokens: int) -> list[np.ndarray[Any, Any]]:
        """Read queries and keys before the rotary positions, float32 ``[tokens, heads, dim]`` each."""
        names = next((pair for pair in self._pairs() if layer in stored_layers(sample, pair)), _PLAIN)
        points = sample.points
        if all(name in points for name in names):
            self._check_heads(*(points[name] for name in names))
        rows = [np.asarray(sample.point(name, layer, (0, tokens), "numpy"), np.float32) for name in names]
        if not self._rule.head_norm or names == _NORMED:
            return rows
        weights = [f"model.layers.{layer}.self_attn.{name}.weight" for name in _NORMED]
        return [self._head_norm(x, weight) for x, weight in zip(rows, weights, strict=True)]

    def _head_norm(self, rows: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        eps = self._files.config.get("rms_norm_eps")
        if eps is None:
            raise ConfigError(f"{self.model}: expected rms_norm_eps in its config.json, got none. Name another model")
        weight = self._files.tensor((rows.shape[-1],), name).float().numpy()
        normed: np.ndarray[Any, Any] = (
            rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + np.float32(eps)) * weight
        )
        return normed

    def _check(self, sample: Sample) -> None:
        self._files.num_layers_of(sample)
        require_whole(sample.key, sample.meta)

    def _check_heads(self, q: StoredPoint, k: StoredPoint) -> None:
        heads = self._files.config.get("num_attention_heads")
        groups = self._files.config.get("num_key_value_heads") or heads
        whole = (
            0 < k.heads <= q.heads <= _MOST_HEADS and not q.heads % k.heads and q.width // q.heads == k.width // k.heads
        )
        if not whole or (heads or q.heads, groups or k.heads) != (q.heads, k.heads):
            raise ConfigError(
                f"{self.model}: expected points of {heads} query and {groups} key heads, of one size, got {q.heads} "
                f"heads in {q.width} numbers and {k.heads} in {k.width}. Name the run's model (--model)"
            )


def stored_layers(sample: Sample, *pairs: tuple[str, str]) -> tuple[int, ...]:
    """Return the layers of which a sample has queries and keys: both points of any of the ``pairs``."""
    points = sample.points
    found: set[int] = set()
    for first, second in pairs or (_PLAIN, _NORMED):
        if first in points and second in points:
            found |= set(points[first].layers) & set(points[second].layers)
    return tuple(sorted(found))
