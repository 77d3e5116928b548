"""Stored samples against transformers on the same token ids: the proof that rows, layers and order are right."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import FormatError, NotFound
from hsx_dist.format.json_objects import check_members, count, read_json
from hsx_dist.format.names import CHECK
from hsx_dist.format.place import Place
from hsx_dist.isa import avoid_broken_amx
from hsx_dist.jobs.preflight import Model
from hsx_dist.observe.console import Console
from hsx_dist.reading import Run, Sample
from hsx_dist.reading.stored import read_stored, select_stored

if TYPE_CHECKING:
    import torch


#: Token ids ``[T]``, layer ids, and states ``[T, L, H]`` of a sample.
Stored = tuple["torch.Tensor", Sequence[int], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative errors of one layer over all compared samples.

    ``norm``: |ours - theirs| / |theirs| over all rows; ``worst_row``: the largest such ratio of a single row.
    ``after_norm``: both sides after the model's final norm.
    """

    layer_id: int
    after_norm: bool
    norm: float
    worst_row: float

    def limit(self, dtype: str) -> tuple[str, float]:
        """Which figure is judged, and its limit. In bf16 two right implementations differ by some percent (the order of
        sums differs, and the norm's scale is large where states are small); in float32 every row must agree."""
        if dtype == "float32":
            return "worst_row", 1e-3
        return "norm", 0.08 if self.after_norm else 0.05

    def passed(self, dtype: str) -> bool:
        figure, limit = self.limit(dtype)
        return bool(getattr(self, figure) <= limit)  # NaN compares false


def check_run(config: ExtractConfig, place: Place, model: Model, attempt: int, console: Console) -> bool | None:
    """Compare ``check_samples`` samples, spread over the run, with transformers; prints a table, stores ``check.json``.

    A run that passed in this attempt is not computed again. ``None``: consumers have removed all samples after use.
    """
    store = place.store
    before: dict[str, Any] = {}
    with suppress(NotFound, FormatError):  # what is damaged is stored anew
        found = read_json(store, CHECK)
        check_members(found, {"wanted": count, "samples": count}, CHECK)
        before = found
    same = before.get("passed") is True and before.get("attempt") == attempt
    if same and before.get("wanted", 0) >= config.check_samples:
        console.print(f"checked against transformers by attempt {attempt}: {before.get('samples')} samples agree")
        return True
    with place.reading():
        run = Run(place.root)
        keys = sorted(select_stored(run).keys())
        wanted = min(config.check_samples, len(keys))
        chosen = [run[keys[i * (len(keys) - 1) // max(wanted - 1, 1)]] for i in range(wanted)]
        compared: list[str] = []

        def load(sample: Sample) -> Stored:
            data = sample.load(framework="torch")
            compared.append(sample.key)
            return data["token_ids"], sample.layer_ids, data["hidden_states"]

        dtype = next(read_stored(chosen, lambda sample: sample.dtype), None)
        if dtype is not None:
            stored = read_stored(chosen, load)
            errors = compare(stored, model.path, dtype=dtype, num_layers=model.num_layers, config=config)
    if dtype is None or not compared:
        console.print("not checked against transformers: no sample is stored any more")
        return None
    passed = all(e.passed(dtype) for e in errors)
    print_errors(errors, dtype, len(compared), console)
    body = {
        "attempt": attempt,
        "wanted": config.check_samples,
        "samples": len(compared),
        "dtype": dtype,
        "passed": passed,
        "layers": [asdict(e) for e in errors],
    }
    store.put(CHECK, [json.dumps(body, indent=1).encode()])
    return passed


def compare(
    samples: Iterable[Stored], model: str, *, dtype: str, num_layers: int, config: ExtractConfig
) -> list[LayerError]:
    """Errors by layer id: transformers computes the same token ids in ``dtype``, one sample at a time.

    Layer N is compared after the final norm, as transformers gives its last hidden state only so.
    """
    avoid_broken_amx()
    import torch
    from transformers import AutoModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    reference = AutoModel.from_pretrained(
        model,
        revision=config.revision,
        dtype=getattr(torch, dtype),
        trust_remote_code=bool(config.engine_kwargs.get("trust_remote_code", False)),
    ).eval()
    with torch.inference_mode():
        errors = layer_errors(samples, reference, num_layers)
    del reference
    gc.collect()
    return errors


def layer_errors(stored: Iterable[Stored], reference: Any, num_layers: int) -> list[LayerError]:
    """Errors by layer id against ``reference``, a transformers model on the host. Needs inference mode."""
    norm = final_norm(reference)
    sums: dict[int, list[float]] = {}
    for ids, layer_ids, states in stored:
        theirs = reference(ids[None], output_hidden_states=True, use_cache=False).hidden_states
        for i, layer in enumerate(layer_ids):
            ours = states[:, i].to(theirs[layer].dtype)
            if layer == num_layers and norm is None:
                continue
            if layer == num_layers and norm is not None:
                ours = norm(ours)
            a, b = ours.double(), theirs[layer][0].double()
            difference, size = (a - b).norm(dim=1), b.norm(dim=1)
            total = sums.setdefault(layer, [0.0, 0.0, 0.0])
            total[0] += float(difference.square().sum())
            total[1] += float(size.square().sum())
            worst = float((difference / size.clamp_min(1e-30)).max())
            total[2] = worst if worst != worst else max(total[2], worst)
    return [
        LayerError(layer, layer == num_layers, (total[0] / max(total[1], 1e-300)) ** 0.5, total[2])
        for layer, total in sorted(sums.items())
    ]


def final_norm(model: Any) -> Any | None:
    """The module that a decoder applies after its last layer, by the names that transformers' models give it; None
    where it has another (then layer N is not compared)."""
    inner = getattr(model, "language_model", model)
    for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm"):
        if (module := getattr(inner, name, None)) is not None:
            return module
    return None


def print_errors(errors: list[LayerError], dtype: str, samples: int, console: Console) -> None:
    table = Table(title=f"{samples} samples against transformers ({dtype})", title_justify="left")
    for column in ("layer", "relative error", "worst row", "limit", ""):
        table.add_column(column)
    for e in errors:
        figure, limit = e.limit(dtype)
        table.add_row(
            f"{e.layer_id}{' after the final norm' if e.after_norm else ''}",
            f"{e.norm:.2e}",
            f"{e.worst_row:.2e}",
            f"{limit:g} ({figure.replace('_', ' ')})",
            "ok" if e.passed(dtype) else "MISMATCH",
        )
    console.print(table)
