"""``hsx dashboards``: the Grafana dashboard and the Prometheus alerts as files."""

from __future__ import annotations

from pathlib import Path

from hsx_dist.observe.console import say
from hsx_dist.observe.dashboard import write_dashboards


def run_dashboards(folder: str) -> None:
    """Write the files into ``folder``, and print their names."""
    for path in write_dashboards(Path(folder)):
        say(path)
