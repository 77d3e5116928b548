"""A reader of a run that is removed meanwhile raises an error. No reader returns a result for half of a run."""

from __future__ import annotations

import ast
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import hsx_dist
from hsx_dist import HiddenStatesDataset
from hsx_dist.cli import gc
from hsx_dist.config import load_config
from hsx_dist.errors import Denied, RunError, Unavailable
from hsx_dist.exporting import export_run
from hsx_dist.format import runs
from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.manifest_reader import ManifestReader
from hsx_dist.format.place import Place, find_place, open_place, start_run
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.inputs.rows import rows_from
from hsx_dist.jobs.extract import account_for
from hsx_dist.observe.console import Console
from hsx_dist.observe.report.facts import gather_facts
from hsx_dist.observe.top import look
from hsx_dist.reading.follow import Follower
from hsx_dist.reading.garbage import own_unfinished, remove_run
from hsx_dist.reading.retention import Retention
from hsx_dist.reading.run import Run
from hsx_dist.reading.status import run_status
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import ObjectInfo
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.faulty_stores import LyingStore, Strike, T, Verb, WrappedStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter, store_run, whole
from tests.harness.users import as_a_user

SAMPLES = [random_sample(key, 3, seed=i, layer_ids=(1,), hidden_size=4) for i, key in enumerate("abcdef")]


class Paused(WrappedStore):
    """Runs ``hsx rm --yes`` as another process would, from begin to end, before request ``at`` after ``begin``."""

    def __init__(self, inner: MemoryStore, at: int):
        super().__init__(inner)
        self._whole, self._left, self.removed, self.began = inner, at, False, False

    def begin(self) -> None:
        self.began = True

    def _call(self, verb: Verb, name: str, call: Callable[[], T], nbytes: int) -> T:
        self._left -= self.began
        if self._left < 0 and not self.removed:
            self.removed = True
            remove_run(self._whole, find_place(self._whole))
        return super()._call(verb, name, call, nbytes)


def follow(store: Paused, folder: Path) -> Any:
    place = open_place(store)
    store.begin()
    return list(Follower(place, poll_seconds=0, stalled_seconds=0, sleep=lambda _: None))


def verify(store: Paused, folder: Path) -> Any:
    store.begin()
    return verify_run(store, workers=1)


def status(store: Paused, folder: Path) -> Any:
    store.begin()
    return run_status(store, observe_seconds=0)


def top(store: Paused, folder: Path) -> Any:
    store.begin()
    return look(store)


def opened(store: Paused, folder: Path) -> Any:
    store.begin()
    return Run(store)


def manifest(store: Paused, folder: Path) -> Any:
    run = Run(store)
    store.begin()
    return run.manifest


def facts(store: Paused, folder: Path) -> Any:
    run = Run(store)
    store.begin()
    return gather_facts(run)


def export(store: Paused, folder: Path) -> Any:
    run = Run(store)
    store.begin()
    return export_run(run, "vllm", folder)


