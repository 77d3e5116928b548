"""``hsx export``: a run in a trainer's own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from hsx_dist.config import parse_storage_options, refuse_in_job
from hsx_dist.errors import ConfigError
from hsx_dist.exporting import ExportOptions, export_run
from hsx_dist.observe.console import print_json, say
from hsx_dist.reading import open_run


def run_export(
    path: str,
    to: str,
    dest: str,
    options: Sequence[str],
    export: ExportOptions,
    *,
    shard: str | None,
    ray: bool = False,
    as_json: bool,
) -> None:
    """Export the run at ``path``; ``shard`` is ``I/N``; ``ray``: as tasks of the cluster that this process is in."""
    if ray and shard is not None:
        raise ConfigError(
            "--shard, --ray: expected at most one, got both. With --ray, leave --shard out: Ray divides the work"
        )
    storage_options = parse_storage_options(options)
    if ray:
        refuse_in_job("RUN", path)
        refuse_in_job("DEST", dest)
        from hsx_dist.jobs.connect import connect_ray
        from hsx_dist.ray import export as export_by_tasks

        connect_ray()
        report = export_by_tasks(path, to, dest, export, storage_options=storage_options)
    else:
        number, count = _shard(shard)
        run = open_run(path, storage_options=storage_options)
        report = export_run(run, to, dest, export, shard=number, shards=count)
    if as_json:
        print_json({"run": path, "to": to, "dest": dest, **asdict(report)})
        return
    there = f", {report.there:,} existed before" if report.there else ""
    out = f"; {report.left_out:,} samples left out, see *.left-out" if report.left_out else ""
    state = "complete" if report.finished else "not complete yet"
    say(f"{report.written:,} files written{there}{out}; {state}: {dest}")


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    first, _, second = text.partition("/")
    try:
        return int(first), int(second)
    except ValueError:
        raise ConfigError(f"--shard: expected I/N, such as 0/8, got {text!r}") from None


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the ids of a text such as ``2,15,27``."""
    try:
        return None if text is None else tuple(int(k) for k in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--layers: expected layer ids with commas, such as 2,15,27, got {text!r}. `hsx ls` prints the run's layers"
        ) from None
