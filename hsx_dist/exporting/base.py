"""What an exporter is: which layers it needs, and how it writes one sample."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hsx_dist.errors import ConfigError
from hsx_dist.layers import resolve_layers
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.run import Run

#: How every exporter names layers, said in ``export.json``.
LAYER_IDS = (
    "vLLM's: id k is the residual stream that enters decoder layer k, which others call the output of layer k-1; 0 the "
    "embeddings, N (the number of layers) the last output before the final norm"
)


@dataclass(frozen=True)
class ExportOptions:
    """``aux_layers``: vLLM's ids of the auxiliary layers; ``None``: what the exporter does by default.

    ``model``: folder or Hugging Face id whose final norm and ``lm_head`` are used where they are needed; default: the
    run's, if that is an id of the hub or the built-in model. ``num_layers``: of the model, for runs that do not tell.
    ``loss_mask``: for samples without one, ``ones``, or ``raise``. ``top_k``, ``samples_per_file``: of the exporters
    that have them. ``with_last``: add the last state where the exporter leaves it out by default.
    ``context``: tokens of a context of ``saelens``.
    """

    aux_layers: Sequence[int] | None = None
    model: str | None = None
    num_layers: int | None = None
    loss_mask: Literal["ones", "raise"] = "ones"
    top_k: int = 32
    samples_per_file: int = 1000
    with_last: bool = False
    context: int = 128

    def __post_init__(self) -> None:
        for name in ("top_k", "samples_per_file", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}. Correct it")


class SampleLeftOut(Exception):
    """Raised by the ``write`` of an exporter with one sample for each file: the trainer refuses this sample.

    The message says why.
    """


class Exporter(Protocol):
    """Made with the run and the options; refuses there, by ``ConfigError``, a run that cannot serve its trainer.

    Exporters are derived from it.
    """

    #: Names of the points that it reads instead of hidden states.
    points: tuple[str, ...] | None = None
    #: vLLM's ids of what it reads of each sample, in this order; of points the decoder layers.
    layers: tuple[int, ...]
    #: Whether the rows of a selection of tokens are of use. If not, samples with a selection are refused.
    rows_alone: bool = False
    #: Consecutive samples that make one file.
    per_file: int

    def __init__(self, run: Run, options: ExportOptions) -> None: ...

    def file(self, first: int) -> str:
        """The file, relative to the destination, of samples ``first`` to ``first + per_file``."""

    def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
        """Write the file. ``items``: ``HiddenStatesDataset``'s, torch tensors, of ``layers``; each is read when it is
        asked for.

        Raises:
            SampleLeftOut: the trainer refuses the sample; for exporters with one sample for each file.
        """

    def finish(self, run: Run, dest: Path) -> None:
        """After all files are there: what the trainer wants beside them."""

    def statement(self) -> dict[str, Any]:
        """What a person must know to use the files: layers, norm, mask; JSON types. Goes into ``export.json``."""


def check_parquet(name: str) -> None:
    """``ConfigError`` where Parquet files cannot be written as asked."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{name}: expected pyarrow to be installed, got none. pip install pyarrow")


def parquet_key(key: str) -> str:
    """The key. ``ConfigError`` where Parquet, whose texts are UTF-8, cannot hold it."""
    if any("\ud800" <= c <= "\udfff" for c in key):
        raise ConfigError(
            f"key {key[:100]!a}: expected text that UTF-8 holds, for Parquet, got a lone surrogate. "
            "Export to vllm, whose files' names escape it, or extract the sample with another key"
        )
    return key


def num_layers_of(run: Run, options: ExportOptions) -> int:
    """The model's number of layers. ``ConfigError`` where nobody tells."""
    told = options.num_layers
    if told is None and len(run):
        told = run.at(0).about.get("num_hidden_layers")
    if not isinstance(told, int):
        raise ConfigError(f"{run.url}: does not tell how many layers its model has; give num_layers (--num-layers)")
    return told


def require_hidden_states(run: Run, trainer: str) -> None:
    """``ConfigError`` where the run has other points of the model alone."""
    points = run.at(0).points if len(run) else {}
    if points and HIDDEN_STATES not in points:
        raise ConfigError(
            f"{run.url}: cannot be exported for {trainer}: expected hidden states, got points {', '.join(points)}. "
            "Extract the run again with layers"
        )


def stored_layers(run: Run) -> tuple[int, ...]:
    """The layers of the run's samples."""
    return run.at(0).layer_ids if len(run) else run.layer_ids


def need(run: Run, layers: Sequence[int], trainer: str) -> tuple[int, ...]:
    """``layers``, if the run has them. ``ConfigError`` names those that are missing."""
    stored = stored_layers(run)
    missing = [layer for layer in layers if layer not in stored]
    if missing:
        raise ConfigError(
            f"{run.url}: cannot be exported for {trainer}: it needs layers {list(layers)} (vLLM's ids), and {missing} "
            f"are not in the run, which has {list(stored)}; name others with aux_layers (--layers), or extract again"
        )
    return tuple(layers)


def eagle3_layers(run: Run, options: ExportOptions, num_layers: int, trainer: str) -> tuple[int, ...]:
    """Three auxiliary layers: those given, or EAGLE-3's early, middle and late one."""
    layers = tuple(options.aux_layers or resolve_layers("eagle3", num_layers)[:3])
    if len(layers) != 3:
        raise ConfigError(f"{trainer}: expected three auxiliary layers, got {list(layers)}; give three (--layers)")
    return need(run, layers, trainer)


def any_layers(run: Run, options: ExportOptions, num_layers: int, trainer: str) -> tuple[int, ...]:
    """The auxiliary layers given, or all of the run but the last."""
    layers = tuple(options.aux_layers or [k for k in sorted(stored_layers(run)) if k != num_layers])
    if not layers:
        raise ConfigError(f"{trainer}: expected at least one auxiliary layer, and the run has only {num_layers}")
    return need(run, layers, trainer)


def layers_before_last(run: Run, options: ExportOptions, num_layers: int, trainer: str) -> tuple[int, ...]:
    """``any_layers``, each once and none of them the last.

    Trainers that count after a layer take the last one after the final norm from transformers, and before it from vLLM.
    """
    layers = any_layers(run, options, num_layers, trainer)
    if num_layers in layers or len(set(layers)) < len(layers):
        raise ConfigError(
            f"{trainer}: expected auxiliary layers below {num_layers}, each once, got {list(layers)}. Name others "
            f"(--layers): trainers do not agree whether layer {num_layers} is before or after the final norm"
        )
    return layers


def after_layer(layers: Sequence[int]) -> list[int]:
    """The same layers in the convention that counts *after* a layer (SpecForge, transformers' hooks): one less."""
    return [layer - 1 for layer in layers]
