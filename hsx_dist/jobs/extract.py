"""One extraction, from configuration to summary: ``run_extract`` for jobs and commands, ``extract`` for Python."""

from __future__ import annotations

import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hsx_dist.config import ExtractConfig, is_local, load_config, public_url, resolve_paths
from hsx_dist.errors import ConfigError, HsxError, NotFound, RunMismatch
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.manifest import RUN, Manifest, RowFate
from hsx_dist.format.runs import (
    load_manifest,
    newest_attempt,
    read_complete,
    read_run,
    take_attempt,
    write_complete,
    write_run,
)
from hsx_dist.jobs import preflight
from hsx_dist.jobs.driver import Driver, Heartbeat, RowLedger
from hsx_dist.jobs.fleet import Fleet, LocalFleet
from hsx_dist.jobs.rows import Row, read_rows, rows_from
from hsx_dist.jobs.tasks import EngineSpec
from hsx_dist.observe.metrics import Meter
from hsx_dist.observe.progress import Progress
from hsx_dist.observe.summary import RunSummary, print_summary
from hsx_dist.store import Store
from hsx_dist.writers.sink import SinkOptions

if TYPE_CHECKING:
    from hsx_dist.reading import Run

log = logging.getLogger(__name__)

Rows = Callable[[], Iterator[Row | RowFate]]


def extract(
    prompts: Iterable[Any],
    *,
    model: str,
    output: str | os.PathLike[str],
    layers: Any = "all",
    **settings: Any,
) -> Run:
    """Extract in this process, without Ray: one engine, writer threads. Returns the run, opened for reading.

    Args:
        prompts: texts, lists of token ids, lists of chat messages, or mappings like the rows of a JSONL file. They
            are gone through more than once: a generator is read into a list.
        model: Hugging Face id, a model folder, or ``builtin:smollm2-135m-instruct``.
        output: folder or URL of the run. If the run is there already, only what is missing is computed.
        layers: ids, ``"last"``, ``"all"`` or ``"eagle3"``.
        settings: further fields of ``ExtractConfig``, e.g. ``engine_kwargs={"max_model_len": 2048}``.

    Raises:
        ConfigError: a setting is wrong; nothing was started.
        RunMismatch: the run at ``output`` was made with settings of another meaning.
        EngineError: vLLM did not start, or died.
    """
    from hsx_dist.reading import open_run

    config = load_config(None, (), model=model, output=os.fspath(output), layers=layers, pool="threads", **settings)
    config = resolve_paths(config, Path.cwd())
    kept = prompts if isinstance(prompts, (list, tuple)) else list(prompts)
    run_extraction(config, lambda: rows_from(kept, config.input), Console(stderr=True))
    return open_run(config.output, storage_options=config.store.storage_options)


def run_extract(config: ExtractConfig, *, base: Path | None = None) -> RunSummary:
    """An extraction from its configuration; prints progress and a summary.

    ``base``: the folder against which relative paths are resolved (default: the current one).
    """
    refuse_job_local_output(config)
    config = resolve_paths(config, base or Path.cwd())
    read_rows(config.input)  # opens the input: a wrong path is told before anything is started
    return run_extraction(config, lambda: read_rows(config.input), Console())


def refuse_job_local_output(config: ExtractConfig) -> None:
    """A relative output of a submitted job would end in the job's copy of the working folder, and be lost with it.

    Raises:
        ConfigError: the output is relative, and this is a Ray job.
    """
    if (
        "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        and is_local(config.output)
        and not Path(config.output).is_absolute()
    ):
        raise ConfigError(
            f"output: expected an absolute path or a URL in a submitted job, came {config.output!r}, which would lie "
            "in the job's private copy of the folder; add output=$PWD/… to the command line, or an object store's URL"
        )


