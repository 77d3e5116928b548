"""``speculators``: an Arrow data set of tokens and masks, with states in ``hidden_states/hs_{row}.safetensors``.

The format of speculators 0.9: its ``ArrowDataset`` flattens all layers but the last. The last layer, before the final
norm, is the verifier's last state. EAGLE-3, P-EAGLE and MTP read these files; MTP reads only the last state.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hsx_dist.errors import ConfigError, install_extra
from hsx_dist.exporting.arrow_folder import write_folder
from hsx_dist.exporting.base import Exporter, ExportOptions, any_layers, need, num_layers_of, stored_layers
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.groups import groups
from hsx_dist.reading.run import Run

#: The most rows of a record batch of the Arrow data set.
_ROWS_PER_BATCH = 1000


class SpeculatorsExporter(Exporter):
    """Row *i* of the Arrow data set is the run's *i*-th sample: ``input_ids``, ``loss_mask`` (0/1), ``seq_len``."""

    per_file = 1
    last_file = "state.json"

    def __init__(self, run: Run, options: ExportOptions) -> None:
        if importlib.util.find_spec("datasets") is None:
            raise ConfigError(f"speculators: expected Hugging Face datasets, got none. {install_extra('speculators')}")
        last = num_layers_of(run, options)
        # MTP reads only the last state, so its runs may have no other layer.
        alone = options.aux_layers is None and stored_layers(run) == (last,)
        self._aux = () if alone else any_layers(run, options, last, "speculators")
        self.layers = need(run, (*self._aux, last), "speculators")
        self._loss_mask = options.loss_mask

    def file(self, first: int) -> str:
        return f"hidden_states/hs_{first}.safetensors"

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        from safetensors.torch import save_file

        [item] = items
        save_file({"hidden_states": item["hidden_states"].contiguous(), "token_ids": item["input_ids"]}, path)

    def finish(self, run: Run, new: Path) -> None:
        from datasets import Features, Sequence, Value
        from datasets.arrow_writer import ArrowWriter

        def rows() -> Iterator[dict[str, Any]]:
            for item in HiddenStatesDataset(run, layers=[], loss_mask=self._loss_mask, rank=0, world_size=1):
                ids, mask = item["input_ids"].numpy(), item["loss_mask"].long().numpy()
                yield {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)}

        features = Features(
            {"input_ids": Sequence(Value("int64")), "loss_mask": Sequence(Value("int64")), "seq_len": Value("int64")}
        )
        name = "data-00000-of-00001.arrow"
        with ArrowWriter(path=str(new / name), features=features) as writer:
            for group in groups(rows(), _ROWS_PER_BATCH):
                writer.write_batch({column: [row[column] for row in group] for column in features})
            writer.finalize()
        write_folder(new, [name], features, run.id, "torch")

    def statement(self) -> dict[str, Any]:
        return {
            "hidden_states": f"[T, {len(self.layers)}, H], layers {list(self.layers)}: auxiliary ones, then the last "
            "before the final norm, as speculators wants it",
            "aux_hidden_state_layer_ids": list(self._aux),
            "layers": list(self.layers),
            "loss_mask": "int64 0/1, in the Arrow data set",
        }
