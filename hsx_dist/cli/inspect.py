"""``hsx ls`` and ``hsx show``: list a run's samples, and show the run or one sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from hsx_dist.cli.tables import layers_text, print_facts, print_table
from hsx_dist.config import parse_storage_options
from hsx_dist.config.secrets import hide_secrets
from hsx_dist.format.codecs.base import blocks, itemsize
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.segments import exact_sum
from hsx_dist.observe.console import print_json, print_json_rows, say
from hsx_dist.observe.units import bytes_text
from hsx_dist.page import FLOATS, HIDDEN_STATES
from hsx_dist.reading import Run, Sample, open_run
from hsx_dist.reading.arrays import to_states
from hsx_dist.reading.column import PointColumns, StoredPoint, check_decoded
from hsx_dist.reading.sample import columns_of
from hsx_dist.reading.stored import read_stored
from hsx_dist.text import printable

if TYPE_CHECKING:
    from hsx_dist.jobs.decode import Decode

#: Refused and failed rows that are listed. `--json` prints all.
_REASONS_SHOWN = 5
#: Limit of the bytes of states in memory at once. One token's row of a layer is always read whole.
_BYTES_AT_ONCE = 64 << 20
_OUTLIER, _OUTLIERS_SHOWN = 6.0, 3
#: Limit of a sample's tokens that are shown as text.
_TOKENS_SHOWN = 64


def print_samples(path: str, options: Sequence[str], *, limit: int, as_json: bool) -> None:
    """Print the samples of the run at ``path`` in its order (at most ``limit``; 0: all), and totals of all samples."""
    run = open_run(path, storage_options=parse_storage_options(options))
    layers = _layers(run)
    index = run.index
    rows: Iterator[dict[str, Any]] = (
        {
            "key": record.key,
            "tokens": record.num_tokens,
            "layers": layers,
            "parts": sorted({proof.part for proof in record.segments}),
            "attempt": record.attempt,
        }
        for record in (index[i] for i in islice(range(len(index)), limit or None))
    )
    totals = _totals(run)
    if as_json:
        print_json_rows({"run": path, "complete": run.complete, "samples": [], "totals": totals}, {"samples": rows})
        return
    told = (layers_text(layers),) if layers else ()  # `hsx show` has the layers of other points
    print_table(
        ("key", "tokens", *(("layers",) if told else ()), "parts", "attempt"),
        ((r["key"], r["tokens"], *told, _parts_text(r["parts"]), r["attempt"]) for r in rows),
        numbers=("tokens", "attempt"),
    )
    hidden = len(run) - min(len(run), limit or len(run))
    if hidden:
        say(f"… and {hidden} more (--limit 0 prints all)")
    say(_totals_text(totals, run.complete))


def print_run(path: str, options: Sequence[str], *, as_json: bool) -> None:
    """Print the settings of the run at ``path``, and its contents."""
    run = open_run(path, storage_options=parse_storage_options(options))
    totals = _totals(run)
    refused, failed = list(run.refused.values()), list(run.failed.values())
    # Older versions recognised fewer credentials, and stored them.
    info = hide_secrets(run.info)
    if as_json:
        facts = {"run": path, "complete": run.complete, "info": info, "totals": totals}
        facts |= {"refused": [], "failed": [], "conflicts": list(run.index.conflicts)}
        print_json_rows(facts, {"refused": map(_fate, refused), "failed": map(_fate, failed)})
        return
    meaning = info.get("meaning", {})
    settings = info.get("settings", {})
    print_facts(
        [
            ("run", path),
            (
                "model",
                f"{meaning.get('model', '?')}" + (f" at {meaning['revision']}" if meaning.get("revision") else ""),
            ),
            *_captured(run),
            ("codec", settings.get("codec", "?")),
            ("created", run.info.get("created", "?")),
            ("complete", "yes" if run.complete else "no: still written, or interrupted"),
            ("samples", f"{totals['samples']:,}"),
            ("tokens", f"{totals['tokens']:,}"),
            ("parts", f"{totals['parts']:,}"),
            ("raw", bytes_text(totals["raw_bytes"])),
            ("stored", bytes_text(totals["stored_bytes"])),
            *_fate_lines("refused", refused),
            *_fate_lines("failed", failed),
            *(("conflict", conflict) for conflict in run.index.conflicts),
        ]
    )


def print_sample(path: str, key: str, options: Sequence[str], *, as_json: bool, tokenizer: str | None = None) -> None:
    """Print one sample: shape, dtype, place in the store, and norms of each layer. Reads all states, some layers at a
    time."""
    from hsx_dist.jobs.decode import choose_decoder

    run = open_run(path, storage_options=parse_storage_options(options))
    decode = choose_decoder(tokenizer, run.info)
    sample = run[key]
    stored = columns_of(sample)
    check_decoded([p for p in stored.values() if p.stored.dtype in FLOATS], channel_bytes=_Totals.PEAK)
    points = {name: _point_facts(sample, name, columns) for name, columns in stored.items()}
    facts: dict[str, Any] = {
        "key": sample.key,
        "tokens": sample.num_tokens,
        "uri": sample.uri,
        "text": None if decode is None else _text(decode, sample),
        **points.get(HIDDEN_STATES, {}),
        **({} if set(points) == {HIDDEN_STATES} else {"points": points}),
    }
    if as_json:
        print_json(facts)
        return
    plain = list(points) == [HIDDEN_STATES]
    print_facts(
        [
            ("key", key),
            *(_shape_facts(HIDDEN_STATES, points[HIDDEN_STATES]) if plain else ()),
            ("tokens", f"{sample.num_tokens:,}"),
            *([("text", facts["text"])] if facts["text"] is not None else []),
            ("stored in", sample.uri),
        ]
    )
    for name, point in points.items():
        if not plain:
            print_facts([("point", name), *_shape_facts(name, point)])
        _print_norms(point["layers"])


def _point_facts(sample: Sample, name: str, columns: PointColumns) -> dict[str, Any]:
    """Return shape and norms of a point of a sample. Ids have no norms."""
    point = columns.stored
    return {
        "shape": [sample.num_tokens, len(point.layers), point.width],
        **({"heads": point.heads} if point.heads else {}),
        "dtype": point.dtype,
        "layer_ids": list(point.layers),
        "layers": _layer_norms(sample, name, columns) if point.dtype in FLOATS else [],
    }


def _shape_facts(name: str, point: dict[str, Any]) -> Iterator[tuple[str, str]]:
    width = "hidden size" if name == HIDDEN_STATES else "width"
    heads = f" in {point['heads']} heads" if "heads" in point else ""
    yield "shape", f"{point['shape']}  (tokens, layers, {width}{heads})"
    yield "dtype", point["dtype"]


def _print_norms(norms: Sequence[dict[str, Any]]) -> None:
    if not norms:
        return
    columns = ("layer", "mean norm", "max norm", "not finite", "zero rows", "outlier channels (times the median)")
    print_table(
        columns,
        (
            (
                *(n["layer"], f"{n['mean_norm']:.4g}", f"{n['max_norm']:.4g}", n["not_finite"], n["zero_rows"]),
                ", ".join(f"{o['channel']} ({o['times']:.0f}x)" for o in n["outliers"]),
            )
            for n in norms
        ),
        numbers=columns[:5],
    )


def _layer_norms(sample: Sample, name: str, columns: PointColumns) -> list[dict[str, Any]]:
    """Return statistics of the rows' Euclidean norms over all tokens, for each layer of a point."""
    point = columns.stored
    chunk = min(columns.chunk_tokens(), sample.num_tokens)
    row_bytes = point.width * itemsize(point.dtype)
    # Several layers at once: an object of one sample is stored token by token, so that each load reads all layers.
    at_once = max(_BYTES_AT_ONCE // (chunk * row_bytes + _Totals.BYTES * point.width), 1)
    step = max(_BYTES_AT_ONCE // (min(at_once, len(point.layers)) * row_bytes), 1)
    step = step - step % chunk or step  # decodes no chunk twice, unless a chunk is larger than the limit
    norms: list[dict[str, Any]] = []
    for some in (point.layers[i : i + at_once] for i in range(0, len(point.layers), at_once)):
        totals = [_Totals(point.width) for _ in some]
        for start in range(0, sample.num_tokens, step):
            states = sample.load_carrier(some, (start, start + step), name)[0]
            for k, total in enumerate(totals):
                total.add(states[:, k], point.dtype)
            del states  # before the next ones are allocated
        norms.extend({"layer": layer, **total.facts()} for layer, total in zip(some, totals, strict=True))
    return norms


class _Totals:
    """Statistics of one layer's rows."""

    BYTES = 8  # of each channel
    PEAK = 64  # the same, with the copies of ``add`` and ``facts``

    def __init__(self, width: int):
        self._squares = np.zeros(width)
        self._rows = self._finite = self._zero = 0
        self._sum = self._max = 0.0

    def add(self, carrier: np.ndarray[Any, Any], dtype: str) -> None:
        """Add rows ``[n, width]``."""
        # In float64 and a few rows at once: fp16 squares overflow, and a copy of many rows would be large.
        for rows in blocks(carrier):
            with np.errstate(invalid="ignore"):  # converting a signalling NaN would print a warning
                block = to_states(rows, dtype, "numpy").astype(np.float64)
            norm = np.linalg.norm(block, axis=1)
            finite = norm[np.isfinite(norm)]
            self._rows, self._finite = self._rows + len(norm), self._finite + len(finite)
            self._zero += int((norm == 0).sum())
            self._sum, self._max = self._sum + float(finite.sum()), max(self._max, float(finite.max(initial=0)))
            block[~np.isfinite(block)] = 0
            self._squares += np.square(block, out=block).sum(0)

    def facts(self) -> dict[str, Any]:
        """Return them in the form of ``hsx show --json``."""
        return {
            "mean_norm": self._sum / max(self._finite, 1),
            "max_norm": self._max,
            "not_finite": self._rows - self._finite,
            "zero_rows": self._zero,
            "outliers": _outliers(np.sqrt(self._squares / max(self._rows, 1))),
        }


def _outliers(size: np.ndarray[Any, Any]) -> list[dict[str, float]]:
    """Return the channels with the largest root mean square over the tokens, at least six times the median channel's.

    Massive activations of a few channels are normal in a residual stream. Six is the threshold of LLM.int8()
    (Dettmers et al. 2022). ``size``: the root mean square of each channel.
    """
    median = float(np.median(size))
    times = size / median if median else np.zeros_like(size)
    found = [c for c in np.argsort(-times)[:_OUTLIERS_SHOWN] if times[c] >= _OUTLIER]
    return [{"channel": int(c), "times": float(times[c])} for c in found]


def _text(decode: Decode, sample: Sample) -> str:
    """Return the first tokens as text."""
    ids = sample.token_ids("numpy")
    return decode(ids[:_TOKENS_SHOWN].tolist()) + (" …" if len(ids) > _TOKENS_SHOWN else "")


def _captured(run: Run) -> Iterator[tuple[str, str]]:
    """Yield layers and hidden size, or the points. Reads the first sample, since ``run.json`` names neither size nor
    all points."""
    points: dict[str, StoredPoint] = next(read_stored(islice(run, 1), lambda sample: sample.points), {})
    if not points or list(points) == [HIDDEN_STATES]:
        yield "layers", layers_text(_layers(run)) or "?"
        if points:
            yield "hidden size", f"{points[HIDDEN_STATES].width:,}"
    else:
        yield "points", "; ".join(f"{name} {layers_text(point.layers)}" for name, point in points.items())


def _layers(run: Run) -> list[int]:
    return list(run.layer_ids)


def _totals(run: Run) -> dict[str, int]:
    index = run.index
    parts = index.parts_in_use()
    return {
        "samples": len(run),
        "tokens": exact_sum(index.tokens),
        "parts": len(parts),
        "raw_bytes": exact_sum(index.raw_bytes),
        "stored_bytes": sum(index.parts_by_name[part].size for part in parts),
        "refused": len(run.refused),
        "failed": len(run.failed),
    }


def _totals_text(totals: dict[str, int], complete: bool) -> str:
    ratio = f" (ratio {totals['raw_bytes'] / totals['stored_bytes']:.2f})" if totals["stored_bytes"] else ""
    return (
        f"{totals['samples']:,} samples, {totals['tokens']:,} tokens, {totals['parts']:,} parts, "
        f"{bytes_text(totals['raw_bytes'])} raw, {bytes_text(totals['stored_bytes'])} stored{ratio}; "
        f"{totals['refused']:,} rows refused, {totals['failed']:,} failed; {'complete' if complete else 'not complete'}"
    )


def _parts_text(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{len(parts)} parts, first {parts[0]}"


def _fate(fate: RowFate) -> dict[str, Any]:
    return {"key": fate.key, "row": fate.row, "reason": fate.reason, "tries": fate.tries}


def _fate_lines(name: str, fates: Sequence[RowFate]) -> Iterable[tuple[str, str]]:
    yield name, f"{len(fates):,} rows"
    for fate in fates[:_REASONS_SHOWN]:
        yield "", f"{printable(fate.key)}: {fate.reason}"
    if len(fates) > _REASONS_SHOWN:
        yield "", f"… and {len(fates) - _REASONS_SHOWN} more (--json prints all)"
