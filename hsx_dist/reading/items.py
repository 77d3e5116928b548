"""One item of a data set: a sample with trainers' names. Only the selected layers and tokens are fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.container_read import Empty
from hsx_dist.format.part_request import checked_layers, point_list, token_range
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.arguments import require_positive
from hsx_dist.reading.arrays import Framework, resolve_framework, to_ids
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import LOSS_MASK, Layers, Sample, Tokens, attached_of, layers_of
from hsx_dist.reading.select import key_hash

#: Bytes of a token's id and mask in an item.
_TOKEN_BYTES = 9
Crop = Literal["start", "end", "random"]


@dataclass(frozen=True)
class ItemSpec:
    """The arrays of an item, and their names.

    - ``layers``: vLLM's ids in the order of the result, for all points or by point. ``None``: all, in stored order.
    - ``tokens``: a range of every sample. Negative numbers count from its end.
    - ``max_tokens``: maximum number of these tokens, cut at the side that ``crop`` names. ``random`` is a window that
      seed, epoch and key determine.
    - ``loss_mask``: for samples without this attached array: ``ones``, or ``raise``. ``off``: items have no mask.
    - ``rename``: name → new name; ``None`` removes it. The name of an attached array adds that array, whole.
    - ``points``: names of points of the model. They replace ``hidden_states`` and ``layer_ids`` in the item.
    """

    layers: Layers | None = None
    tokens: Tokens | None = None
    max_tokens: int | None = None
    crop: Crop = "start"
    loss_mask: Literal["ones", "raise", "off"] = "ones"
    rename: Mapping[str, str | None] = field(default_factory=dict)
    framework: Framework = "auto"
    seed: int = 0
    points: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.points is not None:
            object.__setattr__(self, "points", point_list(self.points))
        object.__setattr__(self, "layers", checked_layers(self.layers))
        if isinstance(self.layers, Mapping) and (unknown := set(self.layers) - set(self.states)):
            raise ConfigError(
                f"layers: expected only names in points, got {sorted(map(str, unknown))}. Add these to points"
            )
        token_range(self.tokens, 0)
        if self.crop not in ("start", "end", "random"):
            raise ConfigError(f"crop: expected 'start', 'end' or 'random', got {self.crop!r}. Use one of these")
        if self.max_tokens is not None:
            require_positive(max_tokens=self.max_tokens)
        if self.loss_mask not in ("ones", "raise", "off"):
            raise ConfigError(f"loss_mask: expected 'ones', 'raise' or 'off', got {self.loss_mask!r}. Use one of these")
        resolve_framework(self.framework)
        if not isinstance(self.rename, Mapping) or not all(
            isinstance(name, str) and (new is None or isinstance(new, str)) for name, new in self.rename.items()
        ):
            raise ConfigError(
                f"rename: expected a mapping of names to names or None, got {self.rename!r:.100}. Correct it"
            )
        object.__setattr__(self, "rename", dict(self.rename))
        names = [name for name in self._names if name != LOSS_MASK or self.loss_mask != "off"]
        final = [new for name in (*names, *self._extra) if (new := self.rename.get(name, name))]
        if twice := sorted(name for name, count in Counter(final).items() if count > 1):
            raise ConfigError(
                f"rename: expected a different name for each array, got {', '.join(twice)} for several. Rename one "
                "of them, or remove it with None (null)"
            )

    @property
    def states(self) -> tuple[str, ...]:
        """The names under which items hold states, before renaming: the points, or ``hidden_states``."""
        return tuple(self.points or (HIDDEN_STATES,))

    @property
    def _names(self) -> tuple[str, ...]:
        """Names in an item before renaming."""
        own = ("hidden_states", "layer_ids") if self.points is None else tuple(dict.fromkeys(self.points))
        return ("input_ids", LOSS_MASK, "key", *own)

    @property
    def _extra(self) -> list[str]:
        """Names of the attached arrays in an item, except the loss mask."""
        return [name for name in self.rename if name not in self._names]

    @property
    def attached(self) -> list[str]:
        """Names of all attached arrays that ``make`` loads if the sample has them."""
        return self._extra + ([LOSS_MASK] if self.loss_mask != "off" else [])

    def check_layers(self, run: Run) -> None:
        """Raise ``ConfigError`` if the run lists its layers, and a requested layer is not in the list."""
        if self.points is not None:
            return  # only samples record the layers of their points
        missing = sorted(set(layers_of(self.layers, HIDDEN_STATES) or ()) - set(run.layer_ids))
        if missing and run.layer_ids:
            raise ConfigError(
                f"layers: expected layers of {run.url} among {list(run.layer_ids)}, got {missing}. "
                "Use the layers of Run.layer_ids"
            )

    def span(self, num_tokens: int, key: str, epoch: int) -> tuple[int, int]:
        """The range ``[start, stop)`` to read of a sample of this length and key."""
        start, stop = token_range(self.tokens, num_tokens)
        spare = 0 if self.max_tokens is None else max(0, stop - start - self.max_tokens)
        if self.crop == "random" and spare:
            before = key_hash(f"{self.seed},{epoch},{key}", b"crop") % (spare + 1)
        else:
            before = spare if self.crop == "end" else 0
        return start + before, stop - (spare - before)

    @property
    def cuts(self) -> bool:
        """Whether samples may be read in part."""
        return self.tokens is not None or self.max_tokens is not None

    def state_bytes(self, run: Run, key: str, num_tokens: int, raw_bytes: int) -> int:
        """Bytes of an item's states as stored. Computed from receipts only, without reading the part."""
        start, stop = self.span(num_tokens, key, 0)
        share = (stop - start) / num_tokens
        wanted = layers_of(self.layers, HIDDEN_STATES)
        if wanted is not None and run.layer_ids and self.points is None:
            share *= len(wanted) / len(run.layer_ids)
        return int(raw_bytes * share)

    def nbytes(self, run: Run, key: str, num_tokens: int, raw_bytes: int, stored_bytes: int) -> int:
        """Maximum bytes of memory to fetch and decode a sample: the stored chunks, the states, the ids and the mask.

        Computed from receipts only, without reading the part. Memory for other fetched bytes is not included:
        ``ItemReader.make_of`` holds it.
        """
        wide = 1 if resolve_framework(self.framework) == "torch" else 2  # bf16 becomes float32
        states = self.state_bytes(run, key, num_tokens, raw_bytes)
        start, stop = self.span(num_tokens, key, 0)
        return int(states * (wide + max(1.0, stored_bytes / max(1, raw_bytes)))) + _TOKEN_BYTES * (stop - start)

    def make(self, run: Run, sample: Sample, epoch: int, empty: Empty | None = None) -> dict[str, Any]:
        """Make the item. ``empty``: as for ``Sample.load``.

        Raises as ``Sample.load``, ``ConfigError`` for a missing mask or attached array, and ``FormatError`` if the
        sample has fewer layers than ``run`` lists.
        """
        listed = len(run.layer_ids)
        if self.points is None and self.layers is not None and (stored := len(sample.layer_ids)) < listed:
            # ``nbytes`` divides by the listed layers. Too many of them would let read-ahead exceed its memory.
            raise FormatError(f"{sample.uri}: expected {listed} layers, as in run.json, got {stored}. Run `hsx verify`")
        start, stop = self.span(sample.num_tokens, sample.key, epoch)
        loaded = sample.load(
            *(self.layers, (start, stop), self.framework),
            points=self.points,
            loss_mask=self.loss_mask != "off",
            empty=empty,
        )
        own = (
            {name: loaded[name] for name in ("hidden_states", "layer_ids")} if self.points is None else loaded["points"]
        )
        item = {"input_ids": loaded["token_ids"], **own, "key": sample.key}
        if self.loss_mask != "off":
            item["loss_mask"] = self._mask(sample, loaded)
        for name, array in attached_of(sample, self._extra).items():
            item[name] = to_ids(array, self.framework)  # whole: its first axis may be of anything, such as classes
        return {self.rename.get(name, name) or name: v for name, v in item.items() if self.rename.get(name, name)}

    def _mask(self, sample: Sample, loaded: Mapping[str, Any]) -> Any:
        """The loss mask, bool ``[n]`` for the ``n`` loaded tokens."""
        if LOSS_MASK in loaded:
            return loaded[LOSS_MASK] != 0
        if self.loss_mask == "raise":
            raise ConfigError(
                f"{sample.uri}: expected an attached loss_mask of {sample.key!r}, got none. Set loss_mask to 'ones', "
                "leave out --require-loss-mask, or store masks"
            )
        return to_ids(np.ones(len(loaded["token_ids"]), bool), self.framework)
