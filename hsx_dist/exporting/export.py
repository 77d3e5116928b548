"""Export of a run file by file. Resumes from existing files, and may be divided among processes."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.exporting.base import LAYER_IDS, Exporter, ExportOptions, SampleLeftOut, require_hidden_states
from hsx_dist.exporting.destination import folder_below
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading.arguments import path_text, whole
from hsx_dist.reading.column import is_mean
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.order import is_of_run
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Sample
from hsx_dist.reading.select import Selection
from hsx_dist.reading.whole import require_whole
from hsx_dist.store.output_file import regular_file, writable
from hsx_dist.store.unfinished_folder import UnfinishedFolder, remove_unfinished_folders, unfinished_folder
from hsx_dist.text import shown_error

_STATEMENT = "export.json"
#: Endings of the files of data sets, which ``finish`` may write.
_DATA_SETS = (".json", ".arrow", ".parquet")
#: Members of ``export.json`` that earlier versions did not write.
_LATER = ("run_id", "samples_hash", "samples_per_file", "loss_mask", "tokens", "norm", "last_layer", "model_revision")
#: Bytes read of a folder's ``export.json``, which usually has a few KiB.
_LARGEST_STATEMENT = 4 << 20
#: Seconds that another process may take to write an ``export.json`` that it has created.
_STATEMENT_S = 5.0
_ENTRY_POINTS = "hsx_dist.exporters"
#: Begin the names of folders with files that are not complete: of samples, and for the whole data set.
_NEW, _FINISHING = ".new-", ".finish-"
#: Name → class, or its module and name: a trainer's packages are imported only for its export.
EXPORTERS: dict[str, type[Exporter] | str] = {
    "vllm": "hsx_dist.exporting.vllm:VllmExporter",
    "speculators": "hsx_dist.exporting.speculators_dataset:SpeculatorsExporter",
    "specforge-eagle3": "hsx_dist.exporting.specforge:Eagle3Exporter",
    "specforge-dflash": "hsx_dist.exporting.specforge:DFlashExporter",
    "specforge-dspark": "hsx_dist.exporting.specforge:DSparkExporter",
    "modelopt": "hsx_dist.exporting.modelopt:ModelOptExporter",
    "saelens": "hsx_dist.exporting.cached_activations:SaeLensExporter",
    "topk-logprobs": "hsx_dist.exporting.topk:TopKExporter",
    "routing": "hsx_dist.exporting.routing:RoutingExporter",
}


def register_exporter(name: str, exporter: type[Exporter]) -> None:
    """Register ``exporter`` as ``name`` in this process.

    ``hsx export`` finds exporters by entry points of the group ``hsx_dist.exporters``.

    Raises:
        ConfigError: the name is used already.

    Example:
        >>> from hsx_dist.exporting import register_exporter
        >>> from hsx_dist.exporting.vllm import VllmExporter
        >>> register_exporter("my-trainer", VllmExporter)
    """
    if name in EXPORTERS:
        raise ConfigError(f"exporter {name!r}: expected a new name, got one of {sorted(EXPORTERS)}. Choose another")
    EXPORTERS[name] = exporter


@dataclass(frozen=True)
class ExportReport:
    """Numbers of files: ``written`` by this call, and ``there`` before. ``finished``: the destination is complete.

    ``left_out``: samples that the trainer refuses, in this or earlier calls. Each has a file ``NAME.left-out`` with the
    reason instead of the file ``NAME``.

    Example:
        >>> from hsx_dist.exporting import export_run
        >>> export_run(run, "vllm", "exports/report")
        ExportReport(written=3, there=0, finished=True, left_out=0)
    """

    written: int
    there: int
    finished: bool
    left_out: int = 0


def export_run(
    run: Run,
    to: str,
    dest: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    shard: int = 0,
    shards: int = 1,
    finish: bool = True,
    prefetch_bytes: int = 256 << 20,
) -> ExportReport:
    """Write a run's samples into the folder ``dest`` in the format of the trainer ``to``.

    Files appear complete. Existing files are not written again, so that a repeated call continues an interrupted one.
    ``export.json`` describes the layers, their convention, and the applied norm.

    Args:
        to: name of an exporter, such as ``vllm``, ``speculators`` or ``saelens``. ``hsx export --help`` lists them.
        options: options of the exporter.
        shard, shards: ``shards`` processes may share the work: each writes every ``shards``-th file.
        finish: if all files are complete, also write the files for the whole data set.
        prefetch_bytes: as for ``HiddenStatesDataset``.

    Raises:
        ConfigError: no such exporter; the run lacks hidden states or layers that the trainer needs; ``dest`` has
            another export or other files of the same names, or ignores their case.
        ConfigError: a subfolder of ``dest`` that gets files is a link; ``dest`` cannot be written.
        RunError: the run was removed during the export.
        FormatError, StoreError: errors of reading.

    Example:
        >>> from hsx_dist.exporting import ExportOptions, export_run
        >>> export_run(run, "vllm", "exports/vllm", ExportOptions(aux_layers=[15])).finished
        True
    """
    shard, shards = whole("shard", shard), whole("shards", shards)
    if not 0 <= shard < shards:
        raise ConfigError(f"shard: expected 0 … {shards - 1}, got {shard}. Count shards from 0")
    run = run.snapshot()  # files are named by position
    folder = Path(path_text("dest", dest))
    options = options or ExportOptions()
    kind = exporter_of(to)
    if kind.points is None:
        require_hidden_states(run, to)
    exporter = kind(run, options)
    for place in range(min(1, len(run))):  # before ``dest`` is claimed; other samples are checked when they are read
        _check_tokens(run, place, exporter)
    firsts = range(0, len(run), exporter.per_file)
    with writable(folder, "folder"):
        _check_foreign(folder, {folder / exporter.file(first) for first in firsts})
        _claim(folder, _statement_of(run, to, exporter), run)
        _check_names(folder, (exporter.file(first) for first in firsts))
        own = {first: folder / exporter.file(first) for first in firsts[shard::shards]}
        todo = [first for first, path in own.items() if not _is_done(path)]
        if todo:
            with run.place.reading(), folder_below(folder) as opened, unfinished_folder(opened, _NEW) as new:
                for first, items in _batches(run, exporter, options, todo, prefetch_bytes):
                    _write_whole(exporter, items, new, folder, exporter.file(first))
        finished = all(_is_done(folder / exporter.file(f)) for f in firsts)
        if finished:
            with folder_below(folder) as opened:
                # Trainers read every file with the suffix, also the unfinished files of killed processes.
                remove_unfinished_folders(opened, _NEW)
                if finish:
                    _finish(exporter, run, folder, opened)
        left_out = {first for first, path in own.items() if _left_out(path).exists()}
        written = len(set(todo) - left_out)
        return ExportReport(written, len(own) - len(left_out) - written, finished, len(left_out))


def exporter_of(name: str) -> type[Exporter]:
    """Return the class of that name. Raises ``ConfigError`` if there is none."""
    found = EXPORTERS.get(name)
    if found is None:
        for point in entry_points(group=_ENTRY_POINTS, name=name):
            try:
                found = EXPORTERS[name] = point.load()
            except Exception as e:  # another package's import may raise anything
                raise ConfigError(
                    f"exporter {name!r}: expected {point.value} of an installed package to be importable, got "
                    f"{shown_error(e)}. Repair or update that package"
                ) from e
    if found is None:
        raise ConfigError(f"exporter: expected one of {', '.join(sorted(EXPORTERS))}, got {name!r}. Choose one of them")
    if not isinstance(found, str):
        return found
    module, _, attribute = found.partition(":")
    made: type[Exporter] = getattr(importlib.import_module(module), attribute)
    return made


def _statement_of(run: Run, to: str, exporter: Exporter) -> dict[str, Any]:
    """Return the content of ``export.json``."""
    return {
        "exporter": to,
        "run": run.url,
        "run_id": run.id,
        "samples": len(run),
        "samples_hash": run.index.digest(),
        "samples_per_file": exporter.per_file,
        "layer_ids": LAYER_IDS,
        **exporter.statement(),
    }


def _check_foreign(folder: Path, own: Set[Path]) -> None:
    """Raise ``ConfigError`` if a folder of the export has data without ``export.json``, which an export writes first.

    Trainers read every file with the suffix, and data sets replace each other's ``state.json``.
    """
    statement = folder / _STATEMENT
    suffixes = {*_DATA_SETS, _left_out(folder).suffix, *(path.suffix for path in own)}
    others = (path for parent in {folder, *(path.parent for path in own)} for path in parent.glob("[!.]*"))
    found = None if statement.exists() else next((path for path in others if path.suffix in suffixes), None)
    if found is not None and not statement.exists():  # again: another shard may have written both
        raise ConfigError(
            f"{folder}: expected an empty folder or an export with {_STATEMENT}, got {found.name} of another program, "
            f"or of an export without {_STATEMENT}. Choose another destination"
        )


def _check_names(folder: Path, names: Iterable[str]) -> None:
    """Raise ``ConfigError`` if the disk of ``folder``, which has ``export.json``, would store two files as one."""
    if not (folder / _STATEMENT.upper()).exists():
        return
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise ConfigError(
                f"{folder}: expected a disk that distinguishes case, got {other!r} and {name!r} as one file. "
                "Choose a destination on another disk"
            )


def _claim(folder: Path, statement: dict[str, Any], run: Run) -> None:
    """Write ``export.json`` before any other file. ``ConfigError``: the folder has a different one."""
    path = folder / _STATEMENT
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(statement, indent=1) + "\n"
    try:
        _create(folder, text)
    except FileExistsError:
        there = _statement(path)
        if is_of_run(there.get("run_id"), run.place):
            there = {**{name: statement[name] for name in _LATER if name in statement}, **there}
        if there.get("samples_hash") == run.index.digest(cuts=True):  # an earlier version began the export
            there["samples_hash"] = statement["samples_hash"]
        differs = sorted(k for k in {*there, *statement} if there.get(k) != statement.get(k))
        if differs:
            raise ConfigError(
                f"{path}: expected an empty folder or the same export, got an export with other {differs}. Choose "
                "another destination, or remove the folder"
            ) from None


def _create(dest: Path, text: str) -> None:
    """Create ``export.json`` together with its content. Raises ``FileExistsError`` if it exists.

    A process that was killed between the two would leave an empty file, which later calls refuse.
    """
    with folder_below(dest) as folder:
        # Another process may finish the export and remove the unfinished folder.
        with suppress(FileNotFoundError), unfinished_folder(folder, _NEW) as new:
            (new.path / _STATEMENT).write_text(text)
            new.complete(_STATEMENT)
            try:
                new.link(_STATEMENT, folder)
                return
            except FileExistsError:
                raise
            except OSError:
                pass  # no hard links here
        with open(_STATEMENT, "x", opener=lambda path, flags: os.open(path, flags, 0o666, dir_fd=folder)) as f:
            f.write(text)


def _statement(path: Path) -> dict[str, Any]:
    """Return the ``export.json`` of another export or shard. Waits while another process writes the file.

    Raises:
        ConfigError: the file is still incomplete after ``_STATEMENT_S``, or it is a link or no regular file.
    """
    end = time.monotonic() + _STATEMENT_S
    while True:
        try:
            with open(path, "rb", opener=regular_file) as f:
                found = json.loads(f.read(_LARGEST_STATEMENT))
        except OSError as e:
            raise ConfigError(
                f"{path}: expected the description of an export, got: {e.strerror}. Choose another destination"
            ) from e
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
        if time.monotonic() > end:
            raise ConfigError(
                f"{path}: expected the description of an export, got an empty or damaged file. If no export is "
                "starting here, remove the file if it is empty. Otherwise choose another destination"
            )
        time.sleep(0.05)


def _batches(
    run: Run, exporter: Exporter, options: ExportOptions, todo: list[int], prefetch_bytes: int
) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
    import numpy as np

    groups = [list(range(f, min(f + exporter.per_file, len(run)))) for f in todo]
    places = np.array([i for group in groups for i in group], np.int64)
    items = iter(
        HiddenStatesDataset(
            Selection(run, run.index, places),
            points=exporter.points,
            layers=exporter.layers,
            loss_mask=options.loss_mask,
            prefetch_bytes=prefetch_bytes,
            framework="torch",
            rank=0,
            world_size=1,
        )
    )
    widths = {name: p.width for name, p in run.at(0).points.items()} if todo else {}
    widths = {name: widths[name] for name in exporter.points or (HIDDEN_STATES,) if name in widths}
    for group in groups:
        found = (_as_the_first(_next_of(items, run, place, exporter), run.at(place), widths) for place in group)
        yield group[0], found
        deque(found, maxlen=0)  # skip items that the exporter did not read; they are not for the next file


def _next_of(items: Iterator[dict[str, Any]], run: Run, place: int, exporter: Exporter) -> dict[str, Any]:
    """Return the item of the sample at ``place``."""
    _check_tokens(run, place, exporter)
    return next(items)


def _check_tokens(run: Run, place: int, exporter: Exporter) -> None:
    """Raise ``ConfigError`` if the sample is a selection of tokens, and the exporter needs whole samples."""
    if not exporter.rows_alone:
        sample = run.at(place)
        require_whole(sample.key, sample.meta)


def _as_the_first(item: dict[str, Any], sample: Sample, widths: dict[str, int]) -> dict[str, Any]:
    """Return the item of ``sample``.

    Raises ``FormatError`` if its states have another width than the run's first sample, or its ids exceed int32:
    trainers assume one width and int32 ids, and do not check. The id of a mean over tokens is -1.
    """
    for name, width in widths.items():
        if (got := math.prod(item[name].shape[2:])) != width:
            raise FormatError(f"{item['key']!r}: expected rows of {width} elements as in the first sample, got {got}")
    ids = item["input_ids"]
    fine = not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < 2**31
    if not fine and not (ids.tolist() == [-1] and is_mean(sample.meta)):
        raise FormatError(f"{item['key']!r}: expected token ids from 0 to 2**31 - 1, got {ids.min()} to {ids.max()}")
    return item


def _finish(exporter: Exporter, run: Run, dest: Path, folder: int) -> None:
    """Write the files for the whole data set, once. A trainer may read them while another call finishes the export.

    ``folder``: descriptor of ``dest``.
    """
    last = None if exporter.last_file is None else dest / exporter.last_file
    if last is not None and last.exists():
        return  # of the same export, as ``export.json`` says
    try:
        with unfinished_folder(folder, _FINISHING) as new:
            exporter.finish(run, new.path)
            made = sorted((path.name for path in new.path.iterdir()), key=lambda name: name == exporter.last_file)
            for name in made:
                new.complete(name)
            for name in made:
                new.move(name, folder, name)
    except FileNotFoundError:
        if last is None or not last.exists():  # another shard finished the export and removed this folder
            raise
    if last is not None:
        remove_unfinished_folders(folder, _FINISHING)


def _left_out(path: Path) -> Path:
    """Return the path of the file that replaces ``path`` if the trainer refuses the sample."""
    return path.with_name(f"{path.name}.left-out")


def _is_done(path: Path) -> bool:
    return path.exists() or _left_out(path).exists()


def _write_whole(
    exporter: Exporter, items: Iterable[dict[str, Any]], new: UnfinishedFolder, dest: Path, file: str
) -> None:
    below, _, name = file.rpartition("/")
    with folder_below(dest, below) as folder:
        try:
            path = new.path / name
            try:
                exporter.write(items, path)
            except SampleLeftOut as e:
                if exporter.per_file > 1:  # the other samples of the file would be left out too
                    raise
                path = _left_out(path)
                path.write_text(f"{e}\n")
            new.complete(path.name)
            new.move(path.name, folder, path.name)
        except Exception:
            # Another process may have written the file, finished the export and removed the unfinished folder.
            if not (new.is_removed() and _is_done(dest / file)):
                raise