def preview(store: Paused, folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as m:
        m.setattr(gc, "open_store", lambda *_: store)
        store.begin()
        gc.run_rm("run", (), yes=False, watch=0)


def skipping(store: Paused, folder: Path) -> Any:
    """Samples that are gone with their run do not count as bad samples."""
    data = HiddenStatesDataset(Run(store), on_error="skip", framework="numpy", rank=0, world_size=1, threads=1)
    store.begin()
    items = list(data)
    assert len(items) == len(SAMPLES), "expected no skipped samples of a removed run"
    return items


@pytest.mark.parametrize(
    "reader", [follow, verify, status, top, opened, manifest, facts, export, preview], ids=lambda r: r.__name__
)
def test_readers_of_a_run_under_removal_raise(reader: Callable[..., Any], tmp_path: Path) -> None:
    """The removal happens before each of the reader's requests in turn."""
    for at in range(200):
        inner = MemoryStore()
        store_run(inner, SAMPLES, per_part=2, codec=NoneCodec())
        store = Paused(inner, at)
        try:
            reader(store, tmp_path / str(at))
        except RunError as e:
            if "removed" not in str(e):
                raise
            continue
        # A reader's last request is its check for a removal. It cannot see a removal after that.
        assert not store.removed, f"expected an error after a removal before request {at}, got none"
        assert at > 0
        return
    raise AssertionError("the reader did not end within 200 requests")


def resume(store: Paused) -> None:
    place = open_place(store)
    config = load_config(None, (), model="m", output=store.url, store={"single_driver": True})
    read = load_manifest(place.store)
    store.begin()
    account_for(
        config,
        place,
        read,
        lambda: rows_from([{"id": sample.key, "text": "x"} for sample in SAMPLES], config.input),
        Console(file=io.StringIO()),
        lambda *_: None,
        lambda *_: cast(Any, nullcontext(SimpleNamespace())),
    )


def ack(store: Paused) -> None:
    used = Retention(open_place(store))
    store.begin()
    used.ack(*(sample.key for sample in SAMPLES))


@pytest.mark.parametrize(("process", "seen"), [(resume, True), (ack, False)])
def test_a_process_that_changes_a_run_under_removal_names_the_removal(
    process: Callable[[Paused], None], seen: bool
) -> None:
    """A listing that lacks known objects of a removed run is no error of the store."""
    for at in range(200):
        inner = MemoryStore()
        store_run(inner, SAMPLES, per_part=2, codec=NoneCodec())
        take_attempt(open_place(inner).store, {})  # the run is not complete
        store = Paused(inner, at)
        try:
            process(store)
        except RunError as e:
            assert "remov" in str(e)  # noqa: PT017
            continue
        if not store.removed:
            return
        assert not seen, f"expected an error after a removal before request {at}, got none"
    raise AssertionError("the process did not end within 200 requests")


def test_samples_that_are_gone_with_their_run_are_not_skipped() -> None:
    for at in range(200):
        inner = MemoryStore()
        store_run(inner, SAMPLES, per_part=2, codec=NoneCodec())
        store = Paused(inner, at)
        try:
            skipping(store, Path())
        except RunError as e:
            if "removed" not in str(e):
                raise
            continue
        if not store.removed:
            return
    raise AssertionError("the reader did not end within 200 requests")


def test_a_follower_of_a_removed_run_raises_that_the_run_is_removed() -> None:
    store, now = MemoryStore(), [0.0]
    store_run(store, SAMPLES)
    RunWriter(store).put([whole(SAMPLES[0])])  # another attempt: the run is not complete
    place = open_place(store)
    source = iter(Follower(place, stalled_seconds=60, sleep=lambda _: None, clock=lambda: now[0]))
    while next(source) is not None:
        pass
    remove_run(store, place)
    now[0] += 61
    with pytest.raises(RunError, match="is being removed"):
        list(source)


def test_each_module_that_reads_a_manifest_looks_for_a_removal() -> None:
    """A new reader cannot forget the check."""
    reads = {"load_manifest", "receipts_after", "newest_and_complete", "ManifestReader"}
    assert reads <= {*runs.__all__, ManifestReader.__name__}
    root = Path(hsx_dist.__file__).parent
    # A driver checks at its end.
    # liveness is called by status, which checks, and before a removal.
    others = {"jobs/attempt.py", "reading/liveness.py"}
    found = set()
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name.startswith(("format/", "testing/")):
            continue
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        calls = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if names & reads:
            found.add(name)
            assert name in others or "reading" in calls, f"{name}: expected `with place.reading()`"
    assert others < found
    assert callable(Place.reading)


class WithUnreadableFolder(LocalStore):
    """A folder that this user may not read. Tests that run as root cannot make one."""

    folder = "lost+found"

    def unfinished(self, older_than=0.0, unreadable=None):
        if unreadable is None:
            raise Denied(self.folder)
        unreadable(self.folder)
        return super().unfinished(older_than, unreadable)


def test_an_unreadable_folder_next_to_a_run_stops_neither_its_gc_nor_its_removal(tmp_path):
    store = WithUnreadableFolder(tmp_path)
    place = start_run(store, {"meaning": {}})
    place.store.put("attempts/0001.json", [b"{}"])
    (tmp_path / place.folder / ".hsx-unfinished-1").touch()
    assert [i.name for i in own_unfinished(place)] == [f"{place.folder}/.hsx-unfinished-1"]
    store.folder = f"{place.folder}/data"
    with pytest.raises(Denied, match="expected a readable folder of the run"):
        list(own_unfinished(place))
    store.folder = "lost+found"
    assert remove_run(store, place) == 2
    assert [i.name for i in store.list()] == ["run.json"]


def test_files_of_other_programs_in_a_runs_folder_stay() -> None:
    store = MemoryStore()
    store_run(store, SAMPLES)
    folder = f"{open_place(store).folder}/"
    store.put(f"{folder}probe-{'0' * 32}", [b"first"])
    others = [folder + name for name in ("notes.txt", "data/mine.npy", "report/index.html", "manifest/0001/README")]
    for name in others:
        store.put(name, [b"mine"])
    remove_run(store, find_place(store))
    assert {info.name for info in store.list("")} == {*others, "run.json"}
    assert find_place(store) is None


def test_a_run_that_is_copied_here_while_rm_looks_for_drivers_stays(monkeypatch, capsys) -> None:
    """Each tool for copies sends the folder before ``run.json``."""
    elsewhere, store = MemoryStore(), MemoryStore()
    store_run(elsewhere, SAMPLES)
    store_run(store, SAMPLES)
    store.delete("run.json")
    copy = {name: data for name, data in elsewhere.objects.items() if name != "run.json"}
    monkeypatch.setattr(gc, "open_store", lambda *_, **__: store)
    monkeypatch.setattr(gc, "require_dead", lambda *_, **__: store.objects.update(copy))
    gc.run_rm("x", [], yes=True, watch=0)
    assert store.objects == copy
    said = capsys.readouterr().out
    assert "marks that the run was removed" not in said  # there is no description, thus no mark
    assert "objects that do not belong to the run stay" in said
    store.objects["run.json"] = elsewhere.objects["run.json"]
    assert len(Run(store)) == len(SAMPLES)


@pytest.mark.parametrize("times", [1, 99])
def test_a_delete_that_a_gateway_answered_ends_rm_with_an_error(times: int) -> None:
    store = MemoryStore()
    store_run(store, SAMPLES)
    place = open_place(store)
    unanswered = LyingStore(store, Strike({"delete"}, prefix=f"{place.folder}/manifest/", times=times))
    with pytest.raises(Unavailable, match="expected no object after its delete, got one"):
        remove_run(unanswered, place)
    left = len(store.objects) - 1
    assert remove_run(store, None) == left > 0
    assert set(store.objects) == {"run.json"}


@pytest.mark.parametrize("what", ["garbage", "earlier run", "expired", "many expired"])
def test_a_delete_that_a_gateway_answered_ends_gc_with_an_error(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    store = MemoryStore()
    if "expired" in what:
        monkeypatch.setattr(gc, "_FEW", 0 if "many" in what else 1)
        store.put("a.error.json", [b'{"key": "a", "error": "x", "expires": 1000}'])
    else:
        place = start_run(store, {"meaning": {}})
        if what == "earlier run":
            remove_run(store, place)
            store_run(store, SAMPLES)
        place.store.put("data/part-0001-w-000009.safetensors", [b"x"])
    with monkeypatch.context() as patch:
        patch.setattr(gc, "open_store", lambda *_: store)
        patch.setattr(gc, "require_conditional_deletes", lambda _: None)
        patch.setattr(MemoryStore, "delete", lambda *_: None)
        patch.setattr(MemoryStore, "delete_version", lambda *_: True)
        with pytest.raises(Unavailable, match="expected no object after its delete, got one"):
            gc.run_gc("run", (), delete=True, watch=0, as_json=True)
    monkeypatch.setattr(gc, "open_store", lambda *_: store)
    gc.run_gc("run", (), delete=True, watch=0, as_json=True)


class StoredAgain(MemoryStore):
    """A server stores each key again after its removal. Its new, short life ends during ``hsx gc``."""

    listings = 0

    def delete_version(self, name: str, version: str) -> bool:
        deleted = super().delete_version(name, version)
        self.put(name, [json.dumps({"key": name[:1], "error": "x", "expires": time.time()}).encode()])
        return deleted

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        self.listings += prefix == ""
        return super().list(prefix, after)


def test_an_object_that_is_stored_again_during_gc_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = count(2000)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    monkeypatch.setattr(gc, "require_conditional_deletes", lambda _: None)
    listings = []
    for few in (2, 1):
        store = StoredAgain()
        monkeypatch.setattr(gc, "_FEW", few)
        monkeypatch.setattr(gc, "open_store", lambda *_, store=store: store)
        for key in "ab":
            store.put(f"{key}.error.json", [b'{"key": "a", "error": "x", "expires": 1000}'])
        gc.run_gc("served", (), delete=True, watch=0, as_json=True)
        assert json.loads(capsys.readouterr().out)["expired"] == ["a.error.json", "b.error.json"]
        assert len(store.objects) == 2
        listings.append(store.listings)
    assert listings[1] == listings[0] + 1  # a few objects are not looked for in the whole prefix


def test_a_removal_leaves_no_object_that_may_be_of_the_run_behind(tmp_path: Path) -> None:
    store_run(LocalStore(tmp_path), SAMPLES, version=1)
    own = tmp_path / "attempts" / "0001.json"
    parts = [path for folder in ("data", "manifest") for path in (tmp_path / folder).rglob("*.*")]
    assert len(parts) > 1
    own.chmod(0o000)
    rm = "from hsx_dist.cli import main\nmain(['rm', sys.argv[1], '--yes', '--watch', '1'])"
    out, err = as_a_user(rm, str(tmp_path))
    assert "attempts/0001.json: expected an object that this user may read" in err, out
    assert all(path.exists() for path in (own, *parts))
    own.chmod(0o600)
    out, err = as_a_user(rm, str(tmp_path))
    assert not any(path.exists() for path in (own, *parts)), err
