"""Comparison of stored samples with transformers on the same token ids, for each point and layer."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hsx_dist.config import ExtractConfig
from hsx_dist.config.engine_arguments import trusts_remote_code
from hsx_dist.errors import FormatError, NotFound
from hsx_dist.format.json_objects import check_members, count, read_json
from hsx_dist.format.names import CHECK
from hsx_dist.format.place import Place
from hsx_dist.isa import avoid_amx
from hsx_dist.jobs.preflight import Model
from hsx_dist.jobs.reference import PointReference
from hsx_dist.observe.console import Console
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading import Run, Sample
from hsx_dist.reading.stored import read_stored, select_stored
from hsx_dist.taps.points import POINTS

if TYPE_CHECKING:
    import torch

#: Relative error up to which other experts can explain a difference. ``topk_ids`` may differ in 12 % of the experts
#: (0.35²). Outputs of two experts are about orthogonal, so that ``mlp_out`` then differs by √(2 · 0.12) = 0.49, and the
#: residual stream by less. Unrelated rows differ by about √2.
_FLIPS = 0.5
#: Why an error above the limit is no proof, and what to do.
UNKNOWN_ROUTES = (
    "expected topk_ids of all earlier MoE layers, got none that transformers can use for some. Rounding may choose "
    "other experts, which explains errors of this size. Capture topk_ids: all, or compare in float32"
)


@dataclass(frozen=True, slots=True)
class PointRows:
    """One point of a sample: its layers, and its rows ``[T, L, width]`` in the stored dtype."""

    layers: Sequence[int]
    rows: torch.Tensor


#: Token ids ``[T]``, and a sample's rows by point.
StoredPoints = tuple["torch.Tensor", Mapping[str, PointRows]]


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative errors of one layer of a point over all compared samples.

    ``norm``: |ours - theirs| / |theirs| over all rows; ``worst_row``: the largest such ratio of a single row.
    ``after_norm``: both sides after the model's final norm. For ``topk_ids``, a row's ratio is the square root of the
    fraction of the reference's experts that are not stored. ``unknown_routes``: an earlier router chose experts, and
    the engine's choice is not known.
    """

    layer_id: int
    after_norm: bool
    norm: float
    worst_row: float
    point: str = HIDDEN_STATES
    unknown_routes: bool = False

    def limit(self, dtype: str) -> tuple[str, float]:
        """The compared figure and its limit. ``dtype``: dtype of the model's computation; a point's dtype may differ.

        In bf16 two correct implementations differ by some percent: the order of sums differs, and the norm's scale is
        large where states are small. In float32 every row must agree. Rounding decides between experts with nearly
        equal logits: ``topk_ids`` may differ, and other points are computed with the experts of the stored ids.
        """
        if self.point == "topk_ids":
            return "norm", 0.05 if dtype == "float32" else 0.35
        if dtype == "float32":
            return "worst_row", 1e-3
        return "norm", 0.05 if self.point == HIDDEN_STATES and not self.after_norm else 0.08

    def passed(self, dtype: str) -> bool:
        figure, limit = self.limit(dtype)
        return bool(getattr(self, figure) <= limit)  # NaN compares false

    def unclear(self, dtype: str) -> bool:
        """Whether the error exceeds the limit, but rounding in unknown routers can explain it."""
        return self.unknown_routes and dtype != "float32" and not self.passed(dtype) and self.norm <= _FLIPS

    def failed(self, dtype: str) -> bool:
        """Whether the rows are wrong."""
        return not self.passed(dtype) and not self.unclear(dtype)


