"""``hsx verify``, also as a submitted Ray job: check all bytes against checksums, and all counts against receipts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from hsx_dist.cli.commands import Commands
from hsx_dist.cli.exit_codes import FINE, FOUND_BAD, run_app
from hsx_dist.config import load_config, parse_storage_options, public_url, refuse_in_job, resolve_paths
from hsx_dist.observe.console import print_json, say
from hsx_dist.observe.units import bytes_text
from hsx_dist.reading.verify import MOST_NAMED, Problem, verify_run
from hsx_dist.store import Store, open_store


def run_verify(
    path: str,
    options: Sequence[str],
    *,
    workers: int = 4,
    sample: float = 1.0,
    seed: int = 0,
    resume: str | None = None,
    as_json: bool,
) -> int:
    """Verify the run at ``path``. Prints bad parts as soon as they are found. Returns the exit status."""
    store = open_store(path, parse_storage_options(options))
    return verify_store(store, path, workers=workers, sample=sample, seed=seed, resume=resume, as_json=as_json)


def verify_store(
    store: Store,
    path: str,
    *,
    workers: int = 4,
    sample: float = 1.0,
    seed: int = 0,
    resume: str | None = None,
    as_json: bool = False,
) -> int:
    """Verify the run in an open store, as ``run_verify``. ``path`` names it in messages."""
    report = verify_run(
        store,
        on_part=None if as_json else _print_problems,
        workers=workers,
        sample=sample,
        seed=seed,
        resume=None if resume is None else Path(resume),
    )
    if as_json:
        print_json(
            {
                "run": path,
                "ok": report.ok,
                "parts": report.parts,
                "known": report.known,
                "consumed": report.consumed,
                "samples": report.samples,
                "bytes": report.bytes,
                "non_finite": report.non_finite,
                "all_zero": report.all_zero,
                "bad_samples": report.bad_samples,
                "problems": [{"part": p.part, "message": p.message} for p in report.problems],
            }
        )
        return FINE if report.ok else FOUND_BAD
    _print_problems("", [p for p in report.problems if not p.part])
    for count, what in ((report.non_finite, "values that are not finite"), (report.all_zero, "nothing but zeros")):
        if count:
            say(f"note: {count:,} layers of samples have {what}")
    if report.bad_samples:
        more = ", …" if len(report.bad_samples) == MOST_NAMED else ""
        say(f"note: samples with such layers: {', '.join(report.bad_samples)}{more}")
    for count, what in ((report.known, "were noted as sound before"), (report.consumed, "were used and removed")):
        if count:
            say(f"note: {count:,} parts {what}")
    checked = f"{report.parts:,} parts, {report.samples:,} samples, {bytes_text(report.bytes)}"
    say(f"{'ok' if report.ok else f'{len(report.problems)} problems'}: {checked} read and checked in {path}")
    return FINE if report.ok else FOUND_BAD


def _print_problems(part: str, problems: Sequence[Problem]) -> None:
    for problem in problems:
        say(f"BAD {part or 'the run'}: {problem.message}")


job = Commands()


@job.command()
def _job(
    config: Annotated[str, typer.Option(metavar="FILE", help="YAML file of the extraction's settings.")],
    overrides: Annotated[Optional[list[str]], typer.Argument(metavar="KEY.SUB=VALUE")] = None,  # noqa: UP045
) -> None:
    """Verify the run at a configuration's output; for `ray job submit`."""
    settings = load_config(config, overrides or ())
    refuse_in_job("output", settings.output)
    settings = resolve_paths(settings, Path.cwd())
    options, backend = settings.store.storage_options, settings.store.backend
    store = open_store(settings.output, options, backend=backend, retry_seconds=settings.store.retry_seconds)
    raise typer.Exit(verify_store(store, public_url(settings.output)))


def job_main() -> None:
    """The entry point of a submitted job: ``--config FILE [key.sub=value …]``, and nothing else."""
    run_app(job, None, "verify")
