"""``hsx extract``, also as a submitted Ray job."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Optional

import typer

from hsx_dist.cli.commands import Commands
from hsx_dist.cli.exit_codes import run_app
from hsx_dist.config import load_config
from hsx_dist.errors import ConfigError
from hsx_dist.observe.console import print_json


def run(config: str | None, overrides: Sequence[str], direct: Mapping[str, Any], *, as_json: bool = False) -> int:
    """Extract with the settings of a file, then of flags, then of overrides. The last value wins.

    Returns the exit status. Raises ConfigError before anything is started if a setting is wrong or the input is
    missing.
    """
    settings = load_config(config, overrides, **direct)
    if not settings.input.path:
        raise ConfigError(
            "input.path: expected a file, a folder or a glob, local or a URL, got nothing. Set it, or give --input"
        )
    from hsx_dist.jobs.extract import run_extract

    if not as_json:
        return int(run_extract(settings).exit_status)
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the JSON alone
        summary = run_extract(settings)
    facts = dataclasses.asdict(summary) if dataclasses.is_dataclass(summary) else vars(summary)
    print_json({**facts, "exit_status": summary.exit_status}, indent=None)
    return int(summary.exit_status)


job = Commands()


@job.command()
def _job(
    config: Annotated[str, typer.Option(metavar="FILE", help="YAML file of settings.")],
    overrides: Annotated[Optional[list[str]], typer.Argument(metavar="KEY.SUB=VALUE")] = None,  # noqa: UP045
) -> None:
    """Extract hidden states; for `ray job submit`."""
    raise typer.Exit(run(config, overrides or (), {}))


def job_main() -> None:
    """The entry point of a submitted job: ``--config FILE [key.sub=value …]``, and nothing else."""
    run_app(job, None, "extract")