def run_extraction(config: ExtractConfig, rows: Rows, console: Console) -> RunSummary:
    """The extraction proper: preflight, attempt, fleet, driver, manifest, check."""
    resolve_codec(config.codec)
    if config.pool == "ray":
        connect_ray(public_url(config.output))
    else:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # read by vLLM when it is imported
    versions = preflight.check_versions(("vllm", "ray") if config.pool == "ray" else ("vllm",))
    store = preflight.open_output(config)
    model = preflight.examine_model(config)
    meaning = {**config.meaning(), "layers": list(model.layers), "tokenizer_sha256": model.tokenizer_sha256}
    manifest = open_or_start_run(config, store, meaning)
    console.print(
        f"model {public_url(config.model)}: layers {list(model.layers)} of 0…{model.num_layers}", soft_wrap=True
    )

    total, todo = count_rows(rows, manifest)
    if not todo and read_complete(store) is not None:
        console.print(f"nothing to do: all {total} rows of {store.url} are accounted for")
        return finish(config, store, manifest, model, console, computed=None)
    attempt = take_attempt(store, {"host": os.uname().nodename, "pid": os.getpid(), "settings": config.public()})
    console.print(f"run {store.url}, attempt {attempt}: {total} rows, {total - todo} of them done", soft_wrap=True)
    spec = engine_spec(config, model)
    about = preflight.about(config, model, versions)
    ledger = RowLedger(store, attempt, manifest)
    state = "failed"
    with ExitStack() as stack:
        meter = Meter()
        progress = Progress(total, total - todo, console, meter)
        heartbeat = Heartbeat(store, attempt, progress.snapshot)
        stack.callback(lambda: heartbeat.stop(state))
        if config.pool == "ray":
            from hsx_dist.observe.ray_metrics import RayExport

            stack.callback(RayExport(meter, "driver", {"run": spec.output}).close)
        fleet = make_fleet(config, store, spec, about, attempt)
        stack.callback(fleet.close)
        stack.enter_context(progress)
        driver = Driver(fleet, manifest, ledger, progress, task_rows=config.task_rows, max_tries=config.max_tries)
        stack.enter_context(stop_on_signals(driver))
        with telling_what_is_missing(rows, manifest, console):
            driver.run(remaining(rows, manifest))
        state = "stopped" if driver.stopped else "finished"
        if not driver.stopped:
            write_complete(store, attempt, manifest, {"rows": total})
    if driver.stopped:
        console.print("stopped: what has a receipt stays; the same command goes on from there")
        return RunSummary.of(store.url, manifest, stopped=True)
    return finish(config, store, manifest, model, console, computed=progress)


@contextmanager
def telling_what_is_missing(rows: Rows, manifest: Manifest, console: Console) -> Iterator[None]:
    """When the attempt ends by an error: which rows no receipt accounts for, as far as this driver knows."""
    try:
        yield
    except HsxError as e:
        missing = [row.key for row in remaining(rows, manifest)]
        some = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        console.print(
            f"ended by {type(e).__name__}: {len(missing)} rows are not proven ({some}); what has a receipt stays, and "
            "the same command goes on from there",
            soft_wrap=True,
            markup=False,
        )
        raise


