"""``hsx verify``, also as a submitted Ray job: check all bytes against checksums, and all counts against receipts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Optional

import typer

from hsx_dist.cli.commands import Commands
from hsx_dist.cli.exit_codes import FINE, FOUND_BAD, run_app
from hsx_dist.config import load_config, parse_storage_options, public_url, refuse_in_job, resolve_paths
from hsx_dist.observe.console import print_json_rows, say
from hsx_dist.observe.units import bytes_text
from hsx_dist.reading.verify import verify_run
from hsx_dist.reading.verify_report import MOST_NAMED, MOST_PROBLEMS, Problem
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
    printed = 0

    def print_some(_: str, problems: Sequence[Problem]) -> None:
        nonlocal printed
        for problem in problems[: MOST_PROBLEMS - printed]:
            say(f"BAD {problem.part or 'the run'}: {problem.message}")
            printed += 1

    report = verify_run(
        store,
        on_part=None if as_json else print_some,
        workers=workers,
        sample=sample,
        seed=seed,
        resume=None if resume is None else Path(resume),
    )
    if as_json:
        document = {
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
            "problems": [],
            "unlisted": report.unlisted,
        }
        print_json_rows(document, {"problems": map(asdict, report.problems)})
        return FINE if report.ok else FOUND_BAD
    print_some("", report.problems[printed:])
    if report.unlisted:
        say(f"… and {report.unlisted:,} more problems")
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
    found = "ok" if report.ok else f"{len(report.problems) + report.unlisted:,} problems"
    say(f"{found}: {checked} read and checked in {path}")
    return FINE if report.ok else FOUND_BAD


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
