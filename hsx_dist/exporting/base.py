"""The protocol of exporters, their options, and checks that they share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hsx_dist.errors import ConfigError, install_extra
from hsx_dist.format.description import described_layers
from hsx_dist.format.part_request import layer_list
from hsx_dist.layers import resolve_layers
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.arguments import require_positive
from hsx_dist.reading.run import Run
from hsx_dist.text import head

#: The layer ids of every exporter, described in ``export.json``.
LAYER_IDS = (
    "vLLM's: id k is the residual stream that enters decoder layer k, which others call the output of layer k-1; 0 the "
    "embeddings, N (the number of layers) the last output before the final norm"
)


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        aux_layers: vLLM's ids of the auxiliary layers; ``None``: the exporter's default.
        model: folder or Hugging Face id of the model whose final norm and ``lm_head`` are used. Default: the run's
            model, if that is an id of the hub or the built-in model.
        num_layers: the model's number of layers, for runs that do not have it.
        loss_mask: the mask of samples without one: all ``ones``, or ``raise``.
        top_k: tokens per position, for ``topk-logprobs``.
        samples_per_file: for exporters with several samples in a file.
        with_last: add the last state if the exporter omits it by default.
        context: tokens of a context of ``saelens``.
        hook: for ``saelens`` a hook's name, such as ``blocks.3.hook_mlp_out``, in place of ``aux_layers``.

    Raises:
        ConfigError: ``top_k``, ``samples_per_file`` or ``context`` is no integer of at least 1, or ``aux_layers`` is no
            list of integers.

    Example:
        >>> from hsx_dist.exporting import ExportOptions
        >>> options = ExportOptions(aux_layers=[2, 15, 27], loss_mask="raise")
    """

    aux_layers: Sequence[int] | None = None
    model: str | None = None
    num_layers: int | None = None
    loss_mask: Literal["ones", "raise"] = "ones"
    top_k: int = 32
    samples_per_file: int = 1000
    with_last: bool = False
    context: int = 128
    hook: str | None = None

    def __post_init__(self) -> None:
        require_positive(top_k=self.top_k, samples_per_file=self.samples_per_file, context=self.context)
        if self.aux_layers is not None:
            object.__setattr__(self, "aux_layers", layer_list(self.aux_layers, "aux_layers"))


class SampleLeftOut(Exception):
    """The trainer refuses this sample. The message is the reason.

    Raised by ``write`` of exporters with one sample per file. ``export_run`` catches and counts it.
    """


class Exporter(Protocol):
    """Base class of exporters.

    The constructor raises ``ConfigError`` if the trainer cannot use the run. ``export_run`` calls the methods.

    Example:
        >>> from pathlib import Path
        >>> from hsx_dist.exporting import ExportOptions
        >>> from hsx_dist.exporting.vllm import VllmExporter
        >>> exporter = VllmExporter(run, ExportOptions(aux_layers=[15]))
        >>> exporter.layers, exporter.per_file
        ((15,), 1)
        >>> exporter.write([next(iter(HiddenStatesDataset(run, layers=[15])))], Path(exporter.file(0)))
        >>> exporter.finish(run, Path())
        >>> exporter.statement()["layers"]
        [15]
    """

    #: Names of the points that the exporter reads instead of hidden states.
    points: tuple[str, ...] | None = None
    #: vLLM's ids of the layers that it reads of each sample, in this order. For points the decoder layers.
    layers: tuple[int, ...]
    #: Whether rows of a selection of tokens are useful. If not, samples with a selection are refused.
    rows_alone: bool = False
    #: Number of consecutive samples in a file.
    per_file: int
    #: The file of ``finish`` without which trainers read nothing. If it exists, ``finish`` is not called again.
    last_file: str | None = None

    def __init__(self, run: Run, options: ExportOptions) -> None: ...

    def file(self, first: int) -> str:
        """Path, relative to the destination, of the file of samples ``first`` to ``first + per_file``."""

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        """Write the file. ``items``: items of a ``HiddenStatesDataset`` with torch tensors of ``layers``, read lazily.

        ``path``: a new file of the name that ``file`` returned, in a private folder. ``export_run`` moves it.

        Raises:
            SampleLeftOut: the trainer refuses the sample; only exporters with one sample per file.
        """

    def finish(self, run: Run, new: Path) -> None:
        """Write the trainer's files for the whole data set into the empty folder ``new``.

        Called after all files of samples exist in the destination. ``export_run`` moves the new files there, and
        ``last_file`` as the last one.
        """

    def statement(self) -> dict[str, Any]:
        """Return members of ``export.json`` that describe the files for users: layers, norm, mask. JSON types."""


