"""One extraction, from configuration to summary: ``run_extract`` for jobs and commands, ``extract`` for Python."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hsx_dist.config import ExtractConfig, load_config, public_url, refuse_in_job, resolve_paths
from hsx_dist.errors import Fenced, FormatError, HsxError, NotFound, RunError, RunMismatch
from hsx_dist.fleet.base import Fleet
from hsx_dist.fleet.local_fleet import LocalFleet
from hsx_dist.fleet.tasks import EngineSpec
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.manifest import Manifest, RowFate
from hsx_dist.format.place import Place, find_place, start_run
from hsx_dist.format.runs import (
    close_attempt,
    is_complete,
    load_manifest,
    newest_attempt,
    refuse_version_1,
    require_conditional_puts,
    seal_attempts,
    take_attempt,
    write_complete,
)
from hsx_dist.inputs.encode import RowRules
from hsx_dist.inputs.rows import Row, read_rows, rows_from
from hsx_dist.jobs import preflight
from hsx_dist.jobs.connect import connect_ray
from hsx_dist.jobs.driver import Driver
from hsx_dist.jobs.heartbeat import Heartbeat
from hsx_dist.jobs.input_identity import check_same_input, differences, first_rows, run_seed
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.jobs.limits import HeldBytes, Limits, seconds_left
from hsx_dist.logger import get_logger
from hsx_dist.observe.console import Console
from hsx_dist.observe.metrics import Meter
from hsx_dist.observe.progress import Progress
from hsx_dist.observe.summary import RunSummary, print_summary
from hsx_dist.reading.missing import missing_parts
from hsx_dist.store import Store
from hsx_dist.writers.sink import SinkOptions

if TYPE_CHECKING:
    from hsx_dist.reading import Run

log = get_logger(__name__)

Rows = Callable[[], Iterator[Row | RowFate]]
T = TypeVar("T")


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
    refuse_in_job("output", config.output)
    config = resolve_paths(config, base or Path.cwd())
    read_rows(config.input)  # opens the input: a wrong path is told before anything is started
    return run_extraction(config, lambda: read_rows(config.input), Console())


def run_extraction(config: ExtractConfig, rows: Rows, console: Console) -> RunSummary:
    """The extraction proper: preflight, attempt, fleet, driver, manifest, check."""
    resolve_codec(config.codec)
    if config.pool == "ray":
        connect_ray(public_url(config.output))
    else:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # read by vLLM when it is imported
    versions = preflight.check_versions(("vllm", "ray") if config.pool == "ray" else ("vllm",))
    root = preflight.open_output(config)
    model = preflight.examine_model(config)
    meaning = {
        **config.meaning(),
        "layers": list(model.layers),
        "tokenizer_sha256": model.tokenizer_sha256,
        "chat_template_sha256": model.chat_template_sha256,
    }
    place, manifest = open_or_start_run(config, root, meaning, rows)
    check_same_input(root.url, place.info, manifest, rows)
    if config.select != "all":
        console.print(f"note: {preflight.partial_note(config.select)}", soft_wrap=True)
    console.print(
        f"model {public_url(config.model)}: layers {list(model.layers)} of 0…{model.num_layers}", soft_wrap=True
    )

    def compute(attempt: int, ledger: RowLedger, manifest: Manifest, total: int, todo: int) -> tuple[str, Progress]:
        return _compute(config, place, model, versions, rows, console, attempt, ledger, manifest, total, todo)

    manifest, computed = account_for(config, place, manifest, rows, console, compute)
    ended, progress = computed or ("", None)
    if ended:
        told = f"stopped: {ended}; what has a receipt stays, and the same command goes on from there"
        console.print(told, soft_wrap=True)
        return RunSummary.of(root.url, manifest, stopped=ended)
    return finish(config, place, manifest, model, console, computed=progress)


def account_for(
    config: ExtractConfig,
    place: Place,
    manifest: Manifest,
    rows: Rows,
    console: Console,
    compute: Callable[[int, RowLedger, Manifest, int, int], T],
) -> tuple[Manifest, T | None]:
    """Have all ``rows`` accounted for; returns the manifest, and what ``compute`` did where it was called.

    ``compute(attempt, ledger, manifest, rows, rows that are left)`` is called where rows are left, and completes the
    run once none is.

    Raises:
        RunError: the run was removed meanwhile, also if nothing was to be done.
        ConfigError, StoreError, FormatError: as ``take_over``. Fenced: a newer attempt was taken.
    """
    store, computed = place.store, None
    with unless_removed(place):
        total, todo = count_rows(rows, manifest, retry_poison=config.retry_poison)
        if not todo and is_complete(store) and not missing_parts(store, manifest, place.version):
            console.print(f"nothing to do: all {total} rows of {place.root.url} are accounted for", soft_wrap=True)
        else:
            attempt, ledger, manifest = take_over(config, place, console)
            total, todo = count_rows(rows, manifest, retry_poison=config.retry_poison)
            told = f"run {place.root.url}, attempt {attempt}: {total} rows, {total - todo} of them done"
            console.print(told, soft_wrap=True)
            if todo:
                computed = compute(attempt, ledger, manifest, total, todo)
            else:  # its driver died, or a limit ended it, when all that was missing was to say so
                complete(ledger, attempt, manifest, total)
    return manifest, computed


def _compute(
    config: ExtractConfig,
    place: Place,
    model: preflight.Model,
    versions: dict[str, str],
    rows: Rows,
    console: Console,
    attempt: int,
    ledger: RowLedger,
    manifest: Manifest,
    total: int,
    todo: int,
) -> tuple[str, Progress]:
    """Why the driver ended before the last row (empty: it did not), and its progress."""
    spec = engine_spec(config, model, seed=run_seed(place.info, config.sampling_params))
    about = preflight.about(config, model, versions)
    state = "failed"
    with ExitStack() as stack:
        meter = Meter()
        if config.pool == "ray":
            from hsx_dist.observe.ray_metrics import RayExport

            stack.callback(RayExport(meter, "driver", {"run": spec.output}).close)
        progress = stack.enter_context(Progress(total, total - todo, console, meter))
        limits = stack.enter_context(limits_of(config, place.store, manifest))
        fleet = make_fleet(config, place, spec, about, attempt)
        driver = Driver(
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
        heartbeat = Heartbeat(
            place,
            attempt,
            progress=lambda: {**progress.snapshot(), **driver.counts},
            on_over=driver.fence,
        )
        # The last heartbeat says that no process of this attempt writes any more: it follows the fleet's end.
        stack.callback(lambda: heartbeat.stop(state))
        stack.callback(lambda: fleet.close(quickly=state != "finished"))
        stack.enter_context(stop_on_signals(driver))
        with telling_what_is_missing(rows, manifest, console):
            try:
                driver.run(remaining(rows, manifest, retry_poison=config.retry_poison))
            except Fenced:
                state = "fenced"
                raise
        state = f"stopped: {driver.ended}" if driver.ended else "finished"
        if not driver.ended:
            complete(ledger, attempt, manifest, total)
    return driver.ended, progress


def take_over(config: ExtractConfig, place: Place, console: Console) -> tuple[int, RowLedger, Manifest]:
    """Take the run's next attempt, stop the writers of all earlier ones, and learn what they have proven: the attempt,
    its ledger and the manifest. What receipts prove and the store has lost is declared lost.

    Raises:
        ConfigError: the store cannot tell two drivers apart.
        RunError: the run was removed meanwhile.
        StoreError, FormatError: as ``load_manifest``.
    """
    store = place.store
    if not config.store.single_driver:
        require_conditional_puts(store)
    attempt = take_attempt(store, {"host": os.uname().nodename, "pid": os.getpid(), "settings": config.public()})
    require_not_removed(place)
    seal_attempts(store, attempt - 1, attempt)
    if place.version == 1:
        refuse_version_1(store, attempt)
    manifest = load_manifest(store)
    ledger = RowLedger(store, attempt, manifest)
    if lost := missing_parts(store, manifest, place.version):
        before = len(manifest.samples)
        ledger.declare_lost(lost)
        console.print(
            f"{len(lost)} parts that receipts name are not in the store ({lost[0]}, …): "
            f"{before - len(manifest.samples)} samples are computed again",
            soft_wrap=True,
            markup=False,
        )
    return attempt, ledger, manifest


def complete(ledger: RowLedger, attempt: int, manifest: Manifest, rows: int) -> None:
    """Mark the run as complete. All ``rows`` are accounted for by the receipts that ``manifest`` knows; what a writer
    that was given up has proven beyond that is added.

    Raises:
        Fenced: a newer attempt was taken.
        StoreError: the store's.
    """
    close_attempt(ledger.store, attempt)
    ledger.read_new_receipts()
    write_complete(ledger.store, attempt, manifest, {"rows": rows})


def require_not_removed(place: Place) -> None:
    """Raises ``RunError`` when the run was removed."""
    if place.removed():
        raise RunError(
            f"{place.root.url}: expected the run that this driver works on, got the mark of its removal: its samples "
            "are lost. Start the extraction again, at a place that no other process removes"
        )


@contextmanager
def unless_removed(place: Place) -> Iterator[None]:
    """Raises ``RunError`` when the run was removed meanwhile, also in the place of errors that a removal may cause."""
    try:
        yield
    except (NotFound, FormatError):
        require_not_removed(place)
        raise
    require_not_removed(place)


@contextmanager
def limits_of(config: ExtractConfig, store: Store, manifest: Manifest) -> Iterator[Limits]:
    """The configured limits, counted from now."""
    held = None
    if config.max_stored_bytes is not None:
        held = HeldBytes(store, lambda: manifest.stored_bytes)
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


@contextmanager
def telling_what_is_missing(rows: Rows, manifest: Manifest, console: Console) -> Iterator[None]:
    """When the attempt ends by an error: which rows no receipt accounts for, as far as this driver knows."""
    try:
        yield
    except Fenced:
        raise  # they are the newer driver's affair
    except HsxError as e:
        first: list[str] = []
        missing = 0
        for row in remaining(rows, manifest):
            missing += 1
            if len(first) < 5:
                first.append(row.key)
        some = ", ".join(first) + (", …" if missing > 5 else "")
        console.print(
            f"ended by {type(e).__name__}: {missing} rows are not proven ({some}); what has a receipt stays, and "
            "the same command goes on from there",
            soft_wrap=True,
        )
        raise


def open_or_start_run(
    config: ExtractConfig, root: Store, meaning: dict[str, Any], rows: Rows = lambda: iter(())
) -> tuple[Place, Manifest]:
    """The run at the output and its manifest; starts a run where there is none.

    Raises:
        RunMismatch: the run's samples have another meaning, or ``resume`` forbids what would be done.
        RunError: objects of an unfinished removal are left at the output.
    """
    place = find_place(root)
    if place is None:
        if config.resume == "must":
            raise RunMismatch(f"resume: must, but there is no run at {root.url}; check output, or set resume=allow")
        created = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"meaning": meaning, "settings": config.public(), "first_rows": first_rows(rows), "created": created}
        try:
            return start_run(root, about), Manifest()
        except RunError:
            # Another driver was quicker (a job that was submitted twice): this one goes on with that one's run.
            place = find_place(root)
            if place is None or config.resume == "never":
                raise
    if config.resume == "never":
        raise RunMismatch(
            f"resume: never, but there is a run at {root.url}; choose another output, or set resume=allow"
        )
    differ = differences(place.info.get("meaning", {}), meaning)
    if differ:
        lines = "; ".join(f"{name}: the run has {had!r}, this is {has!r}" for name, had, has in differ)
        raise RunMismatch(
            f"the run at {root.url} was made with settings that give its samples another meaning ({lines}). Choose "
            "another output, or the same settings"
        )
    with unless_removed(place):
        return place, load_manifest(place.store)


def count_rows(rows: Rows, manifest: Manifest, *, retry_poison: bool = False) -> tuple[int, int]:
    """(all rows, rows that no receipt accounts for)."""
    total = todo = 0
    for row in rows():
        total += 1
        todo += not accounted(row, manifest, retry_poison=retry_poison)
    return total, todo


def accounted(row: Row | RowFate, manifest: Manifest, *, retry_poison: bool = False) -> bool:
    """A refused row stays refused while its content is the same: so are the settings that refused it. So does one that
    killed its engine, unless ``retry_poison``. One that failed otherwise gets another chance."""
    if isinstance(row, RowFate):
        return row.key in manifest.refused
    if row.key in manifest.samples:
        return row.number_key not in manifest.refused
    fate = manifest.refused.get(row.key) or manifest.failed.get(row.key)
    if fate is None or fate.content != row.content:
        return False
    return fate.fate == "refused" or (fate.fate == "poison" and not retry_poison)


def remaining(rows: Rows, manifest: Manifest, *, retry_poison: bool = False) -> Iterator[Row | RowFate]:
    """What is still to be done. A row that can be read now comes after the withdrawal of what was said of it before."""
    for row in rows():
        if accounted(row, manifest, retry_poison=retry_poison):
            continue
        if isinstance(row, Row) and row.number_key in manifest.refused:
            yield RowFate(row.number_key, row.row, "withdrawn", "the row was corrected", 0)
        if isinstance(row, RowFate) or row.key not in manifest.samples:
            yield row


def engine_spec(config: ExtractConfig, model: preflight.Model, *, seed: str = "") -> EngineSpec:
    return EngineSpec(
        model=model.path,
        revision=config.revision,
        layers=model.layers,
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
            max_bytes=int(config.writers.credit_bytes) + int(config.part_bytes),
            uploads=config.writers.uploads,
        )

    if config.pool == "threads":
        return LocalFleet(spec, place.store, options("local"), config.writers.threads)
    from hsx_dist.fleet.sizing import ray_fleet

    return ray_fleet(config, spec, options, name=f"hsx-{uuid.uuid4().hex[:6]}", folder=place.folder)


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
    place: Place,
    manifest: Manifest,
    model: preflight.Model,
    console: Console,
    *,
    computed: Progress | None,
) -> RunSummary:
    """Print what the run holds, and compare samples with transformers where that is asked for."""
    summary = RunSummary.of(place.root.url, manifest)
    print_summary(summary, manifest, console, computed)
    if config.check_samples and summary.samples:
        from hsx_dist.jobs.check import check_run

        summary.check_passed = check_run(config, place, model, newest_attempt(place.store), console)
    return summary
