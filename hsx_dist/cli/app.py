"""The commands of ``hsx`` and their options. A command's modules are imported when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer

from hsx_dist.cli.commands import Commands

app = Commands(
    help="Extract hidden states of language models, and inspect stored runs.",
    no_args_is_help=True,
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


LayersOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="IDS", help="vLLM's layer ids with commas, in the order wanted, e.g. 2,15,27."),
]
Tokenizer = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="FOLDER_OR_ID",
        help="Show tokens as text: a folder with tokenizer.json, or a Hugging Face id.",
    ),
]
Watch = Annotated[
    float, typer.Option(min=0, help="Seconds without a change after which a heartbeat's driver counts as dead.")
]


def _version(wanted: bool) -> None:
    if wanted:
        import hsx_dist
        from hsx_dist.observe.console import say

        say(f"hsx {hsx_dist.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Extract hidden states of language models, and inspect, verify and export stored runs."""


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
    input_: Annotated[Optional[str], typer.Option("--input", help="File, folder or glob, a path or URL.")] = None,  # noqa: UP045
    layers: Annotated[Optional[str], typer.Option(help="E.g. 2,15,last; or all; or eagle3 (the default).")] = None,  # noqa: UP045
    output: Annotated[Optional[str], typer.Option(help="Folder or URL of the run.")] = None,  # noqa: UP045
    pool: Annotated[
        str | None,
        typer.Option(help="ray, or threads: all in this process (the default without --config and RAY_ADDRESS)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Extract hidden states of the rows of a file. The same command continues an interrupted run."""
    from hsx_dist.cli.extract import run

    if config is None and pool is None and "RAY_ADDRESS" not in os.environ:
        pool = "threads"  # without a file of settings and a known cluster: one process, no Ray
    flags = {"model": model, "layers": layers, "output": output, "pool": pool}
    direct = {name: value for name, value in flags.items() if value is not None}
    if input_ is not None:
        direct["input"] = {"path": input_}  # type: ignore[assignment]
    raise typer.Exit(run(config, overrides or (), direct, as_json=as_json))


ConfigFile = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--config", metavar="FILE", help="YAML file of settings. Without it, give them as KEY.SUB=VALUE."),
]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(metavar="KEY.SUB=VALUE", help="Settings that override the file's."),
]


@app.command()
def plan(
    overrides: Overrides = None,
    config: ConfigFile = None,
    rows: Annotated[int, typer.Option(min=1, help="Encode this many random rows; all rows are counted.")] = 1000,
    tokens_per_second: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=1e-3, help="Tokens per second of one replica, measured or guessed. Default: 10,000."),
    ] = None,
    replicas_per_node: Annotated[int, typer.Option(min=1, help="Replicas that share a node's network.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Estimate a run: tokens, bytes, parts, cache, time, network. Starts no engine, stores nothing."""
    from hsx_dist.cli.plan import run_plan

    run_plan(
        config,
        overrides or (),
        sample_rows=rows,
        tokens_per_second=tokens_per_second,
        replicas_per_node=replicas_per_node,
        as_json=as_json,
    )


@app.command()
def doctor(
    overrides: Overrides = None,
    config: ConfigFile = None,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine",
            help="Also start the engine, and check its states with the model's own head. Without settings: start "
            "engines of every kind that this machine runs, and compare them with transformers (takes minutes).",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="With --engine and without settings: folder for gpu-report.html and .json."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check versions, model, store and nodes, and (--engine) the engine itself. Exit status 1 if a check fails."""
    from hsx_dist.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(config, overrides or (), engine=engine, as_json=as_json, report=report))


@app.command("ls")
def list_samples(
    run: RunPath,
    limit: Annotated[int, typer.Option(min=0, help="Print at most this many samples (0: all).")] = 1000,
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
    tokenizer: Tokenizer = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show a run, or one sample: shape, layers, norms, and its place in the store."""
    from hsx_dist.cli.inspect import print_run, print_sample

    if key is None:
        print_run(run, storage_option or (), as_json=as_json)
    else:
        print_sample(run, key, storage_option or (), as_json=as_json, tokenizer=tokenizer)


@app.command()
def cat(
    run: RunPath,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the sample.")],
    out: Annotated[str, typer.Option("-o", "--out", metavar="FILE", help=".npz, .npy (states alone), .safetensors.")],
    layers: LayersOption = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="START:STOP", help="E.g. 0:128, or -10: for the last 10.")
    ] = None,
    points: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Points of the model with commas, e.g. q,mlp_out.")
    ] = None,
    storage_option: StorageOptions = None,
) -> None:
    """Write one sample, or some of its layers and tokens, to a file."""
    from hsx_dist.cli.cat import run_cat

    run_cat(run, key, out, storage_option or (), layers=layers, tokens=tokens, points=points)