def check_parquet(name: str) -> None:
    """Raise ``ConfigError`` if pyarrow is missing."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{name}: expected the package pyarrow, got none. {install_extra('parquet')}")


def parquet_key(key: str) -> str:
    """Return the key. Raises ``ConfigError`` if it is no valid UTF-8, which Parquet requires."""
    if any("\ud800" <= c <= "\udfff" for c in key):
        raise ConfigError(
            f"key {head(key, 100)!a}: expected valid Unicode, which Parquet requires, got a lone surrogate. "
            "Export to vllm, whose file names escape it, or extract the sample with another key"
        )
    return key


def num_layers_of(run: Run, options: ExportOptions) -> int:
    """Return the model's number of layers. Raises ``ConfigError`` if run and options lack it, or differ."""
    stored = described_layers(run.at(0).about) if len(run) else None
    found = stored if options.num_layers is None else options.num_layers
    if stored is not None and found != stored:
        raise ConfigError(
            f"{run.url}: expected num_layers {stored}, as in its parts, got {found}. Remove num_layers (--num-layers)"
        )
    if not isinstance(found, int):
        raise ConfigError(
            f"{run.url}: expected a run with its model's number of layers, got none. Set num_layers (--num-layers)"
        )
    return found


def require_hidden_states(run: Run, trainer: str) -> None:
    """Raise ``ConfigError`` if the run has points of the model, but no hidden states."""
    points = run.at(0).points if len(run) else {}
    if points and HIDDEN_STATES not in points:
        raise ConfigError(
            f"{run.url}: cannot be exported for {trainer}: expected hidden states, got points {', '.join(points)}. "
            "Extract the run again with layers"
        )


def stored_layers(run: Run) -> tuple[int, ...]:
    """Return the layers of the run's samples."""
    return run.at(0).layer_ids if len(run) else run.layer_ids


def need(run: Run, layers: Sequence[int], trainer: str) -> tuple[int, ...]:
    """Return ``layers`` if the run has them. Otherwise raises ``ConfigError``, which names the missing ones."""
    stored = stored_layers(run)
    missing = [layer for layer in layers if layer not in stored]
    if missing:
        raise ConfigError(
            f"{run.url}: cannot be exported for {trainer}: expected layers {list(layers)} (vLLM's ids), got a run with "
            f"{list(stored)}, without {missing}. Name stored layers with aux_layers (--layers), or extract again"
        )
    return tuple(layers)


def eagle3_layers(run: Run, options: ExportOptions, num_layers: int, trainer: str) -> tuple[int, ...]:
    """Return the three auxiliary layers of the options, by default EAGLE-3's early, middle and late layer."""
    layers = tuple(options.aux_layers or resolve_layers("eagle3", num_layers)[:3])
    if len(layers) != 3:
        raise ConfigError(f"{trainer}: expected three auxiliary layers, got {list(layers)}. Give three (--layers)")
    return need(run, layers, trainer)


def any_layers(run: Run, options: ExportOptions, num_layers: int, trainer: str) -> tuple[int, ...]:
    """Return the auxiliary layers of the options, by default all of the run except the last."""
    layers = tuple(options.aux_layers or [k for k in sorted(stored_layers(run)) if k != num_layers])
    if not layers:
        raise ConfigError(
            f"{trainer}: expected at least one auxiliary layer, got a run with layer {num_layers} only. Extract the "
            "run again with more layers"
        )
    return need(run, layers, trainer)


def layers_before_last(run: Run, options: ExportOptions, num_layers: int, trainer: str) -> tuple[int, ...]:
    """Return ``any_layers``. Raises ``ConfigError`` if one is given twice or is the last layer.

    Trainers that count *after* a layer disagree about the last one: after the final norm with transformers, before it
    with vLLM.
    """
    layers = any_layers(run, options, num_layers, trainer)
    if len(set(layers)) < len(layers):
        raise ConfigError(
            f"{trainer}: expected each auxiliary layer once, got {list(layers)}. Name each once (--layers)"
        )
    if num_layers in layers:
        raise ConfigError(
            f"{trainer}: expected auxiliary layers below {num_layers}, got {list(layers)}. Name others (--layers): "
            f"trainers do not agree whether layer {num_layers} is before or after the final norm"
        )
    return layers


def after_layer(layers: Sequence[int]) -> list[int]:
    """Convert layers to ids that count *after* a layer (SpecForge, transformers' hooks): one less."""
    return [layer - 1 for layer in layers]