def check_run(config: ExtractConfig, place: Place, model: Model, attempt: int, console: Console) -> bool | None:
    """Compare ``check_samples`` samples, spread over the run, with transformers. Prints a table, stores ``check.json``.

    A comparison that this attempt already passed is not repeated. Returns None if consumers have removed all samples.
    """
    store = place.store
    before: dict[str, Any] = {}
    with suppress(NotFound, FormatError):  # a damaged result is replaced
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

        def load(sample: Sample) -> StoredPoints:
            found = load_points(sample)
            compared.append(sample.key)
            return found

        dtype = model.dtype
        points = next(read_stored(chosen, lambda sample: sample.points), None)
        if points is not None:
            stored = read_stored(chosen, load)
            errors = compare(stored, model.path, dtype=dtype, num_layers=model.num_layers, config=config)
    if points is None or not compared:
        console.print("not checked against transformers: no sample is stored any more")
        return None
    passed = bool(errors) and not any(e.failed(dtype) for e in errors)
    print_errors(errors, dtype, len(compared), console)
    if left := sorted(points.keys() - {e.point for e in errors}):
        console.print(f"not compared: {', '.join(left)}: transformers' model has no such module", soft_wrap=True)
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
    samples: Iterable[StoredPoints], model: str, *, dtype: str, num_layers: int, config: ExtractConfig
) -> list[LayerError]:
    """Errors by layer id. transformers computes the same token ids in ``dtype``, one sample at a time.

    Layer N is compared after the final norm, because transformers returns its last hidden state only after the norm.
    """
    avoid_amx()
    import torch
    from transformers import AutoModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    reference = AutoModel.from_pretrained(
        model,
        revision=config.revision,
        dtype=getattr(torch, dtype),
        trust_remote_code=trusts_remote_code(config.engine_kwargs),
    ).eval()
    with torch.inference_mode():
        errors = layer_errors(samples, reference, num_layers)
    del reference
    gc.collect()
    return errors


def load_points(sample: Sample) -> StoredPoints:
    """All points of a stored sample. Rows of heads are flat, as they were computed: ``[T, L, width]``."""
    found = {
        name: PointRows(
            point.layers, sample.load(framework="torch", points=[name], loss_mask=False)["points"][name].flatten(2)
        )
        for name, point in sample.points.items()
    }
    return sample.token_ids("torch"), found


def layer_errors(stored: Iterable[StoredPoints], reference: Any, num_layers: int) -> list[LayerError]:
    """Errors by point and layer against ``reference``, a transformers model on the host. Call it in inference mode.

    If ``topk_ids`` are stored, ``reference`` computes with these experts, and its own choice is compared with them. A
    point is left out if ``reference`` has no module for it.
    """
    norm = final_norm(reference)
    sums: dict[tuple[str, int], list[float]] = {}
    unknown: set[tuple[str, int]] = set()
    for ids, points in stored:
        theirs, routers = _reference_rows(reference, ids, points)
        for name, layer, ours in _by_layer(points):
            right = theirs.get((name, layer))
            if right is None:
                continue
            if name == HIDDEN_STATES:
                ours = ours.to(right.dtype)
                if layer == num_layers:  # transformers has applied the norm
                    if norm is None:
                        continue
                    ours = norm(ours)
            total = sums.setdefault((name, layer), [0.0, 0.0, 0.0])
            difference, size = _difference(name, ours, right)
            total[0] += float(difference.square().sum())
            total[1] += float(size.square().sum())
            worst = float((difference / size.clamp_min(1e-30)).max())
            total[2] = worst if worst != worst else max(total[2], worst)
            place = depth(name, layer, num_layers)
            if any(i < place or (i == place and name == "mlp_out") for i in routers):
                unknown.add((name, layer))
    order = {name: i for i, name in enumerate(POINTS)}
    found = []
    for name, layer in sorted(sums, key=lambda key: (order[key[0]], key[1])):
        difference_squares, squares, worst = sums[name, layer]
        after_norm = name == HIDDEN_STATES and layer == num_layers
        relative = (difference_squares / max(squares, 1e-300)) ** 0.5
        found.append(LayerError(layer, after_norm, relative, worst, name, (name, layer) in unknown))
    return found


