"""``LogitLens``: next-token logits of stored samples, from their states and the end of their model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hsx_dist.errors import ConfigError
from hsx_dist.model_parts.model_end import ModelEnd
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.arrays import resolve_framework
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Sample, Tokens

#: Of states that are read at once.
_READ_BYTES = 64 << 20
_NORMED, _LAST, _FIRST, _ENTERING = "final_ln", "resid_final", "embed", "resid_pre"
#: The points that have the residual stream, and what the final norm makes of it.
_STREAM = (HIDDEN_STATES, _FIRST, _ENTERING, "resid_mid", _LAST, _NORMED)


class TopTokens(NamedTuple):
    """``ids``: token ids, int64; ``logprobs``: natural logarithms of their probabilities, float32. The last axis is the
    rank, the most likely token first."""

    ids: Any
    logprobs: Any


class LogitLens:
    """Next-token logits of stored samples, by the final norm and ``lm_head`` of their model, on the CPU.

    Needs torch. Of the model, ``config.json`` and two or three tensors are read, and no code::

        lens = LogitLens(run)
        ids, logprobs = lens.top_k(run[key], 5)  # [tokens, 5] each

    Without a ``point`` and a layer, the logits are the model's own: from ``final_ln`` if the sample has it, else from
    ``resid_final`` or the hidden states' last layer through the final norm. Other layers go through the same norm. The
    layers of ``hidden_states`` count from 0 (the embeddings) to N; if a sample has ``resid_pre`` and ``resid_final``
    instead, these are read by the same ids.

    States are read, and logits computed, in blocks of tokens: memory holds the head, a block of states and a block of
    logits, however long a sample is.

    Args:
        model: a run, for its own model if that is the built-in one or an id of the Hugging Face hub; or the model's
            folder or id. A run never names a folder.

    Raises:
        ConfigError: torch is not installed; the model cannot be loaded; its family's norm or logits are not known.
        FormatError: a file of the model is damaged.
    """

    def __init__(self, model: Run | str) -> None:
        resolve_framework("torch")
        self._end = ModelEnd(None, model) if isinstance(model, str) else ModelEnd(model)

    @property
    def model(self) -> str:
        """The folder or id whose head is used."""
        return self._end.model

    def blocks(
        self, sample: Sample, *, point: str | None = None, layer: int | None = None, tokens: Tokens | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield the logits in blocks: the place of a block's first token in the sample, and float32 ``[t, V]``.

        Args:
            point: of the residual stream: ``hidden_states``, ``embed``, ``resid_pre``, ``resid_mid``, ``resid_final``
                or ``final_ln``.
            layer: of the point; without a ``point``, as in ``hidden_states``.
            tokens: a slice or ``(start, stop)``; default: all.

        Raises:
            ConfigError: the sample has no such point or layer; it is of another model; the tokens are no range.
            FormatError: stored bytes are not what they must be; ``IntegrityError``: they changed.
        """
        name, at = self._place(sample, point, layer)
        for start, states in _states(sample, name, at, tokens):
            for logits in self._end.logits(states, normed=name == _NORMED):
                yield start, logits
                start += len(logits)

    def logits(self, sample: Sample, tokens: Tokens, *, point: str | None = None, layer: int | None = None) -> Any:
        """All logits of a range of tokens: float32 ``[n, V]``, which must fit in memory. Arguments and errors as
        ``blocks``'."""
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
        """The ``k`` most likely next tokens of each position; entry *t* is of token *t + 1*.

        Args:
            layers: of the point, in the order wanted: results are ``[n, L, k]``. ``None``: one layer, ``[n, k]``.

        Other arguments and errors as ``blocks``'.
        """
        import torch

        if k < 1:
            raise ConfigError(f"k: expected at least 1, got {k}")
        if layers is None:
            return self._top(sample, k, self._place(sample, point, None), tokens)
        places = [self._place(sample, point, layer) for layer in layers]
        if not places:
            raise ConfigError("layers: expected at least one, got none. Leave the argument out for the last")
        found = [self._top(sample, k, place, tokens) for place in places]
        return TopTokens(*(torch.stack(part, 1) for part in zip(*found, strict=True)))

    def _top(self, sample: Sample, k: int, place: tuple[str, int], tokens: Tokens | None) -> TopTokens:
        import torch

        name, layer = place
        blocks = _states(sample, name, layer, tokens)
        found = [self._end.top_k(states, k, normed=name == _NORMED) for _, states in blocks]
        return TopTokens(*(torch.cat(part) for part in zip(*found, strict=True)))

    def _place(self, sample: Sample, point: str | None, layer: int | None) -> tuple[str, int]:
        """The point and layer to read."""
        stored, last = sample.points, self._end.files.num_layers_of(sample)
        if point is None and layer is None:
            point = next((name for name in (_NORMED, _LAST) if name in stored), HIDDEN_STATES)
        elif point is None:
            point = HIDDEN_STATES
            if HIDDEN_STATES not in stored:
                point, layer = (_LAST, 0) if layer == last else (_ENTERING, layer)
        if point not in _STREAM:
            raise ConfigError(f"point: expected one of the residual stream, {', '.join(_STREAM)}, got {point!r}")
        if layer is None:
            if point in (_ENTERING, "resid_mid"):
                raise ConfigError(f"layer: expected one of point {point!r}, got none. Name it")
            layer = last if point == HIDDEN_STATES else 0
        if layer is None:
            raise ConfigError(f"{self.model}: expected num_hidden_layers in its config.json, got none. Name the layer")
        return point, layer


def _states(sample: Sample, point: str, layer: int, tokens: Tokens | None) -> Iterator[tuple[int, Any]]:
    """States ``[t, H]`` in blocks that begin where nothing is decoded twice, and the place of the first token."""
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
