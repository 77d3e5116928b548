"""``hsx stats``: compute each layer's moments, maxima and norms, and store them with the run."""

from __future__ import annotations

from collections.abc import Sequence

from hsx_dist.cli.export import parse_layers
from hsx_dist.cli.tables import print_table
from hsx_dist.config import parse_storage_options
from hsx_dist.errors import ConfigError
from hsx_dist.format.description import described_layers
from hsx_dist.layers import is_all, resolve_layers
from hsx_dist.observe.console import print_json
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading import Run, open_run
from hsx_dist.reading.statistics import compute_statistics, store_statistics

_COLUMNS = ("layer", "tokens", "samples", "non_finite", "mean_norm", "rms_norm", "max_norm", "norm_factor", "variance")
#: Limit of the points that are chosen without ``--points``.
_MOST_POINTS = 64


def run_stats(
    path: str,
    options: Sequence[str],
    *,
    layers: str | None,
    points: str | None,
    max_tokens: int | None,
    skip_first: int,
    as_json: bool,
) -> None:
    """Compute and store the statistics of the run at ``path``, and print a line for each layer of each point.

    ``variance``: the sum over channels, which a sparse autoencoder's explained variance refers to.
    """
    run = open_run(path, storage_options=parse_storage_options(options))
    names = _points_of(run) if points is None else list(dict.fromkeys(points.split(",")))
    columns = _COLUMNS if names == [HIDDEN_STATES] else ("point", *_COLUMNS)
    rows = []
    for point in names:
        found = compute_statistics(
            run, _ids(run, layers, point), point=point, max_tokens=max_tokens, skip_first=skip_first
        )
        store_statistics(run, found)
        rows += [
            {name: float(own.variance.sum()) if name == "variance" else getattr(own, name) for name in columns}
            for own in found.layers.values()
        ]
        del found  # before the next point is computed
    if as_json:
        print_json({"run": path, "layers": rows})
        return
    cells = [[_text(value) for value in row.values()] for row in rows]
    print_table(columns, cells, numbers=_COLUMNS)


def _ids(run: Run, layers: str | None, point: str) -> tuple[int, ...] | None:
    """Return ``2,last`` as ids, as in extraction: ``last`` is N for hidden states, and N - 1 for other points."""
    if layers is None or is_all(layers):
        return None  # those that are stored: a part may claim any number of layers
    told = described_layers(run.at(0).about) if len(run) else None
    if told is None:
        return parse_layers(layers)
    return resolve_layers(layers, told if point == HIDDEN_STATES else told - 1)


def _points_of(run: Run) -> list[str]:
    """Return the hidden states, or all points except ids if the run has no hidden states."""
    points = run.at(0).points if len(run) and not run.layer_ids else {}
    others = [name for name, point in points.items() if point.dtype != "int32"]
    if len(others) > _MOST_POINTS:  # each point reads the samples again
        raise ConfigError(f"{run.url}: expected at most {_MOST_POINTS} points, got {len(others)}. Name some (--points)")
    return others if others and HIDDEN_STATES not in points else [HIDDEN_STATES]


def _text(value: str | int | float) -> str:
    return value if isinstance(value, str) else f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"