@app.command()
def export(
    run: RunPath,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder to write to.")],
    to: Annotated[
        str,
        typer.Option(
            help="vllm, speculators, specforge-eagle3, specforge-dflash, specforge-dspark, modelopt, saelens, "
            "topk-logprobs, routing, or a registered exporter."
        ),
    ],
    layers: LayersOption = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Folder or id whose final norm and lm_head to use. Default: the run's model, if it is an id."
        ),
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="Number of the model's layers, if the run lacks it.")] = None,
    top_k: Annotated[int, typer.Option(min=1, help="topk-logprobs: tokens per position.")] = 32,
    with_last: Annotated[bool, typer.Option("--with-last", help="specforge-dflash: add the last state.")] = False,
    context: Annotated[int, typer.Option(min=1, help="saelens: tokens of a context.")] = 128,
    hook: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="saelens: a hook such as blocks.3.hook_mlp_out, instead of --layers."),
    ] = None,
    require_loss_mask: Annotated[bool, typer.Option("--require-loss-mask", help="Refuse samples without one.")] = False,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Write every N-th file, from file I (0 is first).")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Divide the work among tasks of the Ray cluster.")] = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as a trainer's own files. The same command continues an interrupted export."""
    from hsx_dist.cli.export import parse_layers, run_export
    from hsx_dist.exporting import ExportOptions

    options = ExportOptions(
        aux_layers=parse_layers(layers),
        model=model,
        num_layers=num_layers,
        loss_mask="raise" if require_loss_mask else "ones",
        top_k=top_k,
        with_last=with_last,
        context=context,
        hook=hook,
    )
    run_export(run, to, dest, storage_option or (), options, shard=shard, ray=ray, as_json=as_json)


@app.command()
def status(
    run: RunPath,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Count the outcomes of all rows of a run, and show whether a driver is running. Exit status 1 if a user must
    act."""
    from hsx_dist.cli.status import print_status

    raise typer.Exit(print_status(run, storage_option or (), as_json=as_json))


@app.command()
def verify(
    run: RunPath,
    workers: Annotated[int, typer.Option(min=1, help="Parts that are read at once.")] = 4,
    sample: Annotated[float, typer.Option(help="Share of the parts to read, such as 0.1.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed for choosing the parts of --sample.")] = 0,
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FILE", help="File of sound parts: skip those in it, and add newly checked ones."),
    ] = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Read a whole run, and check every checksum and count. Exit status 1 if there are problems."""
    from hsx_dist.cli.verify import run_verify

    raise typer.Exit(
        run_verify(run, storage_option or (), workers=workers, sample=sample, seed=seed, resume=resume, as_json=as_json)
    )


@app.command()
def stats(
    run: RunPath,
    layers: LayersOption = None,
    points: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Points such as q,mlp_out. Default: the hidden states; without them, all points but ids."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Read this many tokens, of random samples. Default: all.")
    ] = None,
    skip_first: Annotated[int, typer.Option(min=0, help="Leave out this many tokens at the start of samples.")] = 0,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Store each layer's mean, variance, maxima and norms with a run, for scaling (TokenBatches) and the report."""
    from hsx_dist.cli.stats import run_stats

    options = storage_option or ()
    run_stats(run, options, layers=layers, points=points, max_tokens=max_tokens, skip_first=skip_first, as_json=as_json)


@app.command()
def drain(
    seconds: Annotated[float, typer.Option(min=0, help="Seconds until the node stops.")] = 90.0,
    node: Annotated[Optional[str], typer.Option(help="Id or IP address of another node than this one.")] = None,  # noqa: UP045
    wait: Annotated[
        bool, typer.Option("--wait", help="Return after these seconds, as a Kubernetes preStop hook must.")
    ] = False,
) -> None:
    """Report to Ray that this node will stop. A run stores the pages on this node, and continues on other nodes."""
    import time

    from hsx_dist.fleet.drain import drain_node
    from hsx_dist.observe.console import say

    say(f"node {drain_node(seconds, node=node)} is draining; it stops in {seconds:g} seconds")
    if wait:
        time.sleep(seconds)


@app.command()
def gc(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A run, or where a server stores: a folder or a URL.")],
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove the objects. By default they are only listed.")
    ] = False,
    watch: Watch = 45.0,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Remove parts that no reader needs, if no driver works on the run, or a server's expired objects (ttl_seconds)
    and lock files without an object. A dry run by default."""
    from hsx_dist.cli.gc import run_gc

    run_gc(path, storage_option or (), delete=delete, watch=watch, as_json=as_json)


@app.command()
def rm(
    run: RunPath,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove the run. By default, only show what would be removed.")
    ] = False,
    watch: Watch = 45.0,
    storage_option: StorageOptions = None,
) -> None:
    """Remove a run that no driver works on, and its folder. Files of other programs next to the folder stay."""
    from hsx_dist.cli.gc import run_rm

    run_rm(run, storage_option or (), yes=yes, watch=watch)


@app.command()
def top(
    run: RunPath,
    once: Annotated[bool, typer.Option("--once", help="Print the state once, and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between updates.")] = 5.0,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run from any machine that reads its store: rows, rates, waiting for the store, time left."""
    from hsx_dist.cli.top import run_top

    run_top(run, storage_option or (), once=once, every=every, as_json=as_json)


@app.command()
def report(
    run: RunPath,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = "report.html",
    sample: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--sample", metavar="KEY", help="A sample to show token by token. Repeat for more."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples to read for norms and similarities.")] = 24,
    tokenizer: Tokenizer = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FOLDER_OR_ID",
            help="Draw attention patterns from stored q and k: a folder with config.json, or a Hugging Face id.",
        ),
    ] = None,
    storage_option: StorageOptions = None,
) -> None:
    """Write one self-contained page about a run: what ran, where time went, sizes, norms, similarities."""
    from hsx_dist.cli.report import run_report

    run_report(
        run,
        storage_option or (),
        output=output,
        keys=sample or (),
        samples=samples,
        tokenizer=tokenizer,
        model=model,
    )


@app.command()
def dashboards(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder for the files. Created if it does not exist.")],
) -> None:
    """Write the Grafana dashboard and the Prometheus alert rules for a cluster's monitoring."""
    from hsx_dist.cli.dashboards import run_dashboards

    run_dashboards(folder)