def open_or_start_run(config: ExtractConfig, store: Store, meaning: dict[str, Any]) -> Manifest:
    """The manifest of the run at the output; writes ``run.json`` where there is none.

    Raises:
        RunMismatch: the run's samples have another meaning, or ``resume`` forbids what would be done.
    """
    try:
        store.head(RUN)
    except NotFound:
        if config.resume == "must":
            raise RunMismatch(
                f"resume: must, but there is no run at {store.url}; check output, or set resume=allow"
            ) from None
        write_run(
            store,
            {
                "meaning": meaning,
                "settings": config.public(),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        return Manifest()
    if config.resume == "never":
        raise RunMismatch(
            f"resume: never, but there is a run at {store.url}; choose another output, or set resume=allow"
        )
    before = read_run(store).get("meaning", {})
    differ = [k for k in sorted({*before, *meaning}) if before.get(k) != meaning.get(k)]
    if differ:
        lines = "; ".join(f"{k}: the run has {before.get(k)!r}, this is {meaning.get(k)!r}" for k in differ)
        raise RunMismatch(
            f"the run at {store.url} was made with settings that give its samples another meaning ({lines}). Choose "
            "another output, or the same settings"
        )
    return load_manifest(store)


def count_rows(rows: Rows, manifest: Manifest) -> tuple[int, int]:
    """(all rows, rows that no receipt accounts for)."""
    total = todo = 0
    for row in rows():
        total += 1
        todo += not accounted(row, manifest)
    return total, todo


def accounted(row: Row | RowFate, manifest: Manifest) -> bool:
    """A refused row stays refused while its content is the same: so are the settings that refused it. A failed one gets
    another chance."""
    if isinstance(row, RowFate):
        return row.key in manifest.refused
    if row.key in manifest.samples:
        return row.number_key not in manifest.refused
    fate = manifest.refused.get(row.key)
    return fate is not None and fate.content == row.content


def remaining(rows: Rows, manifest: Manifest) -> Iterator[Row | RowFate]:
    """What is still to be done. A row that can be read now comes after the withdrawal of what was said of it before."""
    for row in rows():
        if accounted(row, manifest):
            continue
        if isinstance(row, Row) and row.number_key in manifest.refused:
            yield RowFate(row.number_key, row.row, "withdrawn", "the row was corrected", 0)
        if isinstance(row, RowFate) or row.key not in manifest.samples:
            yield row


def engine_spec(config: ExtractConfig, model: preflight.Model) -> EngineSpec:
    return EngineSpec(
        model=model.path,
        revision=config.revision,
        layers=model.layers,
        engine_kwargs=config.engine_kwargs,
        sampling_params=config.sampling_params,
        chat_template_kwargs=config.chat_template_kwargs,
        include_output_tokens=config.include_output_tokens,
        vocab_size=model.vocab_size,
        max_tokens=model.max_tokens,
        output=public_url(config.output),
        codec=config.codec,
        layout=config.layout,
        segment_bytes=int(config.segment_bytes),
        page_bytes=int(config.page_bytes),
        in_flight_bytes=int(config.in_flight_bytes),
    )


def make_fleet(config: ExtractConfig, store: Store, spec: EngineSpec, about: dict[str, Any], attempt: int) -> Fleet:
    def options(writer: str) -> SinkOptions:
        return SinkOptions(
            codec=resolve_codec(config.codec),
            about=about,
            writer=writer,
            attempt=attempt,
            layout=config.layout,
            part_bytes=int(config.part_bytes),
            part_seconds=config.part_seconds,
            max_bytes=int(config.writers.credit_bytes) + int(config.part_bytes),
            uploads=config.writers.uploads,
        )

    if config.pool == "threads":
        return LocalFleet(spec, store, options("local"), config.writers.threads)
    from hsx_dist.jobs.cluster import ray_fleet

    return ray_fleet(config, spec, options, name=f"hsx-{uuid.uuid4().hex[:6]}")


def connect_ray(run: str) -> None:
    """Join the cluster of ``RAY_ADDRESS`` (in a submitted job: its own), or start one of this machine alone.

    The job's metadata on Ray's dashboard say which ``run`` it makes.
    """
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.WARNING,
            job_config=ray.job_config.JobConfig(metadata={"hsx_run": run}),
        )
    except ConnectionError as e:
        raise ConfigError(
            f"RAY_ADDRESS: expected a Ray cluster at {address!r}, came: {e}; start one, or unset it"
        ) from e


@contextmanager
def stop_on_signals(driver: Driver) -> Iterator[None]:
    """SIGTERM and the first SIGINT end the run in good order. (Only in the main thread: no other may take signals.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, _: object) -> None:
        driver.stop()
        signal.signal(number, before[number])  # the second one is taken at its word

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(
    config: ExtractConfig,
    store: Store,
    manifest: Manifest,
    model: preflight.Model,
    console: Console,
    *,
    computed: Progress | None,
) -> RunSummary:
    """Print what the run holds, and compare samples with transformers where that is asked for."""
    summary = RunSummary.of(store.url, manifest)
    print_summary(summary, manifest, console, computed)
    if config.check_samples and summary.samples:
        from hsx_dist.jobs.check import check_run

        summary.check_passed = check_run(config, store, model, newest_attempt(store), console)
    return summary
