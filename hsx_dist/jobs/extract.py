"""One extraction, from configuration to summary: ``run_extract`` for jobs and commands, ``extract`` for Python."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hsx_dist.config import ExtractConfig, load_config, public_url, refuse_in_job, resolve_paths
from hsx_dist.errors import ConfigError
from hsx_dist.fleet.base import Fleet
from hsx_dist.fleet.local_fleet import LocalFleet
from hsx_dist.fleet.tasks import EngineSpec
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.manifest import Manifest
from hsx_dist.format.place import Place
from hsx_dist.format.runs import (
    is_complete,
    newest_attempt,
)
from hsx_dist.format.same_run import attempt_token
from hsx_dist.inputs.encode import RowRules
from hsx_dist.inputs.rows import read_rows, rows_from
from hsx_dist.jobs import preflight
from hsx_dist.jobs.accounting import Rows, logging_missing_rows, remaining, same_rows
from hsx_dist.jobs.attempt import begin_attempt, complete, open_or_start_run, take_over, unless_removed
from hsx_dist.jobs.capture import capture_of_run
from hsx_dist.jobs.connect import connect_ray
from hsx_dist.jobs.driver import Driver
from hsx_dist.jobs.heartbeat import Heartbeat
from hsx_dist.jobs.host_share import writer_bytes
from hsx_dist.jobs.input_identity import count_rows, run_seed
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.jobs.limits import HeldBytes, Limits, removable, seconds_left
from hsx_dist.jobs.meaning import run_meaning
from hsx_dist.logger import get_logger
from hsx_dist.observe.console import Console
from hsx_dist.observe.metrics import Meter
from hsx_dist.observe.progress import Progress
from hsx_dist.observe.summary import RunSummary, print_summary
from hsx_dist.ray_arguments import sendable
from hsx_dist.reading.missing import missing_parts
from hsx_dist.store import Store
from hsx_dist.writers.sink import SinkOptions

if TYPE_CHECKING:
    from hsx_dist.reading import Run

log = get_logger(__name__)

T = TypeVar("T")


def extract(
    prompts: Iterable[Any],
    *,
    model: str,
    output: str | os.PathLike[str],
    layers: Any = None,
    **settings: Any,
) -> Run:
    """Extract in this process, without Ray: one engine, writer threads.

    Args:
        prompts: a list of prompts: texts, lists of token ids, lists of chat messages, or mappings like the rows of a
            JSONL file. They are iterated more than once: a generator is read into a list.
        model: Hugging Face id, a model folder, or ``builtin:smollm2-135m-instruct``.
        output: folder or URL of the run. If the run exists, only missing samples are computed.
        layers: ids, ``"last"``, ``"all"`` or ``"eagle3"``. None: all, or as in ``capture``.
        settings: further fields of ``ExtractConfig``, e.g. ``engine_kwargs={"max_model_len": 2048}``.

    Returns:
        The run, opened for reading.

    Raises:
        ConfigError: a setting is wrong. Nothing was started.
        RunMismatch: the run at ``output`` has other settings or another input.
        RunError: the run was removed, or a newer attempt owns it (``Fenced``).
        StoreError: the store failed.
        EngineError: vLLM did not start, or died.

    Example:
        >>> prompts = ["The capital of France is", [504, 3575, 282]]
        >>> extract(prompts, model="builtin:smollm2-135m-instruct", output="runs/one")  # doctest: +SKIP
        Run('...runs/one', 2 samples)
    """
    from hsx_dist.reading import open_run

    if isinstance(prompts, (str, bytes, Mapping)):
        raise ConfigError(f"prompts: expected a list of prompts, got one {type(prompts).__name__}. Pass [prompt]")
    if hasattr(prompts, "columns"):  # iterating over a table gives the columns, or their names
        raise ConfigError(
            f"prompts: expected a list of prompts, got a table ({type(prompts).__name__}). "
            "Pass its rows, e.g. df.to_dict('records') or table.to_pylist()"
        )
    if layers is None and settings.get("capture") is None:
        layers = "all"
    if layers is not None:
        settings["layers"] = layers
    config = load_config(None, (), model=model, output=os.fspath(output), pool="threads", **settings)
    config = resolve_paths(config, Path.cwd())
    kept = prompts if isinstance(prompts, (list, tuple)) else list(prompts)
    run_extraction(config, lambda: rows_from(kept, config.input), Console(stderr=True))
    return open_run(config.output, storage_options=config.store.storage_options)


def run_extract(config: ExtractConfig) -> RunSummary:
    """Run an extraction from its configuration. Prints progress and a summary."""
    refuse_in_job("output", config.output)
    config = resolve_paths(config, Path.cwd())
    read_rows(config.input)  # opens the input: a wrong path raises before anything is started
    return run_extraction(config, lambda: read_rows(config.input), Console())


def run_extraction(config: ExtractConfig, rows: Rows, console: Console) -> RunSummary:
    """Run an extraction: preflight, attempt, fleet, driver, manifest, check."""
    resolve_codec(config.codec)
    if config.pool == "ray":
        connect_ray(public_url(config.output))
        sendable(config)
    else:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # read by vLLM when it is imported
    versions = preflight.check_versions(("vllm", "ray") if config.pool == "ray" else ("vllm",))
    preflight.check_engine_arguments(config)
    root = preflight.open_output(config)
    written, config = config, preflight.pin_revision(config)
    model = preflight.examine_model(config)
    place, manifest = open_or_start_run(written, root, run_meaning(config, model))
    if config.select != "all":
        console.print(f"note: {preflight.partial_note(config.select)}", soft_wrap=True)
    console.print(f"model {public_url(config.model)}: {preflight.captured_note(model)}", soft_wrap=True)

    rows = same_rows(rows)

    def compute(heartbeat: Heartbeat, *rest: Any) -> tuple[str, Progress]:
        return _compute(config, place, model, versions, rows, console, heartbeat, *rest)

    manifest, computed = account_for(config, place, manifest, rows, console, compute)
    ended, progress = computed or ("", None)
    if ended:
        told = f"stopped: {ended}; samples with a receipt stay, and the same command continues from there"
        console.print(told, soft_wrap=True)
        return RunSummary.of(root.url, manifest, stopped=ended)
    return finish(config, place, manifest, model, console, computed=progress)


def account_for(
    config: ExtractConfig,
    place: Place,
    manifest: Manifest,
    rows: Rows,
    console: Console,
    compute: Callable[[Heartbeat, int, RowLedger, Manifest, int, int], T],
    make_heartbeat: Callable[[Place, int], Heartbeat] = Heartbeat,
) -> tuple[Manifest, T | None]:
    """Compute the rows that have no receipt. Returns the manifest, and the result of ``compute`` if it was called.

    ``compute(heartbeat, attempt, ledger, manifest, rows, number of open rows)`` is called if rows are open. It
    completes the run once none is open, and sets the heartbeat's last state.

    Raises:
        RunError: the run was removed meanwhile, also if nothing was to be done.
        RunMismatch: as ``count_rows``, also if another driver stored samples of another input meanwhile.
        ConfigError, StoreError, FormatError: as ``begin_attempt`` and ``take_over``. Fenced: a newer attempt was taken.
    """
    store, computed = place.store, None
    with unless_removed(place):
        total, todo = count_rows(place, rows, manifest, retry_poison=config.retry_poison)
        if not todo and is_complete(store) and not missing_parts(store, manifest, place.version):
            console.print(f"nothing to do: all {total} rows of {place.root.url} are accounted for", soft_wrap=True)
        else:
            attempt = begin_attempt(config, place)
            # Begin now: reading the manifest and the input may take minutes, and a driver without heartbeat looks dead.
            with make_heartbeat(place, attempt) as heartbeat:
                ledger, manifest = take_over(place, attempt, console)
                total, todo = count_rows(place, rows, manifest, retry_poison=config.retry_poison)
                told = f"run {place.root.url}, attempt {attempt}: {total} rows, {total - todo} of them done"
                console.print(told, soft_wrap=True)
                if todo:
                    computed = compute(heartbeat, attempt, ledger, manifest, total, todo)
                else:  # an earlier driver ended after the last row, before it marked the run as complete
                    complete(place, ledger, attempt, manifest, total)
                    heartbeat.state = "finished"
    return manifest, computed


def _compute(
    config: ExtractConfig,
    place: Place,
    model: preflight.Model,
    versions: dict[str, str],
    rows: Rows,
    console: Console,
    heartbeat: Heartbeat,
    attempt: int,
    ledger: RowLedger,
    manifest: Manifest,
    total: int,
    todo: int,
) -> tuple[str, Progress]:
    """Run the driver. Returns why it ended before the last row (empty if it did not), and its progress."""
    spec = engine_spec(config, model, seed=run_seed(place.info, config.sampling_params))
    about = preflight.about(config, model, versions)
    with ExitStack() as stack:
        meter = Meter()
        if config.pool == "ray":
            from hsx_dist.observe.ray_metrics import RayExport

            stack.callback(RayExport(meter, "driver", {"run": spec.output}).close)
        progress = stack.enter_context(Progress(total, total - todo, console, meter))
        limits = stack.enter_context(limits_of(config, place.store, manifest, attempt))
        fleet = make_fleet(config, place, spec, about, attempt)
        driver = make_driver(config, model, fleet, manifest, ledger, progress, limits)
        heartbeat.connect(lambda: {**progress.snapshot(), **driver.counts}, driver.fence)
        # Before the heartbeat's last value, which states that no process of this attempt writes any more.
        stack.callback(lambda: fleet.close(quickly=heartbeat.state != "finished"))
        stack.enter_context(stop_on_signals(driver))
        with logging_missing_rows(rows, manifest, console):
            driver.run(remaining(rows, manifest, retry_poison=config.retry_poison))
        heartbeat.state = f"stopped: {driver.ended}" if driver.ended else "finished"
        if not driver.ended:
            complete(place, ledger, attempt, manifest, total)
    return driver.ended, progress


def make_driver(
    config: ExtractConfig,
    model: preflight.Model,
    fleet: Fleet,
    manifest: Manifest,
    ledger: RowLedger,
    progress: Progress,
    limits: Limits,
) -> Driver:
    return Driver(
        fleet,
        manifest,
        ledger,
        progress,
        task_rows=config.task_rows,
        max_tries=config.max_tries,
        limits=limits,
        token_bytes=model.token_bytes,
        stop_seconds=config.stop_seconds,
        wait_seconds=config.wait_seconds,
    )


@contextmanager
def limits_of(config: ExtractConfig, store: Store, manifest: Manifest, attempt: int) -> Iterator[Limits]:
    """The configured limits, counted from now."""
    held = None
    if config.max_stored_bytes is not None:
        held = HeldBytes(store, lambda: manifest.stored_bytes, removable(manifest, attempt))
    try:
        yield Limits(
            max_rows=config.max_rows,
            max_bytes=config.max_bytes,
            seconds=seconds_left(config),
            held=held,
            max_held_bytes=config.max_stored_bytes,
        )
    finally:
        if held is not None:
            held.close()


def engine_spec(config: ExtractConfig, model: preflight.Model, *, seed: str = "") -> EngineSpec:
    return EngineSpec(
        model=model.path,
        revision=config.revision,
        layers=model.layers,
        capture=capture_of_run(config, model.rows),
        engine_kwargs=config.engine_kwargs,
        sampling_params=config.sampling_params,
        chat_template_kwargs=config.chat_template_kwargs,
        vocab_size=model.vocab_size,
        max_tokens=model.max_tokens,
        output=public_url(config.output),
        codec=config.codec,
        layout=config.layout,
        segment_bytes=int(config.segment_bytes),
        page_bytes=int(config.page_bytes),
        in_flight_bytes=int(config.in_flight_bytes),
        rules=RowRules.of(config),
        seed=seed,
        files=model.files,
        tokenizer=(model.tokenizer_sha256, model.chat_template_sha256),
        dtype=model.dtype,
    )


def make_fleet(config: ExtractConfig, place: Place, spec: EngineSpec, about: dict[str, Any], attempt: int) -> Fleet:
    def options(writer: str) -> SinkOptions:
        return SinkOptions(
            codec=resolve_codec(config.codec),
            about=about,
            writer=writer,
            attempt=attempt,
            layout=config.layout,
            part_bytes=int(config.part_bytes),
            part_seconds=config.part_seconds,
            max_bytes=writer_bytes(config),
            uploads=config.writers.uploads,
        )

    if config.pool == "threads":
        return LocalFleet(spec, place.store, options("local"), config.writers.threads)
    from hsx_dist.fleet.sizing import ray_fleet

    name, token = f"hsx-{uuid.uuid4().hex[:6]}", attempt_token(place.store, attempt)
    return ray_fleet(config, spec, options, name=name, folder=place.folder, token=token)


@contextmanager
def stop_on_signals(driver: Driver) -> Iterator[None]:
    """Make SIGTERM and the first SIGINT stop the run in order. Does nothing outside of the main thread, where Python
    allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, _: object) -> None:
        driver.stop()
        signal.signal(number, before[number])  # the second signal ends the process

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(
    config: ExtractConfig,
    place: Place,
    manifest: Manifest,
    model: preflight.Model,
    console: Console,
    *,
    computed: Progress | None,
) -> RunSummary:
    """Print a summary of the run, and compare samples with transformers if configured."""
    summary = RunSummary.of(place.root.url, manifest)
    print_summary(summary, manifest, console, computed)
    if config.check_samples and summary.samples:
        from hsx_dist.jobs.check import check_run

        summary.check_passed = check_run(config, place, model, newest_attempt(place.store), console)
    return summary
