"""One sample: its tokens, its layers, and any part of them, whatever the number of objects it lies in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError, FormatError, IntegrityError
from hsx_dist.format.container import Part, SegmentInfo
from hsx_dist.format.container_read import Empty, new_states
from hsx_dist.format.expansion import check_expansion
from hsx_dist.format.loss import Loss
from hsx_dist.format.segments import SegmentProof
from hsx_dist.page import token_hash
from hsx_dist.reading.arrays import Framework, to_ids, to_states

#: Name of the attached array that says which tokens count in training.
LOSS_MASK = "loss_mask"
#: Tokens wanted: a slice (step 1) or ``(start, stop)``; negative numbers count from the sample's end.
Tokens = slice | tuple[int, int]


class Sample:
    """One request's hidden states and token ids. Nothing is fetched before it is asked for."""

    def __init__(
        self, key: str, segments: Sequence[tuple[str, SegmentProof]], open_part: Callable[[str], Part], url: str
    ):
        """``segments``: as ``SampleRecord.segments``; without a ``token_hash`` for an object without a receipt."""
        self.key = key
        self.num_tokens = segments[-1][1].segment.stop
        self._segments = tuple(segments)
        self._open = open_part
        self._url = url.rstrip("/")
        self._infos: dict[int, SegmentInfo] = {}

    def __repr__(self) -> str:
        return f"Sample({self.key!r}, {self.num_tokens} tokens, {self.uri})"

    @property
    def uri(self) -> str:
        """The objects that it lies in, separated by blanks."""
        return " ".join(f"{self._url}/{part}" for part in dict.fromkeys(part for part, _ in self._segments))

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """vLLM's ids of the stored layers: 0 the embeddings, k what enters layer k, N the last output before the
        final norm. Empty for a file that vLLM itself wrote, which does not tell them."""
        return self._info(0).layer_ids

    @property
    def dtype(self) -> str:
        """``bfloat16``, ``float16`` or ``float32``."""
        return self._info(0).dtype

    @property
    def hidden_size(self) -> int:
        return self._info(0).hidden_size

    @property
    def about(self) -> dict[str, Any]:
        """What the object says of where it comes from: model, revision, versions, …"""
        return self._open(self._segments[0][0]).about

    @property
    def loss(self) -> dict[int, Loss]:
        """Layer id → what a lossy codec lost, measured when it was written; empty where nothing was lost.

        Of a sample in several segments the worst one's, which none of its parts exceeds.
        """
        found: dict[int, Loss] = {}
        for i, (part, proof) in enumerate(self._segments):
            self._info(i)
            for layer, loss in self._open(part).loss(proof.slot).items():
                before = found.get(layer, loss)
                found[layer] = Loss(max(before.rms, loss.rms), max(before.worst_token, loss.worst_token))
        return found

    def attached(self) -> dict[str, np.ndarray[Any, Any]]:
        """The small arrays that were stored with the sample, by name; numpy, of the sample as a whole: ``loss_mask``
        (uint8 ``[T]``), with a selection by it ``positions`` (int32 ``[T]``: where the tokens stood), with a mean
        ``request_token_ids`` (int32: over which), and what users attached. Errors as ``load``'s."""
        self._info(0)
        part, proof = self._segments[0]
        return self._open(part).attached(proof.slot)

    @property
    def metadata(self) -> dict[str, Any]:
        """The columns of the input row that were asked for (``input.metadata``), as JSON values."""
        found = self.meta.get("metadata")
        return dict(found) if isinstance(found, dict) else {}

    @property
    def meta(self) -> dict[str, Any]:
        """What its producer said of this sample.

        ``tokens`` (which of the request's tokens these are, where not all: ``start``, ``step``; or ``loss_mask``; or
        ``mean``; and ``of``, their number), ``metadata``,
        ``prompt_tokens``, ``multimodal`` (what vLLM calls the images or sounds behind placeholder tokens),
        ``finish_reason`` (``abort``), ``expires`` (seconds since the epoch), and ``bad``: for each
        segment with non-finite rows or all-zero layers, its tokens and how many of what.
        """
        metas = [(p.segment, self._info(i).segment.meta) for i, (_, p) in enumerate(self._segments)]
        bad = [{"start": s.start, "stop": s.stop, **m["bad"]} for s, m in metas if isinstance(m.get("bad"), dict)]
        first = {k: v for k, v in metas[0][1].items() if k != "bad"}
        return {**first, "bad": bad} if bad else first

    def token_ids(self, framework: Framework = "auto") -> Any:
        """Token ids, int64 ``[T]``."""
        return to_ids(np.concatenate([self._ids(i) for i in range(len(self._segments))]), framework)

    def load(
        self,
        layers: Sequence[int] | None = None,
        tokens: Tokens | None = None,
        framework: Framework = "auto",
        *,
        loss_mask: bool = True,
        empty: Empty | None = None,
    ) -> dict[str, Any]:
        """Fetch, check and decode.

        Args:
            layers: vLLM's layer ids in the order wanted; ``None``: all, as stored.
            tokens: a slice or ``(start, stop)``; negative numbers count from the end.
            framework: ``torch`` (the true dtype), ``numpy`` (bf16 as float32, which is exact), ``auto``: torch where
                it is installed.
            loss_mask: whether a mask that the sample has is fetched, too.
            empty: ``empty(shape, dtype)`` is the memory for the states, a carrier array; default: fresh.

        Returns:
            ``hidden_states`` ``[n, L, H]``, ``token_ids`` int64 ``[n]``, ``layer_ids`` int64 ``[L]``, ``key``,
            ``meta``; and ``loss_mask`` int64 ``[n]``, 0 or 1, where the sample has one.

        Raises:
            ConfigError: there is no such layer; the tokens are no range.
            FormatError: stored bytes are not what they must be; ``IntegrityError``: they changed.
        """
        if isinstance(layers, (int, str)):
            raise ConfigError(f"layers: expected a list of layer ids such as [15], came {layers!r}; put it into a list")
        start, stop = self._span(tokens)
        states, ids, mask = self._load(layers, start, stop, masked=loss_mask, empty=empty)
        wanted = np.array(self.layer_ids if layers is None else layers, np.int64)
        found = {
            "hidden_states": to_states(states, self.dtype, framework),
            "token_ids": to_ids(ids, framework),
            "layer_ids": to_ids(wanted, framework),
            "key": self.key,
            "meta": self.meta,
        }
        if mask is not None:
            found["loss_mask"] = to_ids(mask, framework)
        return found

    def loss_mask(self) -> np.ndarray[Any, Any] | None:
        """Which tokens count in training: int64 ``[T]``, numpy; ``None``, without a request, where there is none."""
        name, proof = self._segments[0]
        part, slot = self._open(name), proof.slot
        return self._mask(part.attached(slot, (LOSS_MASK,))) if LOSS_MASK in part.attached_names(slot) else None

    def _mask(self, attached: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
        if LOSS_MASK not in attached:
            return None
        mask = attached[LOSS_MASK]
        if mask.shape != (self.num_tokens,):
            raise FormatError(f"{self.key}: expected a loss mask of {self.num_tokens} tokens, got shape {mask.shape}")
        return mask.astype(np.int64)

    def load_carrier(
        self, layers: Sequence[int] | None = None, tokens: Tokens | None = None
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """``load``'s states as their bits (unsigned integers of the dtype's width, ``[n, L, H]``), and token ids."""
        states, ids, _ = self._load(layers, *self._span(tokens), masked=False, empty=None)
        return states, ids

    def layer(self, layer_id: int, tokens: Tokens | None = None, framework: Framework = "auto") -> Any:
        """One layer: ``[n, H]``."""
        return self.load([layer_id], tokens, framework)["hidden_states"][:, 0]

    def _load(
        self, layers: Sequence[int] | None, start: int, stop: int, *, masked: bool, empty: Empty | None
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """States, token ids, and where ``masked`` the loss mask, if there is one."""
        first = self._info(0)
        if layers is None and first.layer_ids:
            layers = first.layer_ids  # one order, should segments have several
        spans = [proof.segment for _, proof in self._segments]
        within = [i for i, s in enumerate(spans) if s.start < stop and start < s.stop]
        within = within or [0]  # no tokens: an empty array of the right shape
        out, ids = None, []
        attached: dict[str, np.ndarray[Any, Any]] = {}
        if len(within) > 1:
            num_layers = first.num_layers if layers is None else len(layers)
            # Nothing is fetched yet, and receipts may claim any number of tokens.
            parts = {name: self._open(name) for name in (self._segments[i][0] for i in within)}
            for part in parts.values():
                part.check_size()
            nbytes = (stop - start) * num_layers * first.row_bytes
            check_expansion(nbytes, sum(part.size for part in parts.values()))
            out = (empty or new_states)((stop - start, num_layers, first.hidden_size), first.dtype)
        for i in within:
            (name, proof), s, info = self._segments[i], spans[i], self._info(i)
            if (info.dtype, info.hidden_size) != (first.dtype, first.hidden_size):
                raise FormatError(f"{self.key}: expected segments of {first}, got {info}")
            a, b = max(start, s.start), max(min(stop, s.stop), max(start, s.start))
            states, own, beside = self._open(name).load(
                proof.slot,
                layers=layers,
                tokens=(a - s.start, b - s.start) if a < b else (0, 0),
                out=None if out is None else out[a - start : b - start],
                attached=(LOSS_MASK,) if masked and i == 0 else (),
                empty=empty,
            )
            attached.update(beside)
            self._check_ids(i, own)
            ids.append(own[a - s.start : b - s.start])
        mask = None
        if masked:  # it lies with the first piece, also where only later ones are wanted
            mask = self._mask(attached) if within[0] == 0 else self.loss_mask()
        return states if out is None else out, np.concatenate(ids), None if mask is None else mask[start:stop]

    def _span(self, tokens: Tokens | None) -> tuple[int, int]:
        wanted = slice(None) if tokens is None else tokens if isinstance(tokens, slice) else slice(*tokens)
        start, stop, step = wanted.indices(self.num_tokens)
        if step != 1:
            raise ConfigError(f"tokens: expected consecutive ones, got a step of {step}")
        return start, max(start, stop)

    def _info(self, i: int) -> SegmentInfo:
        info = self._infos.get(i)
        if info is None:
            part, proof = self._segments[i]
            segments = self._open(part).segments
            if proof.slot >= len(segments) or segments[proof.slot].segment != proof.segment:
                raise IntegrityError(
                    f"{self._url}/{part}: expected {proof.segment} at place {proof.slot}, as its receipt says, "
                    f"got {segments[proof.slot].segment if proof.slot < len(segments) else 'nothing'}"
                )
            info = self._infos[i] = segments[proof.slot]
        return info

    def _ids(self, i: int) -> np.ndarray[Any, Any]:
        part, proof = self._segments[i]
        self._info(i)
        ids = self._open(part).token_ids(proof.slot)
        self._check_ids(i, ids)
        return ids

    def _check_ids(self, i: int, ids: np.ndarray[Any, Any]) -> None:
        part, proof = self._segments[i]
        if proof.token_hash and token_hash(ids) != proof.token_hash:
            raise IntegrityError(
                f"{self._url}/{part}: expected token ids of hash {proof.token_hash} for {self.key!r}, as its "
                f"receipt says, got {token_hash(ids)}"
            )
