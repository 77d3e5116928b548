"""``LogitLens``: next-token logits of stored samples, from their states and their model's final norm and head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hsx_dist.errors import ConfigError
from hsx_dist.model_parts.model_end import ModelEnd
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.arrays import resolve_framework
from hsx_dist.reading.hooks import stream_place
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Sample, Tokens

#: Bytes of states that are read at once.
_READ_BYTES = 64 << 20
_NORMED, _LAST, _FIRST, _ENTERING = "final_ln", "resid_final", "embed", "resid_pre"
#: The points of the residual stream, and ``final_ln``, the final norm's output.
_STREAM = (HIDDEN_STATES, _FIRST, _ENTERING, "resid_mid", _LAST, _NORMED)


class TopTokens(NamedTuple):
    """The most likely next tokens.

    ``ids``: token ids, int64; ``logprobs``: natural logarithms of their probabilities, float32. The last axis is the
    rank, with the most likely token first.

    Example:
        >>> ids, logprobs = LogitLens(run).top_k(sample, 5, tokens=(0, 8))
        >>> ids.shape, logprobs.dtype
        (torch.Size([8, 5]), torch.float32)
    """

    ids: Any
    logprobs: Any


class LogitLens:
    """Next-token logits of stored samples, by the final norm and ``lm_head`` of their model, on the CPU.

    Needs torch. Reads the model's ``config.json`` and two or three tensors, and runs none of its code. V: the size of
    the vocabulary.

    Without a ``point`` and a layer, the logits are those of the model. They are computed from ``final_ln`` if the
    sample has this point. Otherwise the final norm is applied to ``resid_final`` or the last layer of
    ``hidden_states``, as it is to every other layer.

    Layer ids of ``hidden_states`` are 0 (the embeddings) to N. If a sample has ``resid_pre`` or ``resid_final`` of a
    layer instead, the same ids select them.

    States are read, and logits computed, in blocks of tokens. Memory holds the head, a block of states and a block of
    logits, independent of the sample's length.

    Args:
        model: a run whose model is the built-in one or an id of the Hugging Face hub; or a model's folder or id. A run
            never names a folder.

    Raises:
        ConfigError: torch is not installed; the model cannot be loaded; its family's norm or logits are unknown.
        FormatError: a file of the model is damaged.

    Example:
        >>> lens = LogitLens(run)
        >>> lens.model
        'builtin:smollm2-135m-instruct'
    """

    def __init__(self, model: Run | str) -> None:
        resolve_framework("torch")
        self._end = ModelEnd(None, model) if isinstance(model, str) else ModelEnd(model)

    @property
    def model(self) -> str:
        """Folder or id of the model whose head is used."""
        return self._end.model

    def blocks(
        self, sample: Sample, *, point: str | None = None, layer: int | None = None, tokens: Tokens | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield the logits in blocks: the position of a block's first token in the sample, and float32 ``[t, V]``.

        Args:
            point: a point of the residual stream: ``hidden_states``, ``embed``, ``resid_pre``, ``resid_mid``,
                ``resid_final`` or ``final_ln``.
            layer: a layer of the point. Without a ``point``, a layer id of ``hidden_states``.
            tokens: a slice or ``(start, stop)``; default: all.

        Raises:
            ConfigError: the sample has no such point or layer, or is of another model; the tokens are no range.
            FormatError: stored bytes are wrong; ``IntegrityError``: they changed.

        Example:
            >>> [(start, logits.shape) for start, logits in lens.blocks(sample, layer=15, tokens=(4, 8))]
            [(4, torch.Size([4, 49152]))]
        """
        name, at = self._place(sample, point, layer)
        for start, states in _states(sample, name, at, tokens):
            for logits in self._end.logits(states, normed=name == _NORMED):
                yield start, logits
                start += len(logits)

    def logits(self, sample: Sample, tokens: Tokens, *, point: str | None = None, layer: int | None = None) -> Any:
        """Return all logits of a range of tokens: float32 ``[n, V]``, which must fit in memory.

        Arguments and errors: see ``blocks``.

        Example:
            >>> lens.logits(sample, tokens=(0, 8)).shape
            torch.Size([8, 49152])
        """
        import torch

        found = [logits for _, logits in self.blocks(sample, point=point, layer=layer, tokens=tokens)]
        return torch.cat(found)

    def top_k(
        self,
        sample: Sample,
        k: int = 10,
        *,
        point: str | None = None,
        layers: Sequence[int] | None = None,
        tokens: Tokens | None = None,
    ) -> TopTokens:
        """Return the ``k`` most likely next tokens of each position. Entry *t* is for token *t + 1*.

        Args:
            layers: layers of the point, in the order of the result, ``[n, L, k]``. ``None``: one layer, ``[n, k]``.

        Other arguments and errors: see ``blocks``.

        Example:
            >>> lens.top_k(sample, 5, layers=[2, 15, 30], tokens=(0, 8)).ids.shape
            torch.Size([8, 3, 5])
        """
        import torch

        if k < 1:
            raise ConfigError(f"k: expected at least 1, got {k}")
        if layers is None:
            return self._top(sample, k, self._place(sample, point, None), tokens)
        places = [self._place(sample, point, layer) for layer in layers]
        if not places:
            raise ConfigError("layers: expected at least one, got none. Leave the argument out for the last layer")
        found = [self._top(sample, k, place, tokens) for place in places]
        return TopTokens(*(torch.stack(part, 1) for part in zip(*found, strict=True)))

    def _top(self, sample: Sample, k: int, place: tuple[str, int], tokens: Tokens | None) -> TopTokens:
        import torch

        name, layer = place
        blocks = _states(sample, name, layer, tokens)
        found = [self._end.top_k(states, k, normed=name == _NORMED) for _, states in blocks]
        return TopTokens(*(torch.cat(part) for part in zip(*found, strict=True)))

    def _place(self, sample: Sample, point: str | None, layer: int | None) -> tuple[str, int]:
        """Return the point and layer to read."""
        stored, last = sample.points, self._end.files.num_layers_of(sample)
        if point is None and layer is None:
            point = next((name for name in (_NORMED, _LAST) if name in stored), HIDDEN_STATES)
        elif point is None and layer is not None:
            point, layer = stream_place(sample, layer, last)
        if point not in _STREAM:
            raise ConfigError(
                f"point: expected a point of the residual stream, {', '.join(_STREAM)}, got {point!r}. Choose another"
            )
        if layer is None:
            if point in (_ENTERING, "resid_mid"):
                raise ConfigError(f"layer: expected a layer of point {point!r}, got none. Name it")
            layer = last if point == HIDDEN_STATES else 0
        if layer is None:
            raise ConfigError(f"{self.model}: expected num_hidden_layers in its config.json, got none. Name the layer")
        return point, layer


def _states(sample: Sample, point: str, layer: int, tokens: Tokens | None) -> Iterator[tuple[int, Any]]:
    """Yield blocks of states ``[t, H]`` and the position of their first token. No bytes are decoded twice."""
    start, stop = sample.span(tokens)
    if point not in sample.points or start == stop:
        yield start, sample.point(point, layer, (start, stop), "torch")
        return
    chunk_bytes = sample.points[point].width * 4 * sample.chunk_tokens
    step = max(_READ_BYTES // max(chunk_bytes, 1), 1) * sample.chunk_tokens
    while start < stop:
        end = min((start // step + 1) * step, stop)
        yield start, sample.point(point, layer, (start, end), "torch")
        start = end