def _reference_rows(
    reference: Any, ids: torch.Tensor, points: Mapping[str, PointRows]
) -> tuple[dict[tuple[str, int], torch.Tensor], set[int]]:
    """Rows of ``reference`` by point and layer, and the layers whose experts it had to choose itself."""
    from hsx_dist.jobs.route_replay import RouteReplay, expert_blocks

    blocks = expert_blocks(reference)
    routes = {layer: rows for name, layer, rows in _by_layer(points) if name == "topk_ids"}
    hooks = PointReference(reference, {name: rows.layers for name, rows in points.items() if name != HIDDEN_STATES})
    with RouteReplay(blocks, routes) as replay:
        states = reference(ids[None], output_hidden_states=HIDDEN_STATES in points, use_cache=False).hidden_states
    hooks.close()
    found = hooks.take(len(ids)) | {("topk_ids", layer): own for layer, own in replay.own.items()}
    found |= {(HIDDEN_STATES, layer): rows[0] for layer, rows in enumerate(states or ())}
    return found, blocks.keys() - replay.own.keys()


def depth(point: str, layer: int, num_layers: int) -> int:
    """The layer in which a point is computed: -1 before the first one, ``num_layers`` after the last one."""
    return num_layers if point in ("resid_final", "final_ln") else -1 if point == "embed" else layer


def _by_layer(points: Mapping[str, PointRows]) -> Iterator[tuple[str, int, torch.Tensor]]:
    for name, rows in points.items():
        for i, layer in enumerate(rows.layers):
            yield name, layer, rows.rows[:, i]


def _difference(point: str, ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of each row's difference, and of each row of ``theirs``."""
    if point == "topk_ids":
        missing = (theirs[:, :, None] != ours[:, None, :]).all(dim=2).sum(dim=1)
        return missing.double().sqrt(), (missing * 0 + theirs.shape[1]).double().sqrt()
    a, b = ours.double(), theirs.double()
    if point == "topk_weights":  # experts of nearly equal weights are ordered by rounding
        a, b = a.sort(dim=1).values, b.sort(dim=1).values
    return (a - b).norm(dim=1), b.norm(dim=1)


def final_norm(model: Any) -> Any | None:
    """The norm after a decoder's last layer, by its usual names in transformers. None if it has another name: layer N
    is then not compared."""
    inner = getattr(model, "language_model", model)
    for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm"):
        if (module := getattr(inner, name, None)) is not None:
            return module
    return None


def print_errors(errors: list[LayerError], dtype: str, samples: int, console: Console) -> None:
    table = Table(title=f"Relative error of {samples} samples against transformers ({dtype})", title_justify="left")
    points = {e.point for e in errors} != {HIDDEN_STATES}
    for column in (*(("point",) if points else ()), "layer", "all rows", "worst row", ""):
        table.add_column(column)
    for e in errors:
        judged, limit = e.limit(dtype)
        shown = {judged: f"limit {limit:g}"}  # the other figure is for information
        table.add_row(
            *((e.point,) if points else ()),
            f"{e.layer_id}{' after the final norm' if e.after_norm else ''}",
            *(f"{getattr(e, figure):.2e} ({shown.get(figure, 'no limit')})" for figure in ("norm", "worst_row")),
            "ok" if e.passed(dtype) else "unclear" if e.unclear(dtype) else "MISMATCH",
        )
    console.print(table)
    if replaced := [e for e in errors if e.point == "topk_ids"]:
        other = max(replaced, key=lambda e: e.norm)
        console.print(f"topk_ids: {other_experts(other)}", soft_wrap=True)
    if any(e.unclear(dtype) for e in errors):
        console.print(f"unclear: {UNKNOWN_ROUTES}", soft_wrap=True)


def other_experts(error: LayerError) -> str:
    """What an error of ``topk_ids`` means."""
    return f"transformers alone would choose others for {error.norm**2:.1%} of the experts (layer {error.layer_id})"
