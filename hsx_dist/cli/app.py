"""The commands of ``hsx`` and their options. What they need is imported when they run."""

from __future__ import annotations

import os
from typing import Annotated, Optional

import typer

app = typer.Typer(
    help="Extract hidden states of language models, and look at what is stored.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # it would show local variables, credentials among them
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunPath = Annotated[str, typer.Argument(metavar="RUN", help="Folder or URL of a run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
StorageOptions = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads the annotation)
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="fsspec option for the store, e.g. endpoint_url=http://host:9000; credentials as KEY='${env:NAME}'.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        import hsx_dist

        typer.echo(f"hsx {hsx_dist.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Extract hidden states of language models, and look at what is stored."""


@app.command()
def extract(
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="KEY.SUB=VALUE", help="Settings that override the file's, e.g. engine_kwargs.dtype=float32."
        ),
    ] = None,
    config: Annotated[Optional[str], typer.Option(metavar="FILE", help="YAML file of settings.")] = None,  # noqa: UP045
    model: Annotated[Optional[str], typer.Option(help="Hugging Face id or model folder.")] = None,  # noqa: UP045
    input_: Annotated[Optional[str], typer.Option("--input", help="JSONL file of rows, a path or URL.")] = None,  # noqa: UP045
    layers: Annotated[Optional[str], typer.Option(help="E.g. 2,15,last; or all; or eagle3.")] = None,  # noqa: UP045
    output: Annotated[Optional[str], typer.Option(help="Folder or URL of the run.")] = None,  # noqa: UP045
    pool: Annotated[
        str | None,
        typer.Option(help="ray, or threads: all in this process (the default without --config and RAY_ADDRESS)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Extract hidden states of the rows of a file; a second run goes on where the first stopped."""
    from hsx_dist.cli.extract import run

    if config is None and pool is None and "RAY_ADDRESS" not in os.environ:
        pool = "threads"  # the quick case, and no cluster at hand: one process, no Ray
    flags = {"model": model, "layers": layers, "output": output, "pool": pool}
    direct = {name: value for name, value in flags.items() if value is not None}
    if input_ is not None:
        direct["input"] = {"path": input_}  # type: ignore[assignment]
    raise typer.Exit(run(config, overrides or (), direct, as_json=as_json))


@app.command("ls")
def list_samples(
    run: RunPath,
    limit: Annotated[int, typer.Option(min=0, help="Print at most so many samples (0: all).")] = 1000,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """List the samples of a run: key, tokens, layers, parts, attempt."""
    from hsx_dist.cli.inspect import print_samples

    print_samples(run, storage_option or (), limit=limit, as_json=as_json)


@app.command()
def show(
    run: RunPath,
    key: Annotated[Optional[str], typer.Argument(metavar="KEY", help="Key of one sample.")] = None,  # noqa: UP045
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run is, or one sample of it: shape, layers, norms, and where it lies."""
    from hsx_dist.cli.inspect import print_run, print_sample

    if key is None:
        print_run(run, storage_option or (), as_json=as_json)
    else:
        print_sample(run, key, storage_option or (), as_json=as_json)


@app.command()
def verify(
    run: RunPath,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Read everything of a run and check every checksum and count; exit status 1 when something is bad."""
    from hsx_dist.cli.verify import run_verify

    raise typer.Exit(run_verify(run, storage_option or (), as_json=as_json))


@app.command()
def gc(
    path: Annotated[str, typer.Argument(metavar="PREFIX", help="Where a server stores: a folder or a URL.")],
    delete: Annotated[bool, typer.Option("--delete", help="Remove what has expired; without it, only list.")] = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Remove what a server stored with a time to live (ttl_seconds), once that is over. A dry run by default."""
    from hsx_dist.cli.gc import run_gc

    run_gc(path, storage_option or (), delete=delete, as_json=as_json)


@app.command()
def top(
    run: RunPath,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 5.0,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run from anywhere, by what stands in its store: rows, rates, waiting on the store, time left."""
    from hsx_dist.cli.top import run_top

    run_top(run, storage_option or (), once=once, every=every, as_json=as_json)


@app.command()
def report(
    run: RunPath,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = "report.html",
    sample: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--sample", metavar="KEY", help="A sample to show token by token; again for more."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples that are read for norms and similarities.")] = 24,
    storage_option: StorageOptions = None,
) -> None:
    """Write one self-contained page about a run: what ran, where time went, sizes, norms, similarities."""
    from hsx_dist.cli.report import run_report

    run_report(run, storage_option or (), output=output, keys=sample or (), samples=samples)


@app.command()
def dashboards(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where the files go; made if it is not there.")],
) -> None:
    """Write the Grafana dashboard and the Prometheus alert rules for a cluster's monitoring."""
    from hsx_dist.cli.dashboards import run_dashboards

    run_dashboards(folder)
