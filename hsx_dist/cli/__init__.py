"""The command ``hsx``."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run ``hsx`` with ``args`` (default: the process's arguments), and exit.

    Exit status 0: success; 1: a problem was found or happened; 2: wrong use.
    """
    from hsx_dist.cli.app import app
    from hsx_dist.cli.exit_codes import run_app

    run_app(app, args, "hsx")
