"""``saelens``: SAELens' cached activations, an Arrow data set of one hook and one fixed context.

A row has a column with the hook's name, ``[context, H]``, and ``token_ids`` ``[context]`` int32. SAELens has no mask,
so only complete contexts are written. No context has tokens of two samples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.exporting.arrow_folder import write_folder
from hsx_dist.exporting.base import Exporter, ExportOptions
from hsx_dist.layers import hook_of_layer
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading import groups
from hsx_dist.reading.hooks import hook_place
from hsx_dist.reading.run import Run

#: The most contexts of a record batch.
_ROWS_PER_BATCH = 64


class SaeLensExporter(Exporter):
    """Files for SAELens' ``ActivationsStore`` with ``cached_activations_path``.

    The options name the hook, or one layer that determines it. States are float32, because Arrow has no bfloat16.
    ``ActivationsStore`` converts them to its own ``dtype``.
    """

    points: tuple[str, ...] | None = ()  # not None, so that a run without hidden states is not refused
    rows_alone = True  # SAELens mixes the rows of all contexts

    last_file = "state.json"

    def __init__(self, run: Run, options: ExportOptions) -> None:
        if importlib.util.find_spec("datasets") is None:
            raise ConfigError("saelens: expected Hugging Face datasets, got none. Run pip install sae-lens")
        self._hook = _hook_of(run, options)
        self._point, layer = hook_place(run, self._hook)
        self.points = None if self._point == HIDDEN_STATES else (self._point,)
        self.layers = (layer,)
        self.per_file = options.samples_per_file
        self._context = options.context
        self._width = run.at(0).points[self._point].width
        if run.index.tokens.max() < self._context:
            raise ConfigError(
                f"context: expected samples of {self._context} tokens, got shorter ones. Set a smaller context "
                "(--context)"
            )

    def file(self, first: int) -> str:
        return f"data-{first // self.per_file:05d}.arrow"

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        from datasets.arrow_writer import ArrowWriter

        rows = max(1, min(_ROWS_PER_BATCH, groups.GROUP_BYTES // (4 * self._context * self._width)))
        with ArrowWriter(path=str(path), features=self._features(), writer_batch_size=rows) as writer:
            for item in items:
                states = item[self._point][:, 0].flatten(1).float().numpy()
                ids = item["input_ids"].numpy().astype(np.int32)
                for start in range(0, len(ids) - self._context + 1, self._context):
                    context = slice(start, start + self._context)
                    writer.write({self._hook: states[context], "token_ids": ids[context]})
            writer.finalize()

    def finish(self, run: Run, new: Path) -> None:
        # The files are not opened: they may be of others, and Arrow gives their bytes to registered extension types.
        files = [self.file(first) for first in range(0, len(run), self.per_file)]
        write_folder(new, files, self._features(), run.id, None)

    def _features(self) -> Any:
        from datasets import Array2D, Features, Sequence, Value

        shape = (self._context, self._width)
        return Features(
            {self._hook: Array2D(shape, "float32"), "token_ids": Sequence(Value("int32"), length=self._context)}
        )

    def statement(self) -> dict[str, Any]:
        (layer,) = self.layers
        counted = "; SAELens counts after a block, or before one (hook_resid_pre)"
        return {
            "hook_name": self._hook,
            "layer": f"{layer}{counted}" if self.points is None else f"{layer} of the point {self._point}",
            "context_size": self._context,
            "dtype": "float32",
            "left_out": "tokens behind the last whole context of each sample",
            "norm": "none",
            "loss_mask": "none: SAELens has no mask",
        }


def _hook_of(run: Run, options: ExportOptions) -> str:
    """Return the hook of the options, or of their one layer, or of the run's one layer. ``ConfigError``: several."""
    if options.hook is not None and options.aux_layers:
        raise ConfigError("saelens: expected a hook or a layer, got both. Leave out --layers or --hook")
    if options.hook is not None:
        return options.hook
    points = run.at(0).points if len(run) else {}
    stored = points[HIDDEN_STATES].layers if HIDDEN_STATES in points else run.layer_ids
    layers = tuple(options.aux_layers or stored)
    if len(layers) != 1:
        raise ConfigError(
            f"saelens: expected one layer, got {list(layers)}. Name one (--layers 15), or a hook "
            "(--hook blocks.3.hook_mlp_out)"
        )
    return hook_of_layer(layers[0])
