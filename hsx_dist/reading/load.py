"""``load_hidden_states``: read the states that an answer names, by path, or by run and key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import PurePosixPath
from typing import Any, TypeVar

from hsx_dist.errors import (
    ConfigError,
    FormatError,
    NotFound,
    RunError,
    SampleConflict,
    SampleFailed,
    SampleNotFound,
    Unavailable,
)
from hsx_dist.format.container import Part
from hsx_dist.format.expires import expires_by
from hsx_dist.format.identity import IDENTITY
from hsx_dist.format.json_objects import checked_json, get_json
from hsx_dist.format.markers import OBJECT, conflict_name, marker_name
from hsx_dist.format.place import RUN
from hsx_dist.format.presence import exists
from hsx_dist.format.segments import SegmentProof
from hsx_dist.page import Segment
from hsx_dist.reading.arrays import Framework
from hsx_dist.reading.object_lock import LockAppeared, shared_lock
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Layers, Sample, Tokens
from hsx_dist.store import Store, open_store
from hsx_dist.store.base import check_name
from hsx_dist.store.folder_listing import UNFINISHED
from hsx_dist.text import bounded, printable

#: Seconds between two checks for a sample.
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
#: Errors that a later try may not raise: the object may be replaced, a sample or its marker may be stored, or the
#: store may recover.
WORTH_WAITING = (NotFound, SampleConflict, SampleNotFound, Unavailable)
#: Errors after which a second read follows at once: the object may have been replaced during the first.
READ_AGAIN = (FormatError, LockAppeared)
_T = TypeVar("_T")


def load_hidden_states(
    path: str,
    key: str | None = None,
    *,
    layers: Layers | None = None,
    tokens: Tokens | None = None,
    points: Sequence[str] | None = None,
    wait: float = 0,
    identity: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    framework: Framework = "auto",
) -> dict[str, Any]:
    """Load the states of one sample.

    Args:
        path: a run's path or URL, with ``key``. Or the path or URL of one object, also of vLLM's own connector. An
            object needs ``key`` only if it holds several samples. With ``key``, an object's name must end in
            ``.safetensors``.
        key: the sample's key.
        layers: vLLM's layer ids in the order of the result. ``None``: all, in stored order. With ``points``: as for
            ``Sample.load``.
        tokens: a slice or ``(start, stop)``. Negative numbers count from the end.
        points: names of points of the model, as for ``Sample.load``.
        wait: seconds to wait for the sample to appear, and on a file system also for its lock file ``PATH.lock``. A
            server holds that lock until it has stored the result of the request. If the producer recorded a failure,
            the wait ends at once.
        identity: the answer's ``hidden_states_meta["identity"]``. Load only the sample of that request. Without
            ``identity``, a key that is used for two requests can give the other request's sample.
        storage_options: options for fsspec.
        framework: ``torch`` (the stored dtype), ``numpy`` (bf16 as float32), or ``auto``: torch if it is installed.

    Returns:
        ``hidden_states`` ``[n, L, H]``, ``token_ids`` int64 ``[n]``, ``layer_ids`` int64 ``[L]``, ``key``, ``meta``
        (``Sample.meta``), and ``loss_mask`` int64 ``[n]`` if the sample has a mask. With ``points``: as
        ``Sample.load``.

    Raises:
        NotFound, SampleNotFound: after ``wait`` seconds there is still no such object, run or sample.
        SampleFailed: the producer recorded that the sample will never exist.
        SampleConflict: the sample still has another ``identity``, or none, after ``wait`` seconds.
        ConfigError: a run without a key, a path that cannot name an object, no such layer, or ``identity`` is not from
            an answer.
        FormatError, IntegrityError: the stored bytes are not valid, or changed.
        Unavailable: the store still gives no usable answer after ``wait`` seconds.
        StoreError: the store failed otherwise.

    Example:
        >>> key = "fsspec-fsspec.spec.stringify_path"
        >>> load_hidden_states("runs/demo", key, layers=[15], tokens=(0, 8))["hidden_states"].shape
        torch.Size([8, 1, 576])
    """
    path = str(path)
    if path.endswith(OBJECT) or key is None:
        folder, name = _folder_and_name(path)
        store = open_store(folder, storage_options)
        return load_object(
            *(store, name, key),
            layers=layers,
            tokens=tokens,
            points=points,
            wait=wait,
            identity=identity,
            framework=framework,
        )
    store = open_store(path, storage_options)
    opened: list[Run] = []
    sample = _wait_for(lambda: _sample_in_run(store, key, identity, opened), wait)
    return sample.load(layers, tokens, framework, points=points)


def _folder_and_name(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    if not name or folder.endswith(":/"):
        raise ConfigError(f"{path}: expected an object, or a run and a key, got a folder and no key. Add the key")
    if not _names_an_object(name):
        raise ConfigError(f"expected the path or URL of an object, got {bounded(repr(path), 200)}. Check its last part")
    return folder or ("/" if path.startswith("/") else "."), name


def _names_an_object(name: str) -> bool:
    with suppress(ValueError):
        return not check_name(name).startswith(UNFINISHED)
    return False


def load_object(
    store: Store,
    name: str,
    key: str | None = None,
    *,
    layers: Layers | None = None,
    tokens: Tokens | None = None,
    points: Sequence[str] | None = None,
    wait: float = 0,
    identity: Mapping[str, str] | None = None,
    framework: Framework = "auto",
) -> dict[str, Any]:
    """Load a sample of the object ``name`` in ``store``. Other arguments and errors: as ``load_hidden_states``."""

    def load() -> dict[str, Any]:
        with object_sample(store, name, key, identity=identity) as sample:
            return sample.load(layers, tokens, framework, points=points)

    def look() -> dict[str, Any]:
        try:
            return load()
        except READ_AGAIN:
            return load()

    return _wait_for(look, wait)


@contextmanager
def object_sample(
    store: Store, name: str, key: str | None = None, *, identity: Mapping[str, str] | None = None
) -> Iterator[Sample]:
    """The sample in the object ``name``, without waiting.

    On a file system the context holds the object's lock shared. Without it, a server could replace the object while it
    is read, if a client uses its path again.

    Raises:
        HsxError: as ``load_hidden_states``. A retry may succeed only after the errors in ``WORTH_WAITING``.
    """
    with shared_lock(store.url, name) if "://" not in store.url else nullcontext():
        sample = _sample_in_object(store, name, key)
        _require_identity(sample, identity, f"{store.url.rstrip('/')}/{name}")
        yield sample


def _require_identity(sample: Sample, identity: Mapping[str, str] | None, where: str) -> None:
    """Raises:
    SampleConflict: the sample has another identity, or none.
    ConfigError: ``identity`` is not from an answer.
    """
    if identity is None:
        return
    if not isinstance(identity, Mapping) or not identity:
        raise ConfigError(
            f"identity: expected the answer's hidden_states_meta[{IDENTITY!r}], got {printable(repr(identity), 200)}. "
            "Pass it unchanged"
        )
    found = sample.meta.get(IDENTITY)
    if found != dict(identity):
        other = "one without identity" if found is None else f"that of request {printable(found, 200)}"
        raise SampleConflict(
            f"{where}: expected the sample of request {printable(identity, 200)}, got {other}: the key or path was "
            "used for another request, or its object is of an earlier version. Use another key"
        )


def answered_identity(answer: Mapping[str, Any]) -> Any:
    """The identity in an answer's ``kv_transfer_params``. ``None`` if the answer is of vLLM's own connector."""
    meta = answer.get("hidden_states_meta")
    return meta.get(IDENTITY) if isinstance(meta, Mapping) else None


def _wait_for(find: Callable[[], _T], seconds: float) -> _T:
    end, pause = time.monotonic() + seconds, FIRST_PAUSE
    while True:
        try:
            return find()
        except WORTH_WAITING:
            left = end - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)


def _sample_in_run(store: Store, key: str, identity: Mapping[str, str] | None, opened: list[Run]) -> Sample:
    """Return the sample of ``key`` in a run. ``opened`` caches the run between calls."""
    if opened:
        opened[0].refresh()
    else:
        try:
            opened.append(Run(store))
        except RunError as e:
            raise NotFound(str(e)) from e  # a driver may still create the run, so the caller waits
    run = opened[0]
    fate = run.fate_of(key)
    if fate is not None and (fate.fate == "refused" or run.complete):
        raise SampleFailed(
            f"{run.url}: expected a sample {key!r}, got a row that is {fate.fate}: {fate.reason}. Correct the "
            "cause, then run the extraction again"
        )
    sample = run[key]
    _require_identity(sample, identity, f"{store.url}: {key!r}")
    return sample


def _sample_in_object(store: Store, name: str, key: str | None) -> Sample:
    part = _part(store, name)
    where = f"{store.url.rstrip('/')}/{name}"
    # ``format.markers`` defines when a marker counts.
    failure = _marker(store, marker_name(name))
    if failure is not None and _is_gone(part):
        part = _part(store, name)  # the object may have been stored or renewed between the two requests
    conflict = _marker(store, conflict_name(name))
    for marker in (conflict, failure):
        if marker is not None and (marker.get("until_stored") is not True or _is_gone(part)):
            why = bounded(marker.get("error", "no reason recorded"))
            raise SampleFailed(f"{where}: expected a sample, got a failed request: {why}")
    if part is None:
        if not name.endswith(OBJECT):
            _raise_run(store, name)
        raise NotFound(f"{where}: expected an object, got none. Check the path, or wait longer")
    found = [(i, info.segment) for i, info in enumerate(part.segments) if key in (None, info.segment.key)]
    keys = sorted({segment.key for _, segment in found})
    if not found:
        raise SampleNotFound(
            f"{where}: expected sample {key!r}, got {len({s.segment.key for s in part.segments})} other samples. Check "
            "the key"
        )
    if len(keys) > 1:
        raise ConfigError(
            f"{where}: expected the key of one of its {len(keys)} samples, got none. Give one, such as {keys[0]!r}"
        )
    found.sort(key=lambda item: item[1].id)
    if not _is_whole([segment for _, segment in found]):
        raise SampleNotFound(
            f"{where}: expected all segments of {keys[0]!r}, got only some segments. Load it from its run, by key"
        )
    segments = [SegmentProof(segment, i, "", 0, 0, part=name) for i, segment in found]
    return Sample(keys[0] or PurePosixPath(name).stem, segments, lambda _: part, store.url)


def _is_gone(part: Part | None) -> bool:
    """Whether there is no object, or it has expired."""
    return part is None or any(expires_by(info.segment.meta, time.time()) for info in part.segments[:1])


def _is_whole(segments: Sequence[Segment]) -> bool:
    """Whether segments of one key, in order, cover all tokens in all columns."""
    total, columns = segments[0].total, segments[0].columns
    if any((s.total, s.columns) != (total, columns) for s in segments):
        return False
    ends = [0] * columns
    for s in segments:
        if s.start != ends[s.column]:
            return False
        ends[s.column] = s.stop
    return all(end == total for end in ends)


def _raise_run(store: Store, name: str) -> None:
    if exists(store, f"{name}/{RUN}"):
        where = f"{store.url.rstrip('/')}/{name}"
        raise ConfigError(f"{where}: expected RUN/KEY or a stored object, got a run. Append a key: hsx ls lists them")


def _part(store: Store, name: str) -> Part | None:
    try:
        return Part.open(store, name)
    except NotFound:
        return None


def _marker(store: Store, name: str) -> dict[str, Any] | None:
    """The marker ``name``, if there is one. Raises ``Unavailable`` for a page of a gateway: a marker is final."""
    try:
        return checked_json(get_json(store, name), f"{store.url}/{name}")
    except NotFound:
        return None
    except FormatError:
        return {"error": f"{name} holds no readable reason"}
