"""``hsx top``: a run's progress, read from its store alone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence

from hsx_dist.config import parse_storage_options
from hsx_dist.observe.console import print_json, say
from hsx_dist.observe.top import Standing, follow, look
from hsx_dist.store import open_store


def run_top(path: str, options: Sequence[str], *, once: bool, every: float, as_json: bool) -> None:
    """Print the progress of the run at ``path`` until its attempt ends. Print it once if ``once`` or ``as_json``."""
    store = open_store(path, parse_storage_options(options))
    if as_json:
        standing = look(store)
        print_json(dataclasses.asdict(standing) | {"done": standing.done, "eta_seconds": standing.eta_seconds})
    elif once or not sys.stdout.isatty():
        for standing in [look(store)] if once else follow(store, every):
            say(f"{standing.url} attempt {standing.attempt}: {standing.line()}")
    else:
        _live(follow(store, every))


def _live(standings: Iterable[Standing]) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    from hsx_dist.observe.console import Console
    from hsx_dist.text import printable

    def picture(s: Standing) -> Group:
        return Group(
            Text(printable(f"{s.url}  attempt {s.attempt}  {s.model}"), style="bold"),
            ProgressBar(total=s.total or 1, completed=s.done if s.total else 0, width=60),
            Text(printable(s.line()), style="yellow" if s.stale else ""),
        )

    with Live(console=Console(), refresh_per_second=4) as live:
        for standing in standings:
            live.update(picture(standing))
