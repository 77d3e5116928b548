"""``hsx stats``: each layer's moments, maxima and norms, stored with the run."""

from __future__ import annotations

from collections.abc import Sequence

from hsx_dist.cli.export import parse_layers
from hsx_dist.cli.tables import print_table
from hsx_dist.config import parse_storage_options
from hsx_dist.observe.console import print_json
from hsx_dist.reading import open_run
from hsx_dist.reading.statistics import compute_statistics, store_statistics

_COLUMNS = ("layer", "tokens", "samples", "non_finite", "mean_norm", "rms_norm", "max_norm", "norm_factor", "variance")


def run_stats(
    path: str, options: Sequence[str], *, layers: str | None, max_tokens: int | None, skip_first: int, as_json: bool
) -> None:
    """Compute and store the statistics of the run at ``path``, and print a line for each layer.

    ``variance``: the sum over channels, which a sparse autoencoder's explained variance refers to.
    """
    run = open_run(path, storage_options=parse_storage_options(options))
    found = compute_statistics(run, parse_layers(layers), max_tokens=max_tokens, skip_first=skip_first)
    store_statistics(run, found)
    rows = [
        {name: float(own.variance.sum()) if name == "variance" else getattr(own, name) for name in _COLUMNS}
        for own in found.layers.values()
    ]
    if as_json:
        print_json({"run": path, "layers": rows})
        return
    cells = [[f"{v:,.6g}" if isinstance(v, float) else f"{v:,}" for v in row.values()] for row in rows]
    print_table(_COLUMNS, cells, numbers=_COLUMNS)
