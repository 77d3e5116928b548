"""Checks that an engine captures all chosen points, and that they agree with transformers.

Stores eight prompts as a job does, with its engine, pages and codec, but in a temporary folder. transformers computes
the points again on the host, in the same dtype, which needs memory for a second copy of the model.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import EngineError
from hsx_dist.inputs.rows import rows_from
from hsx_dist.jobs.check import (
    UNKNOWN_ROUTES,
    LayerError,
    PointRows,
    StoredPoints,
    compare,
    depth,
    load_points,
    other_experts,
)
from hsx_dist.jobs.diagnosis import Diagnosis
from hsx_dist.jobs.extract import run_extraction
from hsx_dist.jobs.preflight import Model
from hsx_dist.observe.console import Console
from hsx_dist.reading import open_run
from hsx_dist.taps.points import HIDDEN_STATES, POINTS

#: Settings of a job that determine what its engine computes, and how the results are stored.
_SETTINGS = ("model", "revision", "source", "capture", "layers", "engine_kwargs", "codec")
_SIZES = ("page_bytes", "segment_bytes", "part_bytes", "in_flight_bytes")


def measure_points(config: ExtractConfig, model: Model, prompts: Sequence[list[int]]) -> list[Diagnosis]:
    """Run ``prompts`` through the engine of ``config``, and judge each chosen point.

    Raises:
        EngineError: vLLM did not start, or a prompt was not stored. ConfigError: the engine, or transformers, refuses
            the model or the points.
    """
    given = {name for name in _SETTINGS if name in config.model_fields_set} | set(_SIZES)
    settings = {name: getattr(config, name) for name in given}
    with tempfile.TemporaryDirectory(prefix="hsx-doctor-") as folder:
        small = ExtractConfig(output=folder, pool="threads", **settings)
        rows = [{"id": f"prompt-{i}", "token_ids": ids} for i, ids in enumerate(prompts)]
        run_extraction(small, lambda: rows_from(rows, small.input), Console(file=io.StringIO()))
        stored = [load_points(sample) for sample in open_run(folder)]
    if len(stored) != len(prompts):
        raise EngineError(f"expected {len(prompts)} stored prompts, got {len(stored)}. Look at vLLM's log")
    told = {"dtype": model.dtype, "num_layers": model.num_layers, "config": config}
    right = compare(stored, model.path, **told)  # type: ignore[arg-type]
    wrong = compare(_shifted(stored), model.path, **told)  # type: ignore[arg-type]
    return judge_points(model, stored, right, wrong)


def _shifted(stored: Sequence[StoredPoints]) -> list[StoredPoints]:
    """Return the samples with each row moved to its neighbour's token."""
    return [
        (ids, {name: PointRows(of.layers, of.rows.roll(1, 0)) for name, of in points.items()}) for ids, points in stored
    ]


def judge_points(
    model: Model, stored: Sequence[StoredPoints], right: Sequence[LayerError], wrong: Sequence[LayerError]
) -> list[Diagnosis]:
    """One diagnosis for each chosen point.

    Args:
        right: errors of the rows as they are stored.
        wrong: errors of the rows at their neighbours' tokens. If these pass, the check proves nothing.
    """
    first = min((e for e in right if e.failed(model.dtype)), key=lambda e: _place(e, model.num_layers), default=None)
    return [
        _absent(name, rows.layers, stored)
        or _judge_point(
            name, [e for e in right if e.point == name], [e for e in wrong if e.point == name], model.dtype, first
        )
        for name, rows in model.rows.items()
    ]


def _absent(name: str, layers: Sequence[int], stored: Sequence[StoredPoints]) -> Diagnosis | None:
    have = [points[name].layers if name in points else () for _, points in stored]
    lacking = sorted({i for own in have for i in layers if i not in own})
    if not lacking:
        return None
    message = f"expected layers {list(layers)}, got none of {lacking}: this engine does not have them. Leave them out"
    return Diagnosis(f"point {name}", "warn", message)


def _judge_point(
    name: str, right: Sequence[LayerError], wrong: Sequence[LayerError], dtype: str, first: LayerError | None
) -> Diagnosis:
    title = f"point {name}"
    if not right:
        return Diagnosis(title, "warn", "captured; not compared: transformers' model has no module of this name")
    worst = max(right, key=lambda e: e.norm if e.norm == e.norm else float("inf"))
    figure, limit = worst.limit(dtype)
    said = (
        f"captured; against transformers, {len(right)} layers: relative error at most {worst.norm:.2g} (layer "
        f"{worst.layer_id}), worst row {max(e.worst_row for e in right):.2g}; limit {limit:g} "
        f"({figure.replace('_', ' ')}); rows shifted by one: at least {min(e.norm for e in wrong):.2g}"
    )
    if name == "topk_ids":
        said += f"; {other_experts(worst)}"
    if bad := [e for e in right if e.failed(dtype)]:
        where = f"layers {[e.layer_id for e in bad]} differ"
        if first is not None and first in bad:
            where += f"; layer {first.layer_id} is the first of all points that differs"
        return Diagnosis(title, "fail", f"{said}: {where}. Do not use them. Try enforce_eager, and report it")
    if unclear := [e.layer_id for e in right if e.unclear(dtype)]:
        return Diagnosis(title, "warn", f"{said}: layers {unclear} differ: {UNKNOWN_ROUTES}")
    if any(e.passed(dtype) for e in wrong):
        return Diagnosis(title, "warn", f"{said}: shifted rows pass it too, so this check proves little")
    return Diagnosis(title, "ok", said)


def _place(error: LayerError, num_layers: int) -> tuple[int, int]:
    """Position of a row in the order of the computation."""
    layer = depth(error.point, error.layer_id, num_layers)
    return layer, 0 if error.point == HIDDEN_STATES else list(POINTS).index(error.point)
