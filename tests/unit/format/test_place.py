"""The run of a place: descriptions, tombstones, and files that removals leave."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hsx_dist.errors import FormatError, NotFound, RunError, StoreError, Unavailable
from hsx_dist.format.json_objects import dump_json
from hsx_dist.format.place import RUN, Place, bury, close_place, find_place, leftovers, open_place, start_run
from hsx_dist.format.runs import take_attempt
from hsx_dist.store import Buffer, ObjectInfo, Store
from hsx_dist.store.local import LocalStore
from hsx_dist.store.prefix import PrefixStore
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import write_v1_run


@pytest.fixture
def root(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def names(store: Store) -> list[str]:
    return [info.name for info in store.list()]


def test_a_run_is_started_once_and_its_objects_are_in_its_folder(root: LocalStore) -> None:
    with pytest.raises(RunError, match=r"expected run\.json, got no such object"):
        open_place(root)
    place = start_run(root, {"settings": {"layers": [1]}})
    assert place.info == {"format": "hsx-run/2", "id": place.info["id"], "settings": {"layers": [1]}}
    assert open_place(root).info == place.info
    place.store.put("data/x", [b"x"])
    assert names(root) == [f"run-{place.info['id']}/data/x", RUN]
    with pytest.raises(RunError, match="another driver has just started"):
        start_run(root, {})


def test_one_of_racing_drivers_starts_the_run(root: LocalStore) -> None:
    def start(_: int) -> Place | None:
        try:
            return start_run(root, {})
        except RunError:
            return None

    with ThreadPoolExecutor(8) as pool:
        (started,) = [place for place in pool.map(start, range(16)) if place is not None]
    assert open_place(root).info == started.info


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"format":"hsx-run/3"}',
        b'{"format":["hsx-run/2"]}',
        b"\xff",
        b"[" * 10**5,
        b'{"format":"hsx-run/2"}',
        b'{"format":"hsx-run/2","id":"../../etc"}',
        b'{"format":"hsx-run/2","id":7}',
    ],
)
def test_a_description_that_cannot_be_read(root: LocalStore, body: bytes) -> None:
    root.put(RUN, [body])
    with pytest.raises(FormatError, match=r"run\.json"):
        find_place(root)


@pytest.mark.parametrize("at", ["\x1b]0;x\x07\n" + "x" * 3_000_000, {"a": "b" * 3_000_000}, [[]] * 100_000, None])
def test_a_tombstones_text_is_shown_in_part(root: LocalStore, at: object) -> None:
    root.put(RUN, [dump_json({"format": "hsx-run/2", "removed": {"at": at, "id": "x", "version": 2}})])
    with pytest.raises(RunError, match="the tombstone of a run removed at") as e:
        open_place(root)
    assert len(str(e.value)) < 400
    assert str(e.value).isprintable()


def test_after_a_removal_the_next_run_has_a_new_name_and_folder(root: LocalStore) -> None:
    first = start_run(root, {"n": 1})
    assert not first.removed()
    bury(first)
    assert first.removed()
    assert find_place(root) is None
    with pytest.raises(RunError, match="the tombstone of a run removed at"):
        open_place(root)
    second = start_run(root, {"n": 2})
    assert second.pointer == "run.0002.json"
    bury(first)  # a delayed removal finds only its own run
    assert open_place(root).info == second.info
    assert not second.removed()
    first.store.put("data/part-0001-w-000001.safetensors", [b"x"])  # a writer of the removed run does, too
    assert names(second.store) == []
    assert list(leftovers(root)) == [f"{first.folder}/"]


class NoVersions(MemoryStore):
    """Like a service that refuses conditional puts."""

    def put_version(self, name: str, buffers: Sequence[Buffer], version: str) -> bool:  # noqa: ARG002
        raise StoreError(f"{name}: not implemented")


@pytest.mark.parametrize("kind", [MemoryStore, NoVersions])
def test_a_removal_leaves_a_run_that_was_started_after_a_removal_by_hand(kind: type[MemoryStore]) -> None:
    store = kind()
    first = start_run(store, {"n": 1})
    store.delete(first.pointer)
    bury(first)  # the description is missing, and its name is then used
    store.delete(first.pointer)
    second = start_run(store, {"n": 2})
    assert second.pointer == first.pointer
    with pytest.raises(RunError, match=f"expected run {first.id}, got another run"):
        bury(first)
    assert open_place(store).info == second.info
    bury(second)
    bury(second)
    with pytest.raises(RunError, match="got another run"):
        bury(first)


def test_a_run_that_starts_while_a_removal_looks_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    first = start_run(store, {"n": 1})
    put_version = MemoryStore.put_version

    def start_another(self: MemoryStore, name: str, buffers: Sequence[Buffer], version: str) -> bool:
        if open_place(self).id == first.id:
            self.delete(first.pointer)
            start_run(self, {"n": 2})
        return put_version(self, name, buffers, version)

    monkeypatch.setattr(MemoryStore, "put_version", start_another)
    with pytest.raises(RunError, match="got another run"):
        bury(first)
    assert open_place(store).info["n"] == 2


@pytest.mark.parametrize("kind", [fcntl.F_RDLCK, fcntl.F_WRLCK])
def test_a_removal_waits_for_a_lock_and_names_it(
    root: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    """Another user with read permission on the description can lock it for reading."""
    place, pauses = start_run(root, {}), list[float]()
    with (tmp_path / "run" / RUN).open("r+b") as file:

        def lock(kind: int) -> None:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))

        lock(kind)
        monkeypatch.setattr(time, "sleep", pauses.append)
        with pytest.raises(Unavailable, match=r"locked.*lsof"):
            bury(place)
        assert len(pauses) == 4
        monkeypatch.setattr(time, "sleep", lambda _: lock(fcntl.F_UNLCK))
        bury(place)
    assert find_place(root) is None


def test_a_removal_that_always_finds_another_version_names_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    place = start_run(store, {})

    def replace(self: MemoryStore, name: str, *_: object) -> bool:
        self.put(name, [self.get(name), b" "])  # as a program that rewrites the description
        return False

    monkeypatch.setattr(MemoryStore, "put_version", replace)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(Unavailable, match="got another version"):
        bury(place)


class Missed(LocalStore):
    """Answers the first ``times`` requests for an object like a gateway's empty 404, which passes for the store's."""

    times = 1

    def get(self, name: str, most: int | None = None) -> bytes:
        self.times -= 1
        if self.times >= 0:
            raise NotFound(name)
        return super().get(name, most)


@pytest.mark.parametrize("state", ["kept", "buried", "deleted"])
def test_one_answer_that_there_is_no_description_is_no_removal(root: LocalStore, tmp_path: Path, state: str) -> None:
    start_run(root, {})
    place = open_place(root).at(Missed(tmp_path / "run"))
    if state == "buried":  # the listing alone would say that the run exists
        bury(place)
    elif state == "deleted":
        root.delete(RUN)
    assert place.removed() is (state != "kept")


def test_answers_that_contradict_the_listing_are_no_removal(root: LocalStore, tmp_path: Path) -> None:
    start_run(root, {})
    missed = Missed(tmp_path / "run")
    missed.times = 2
    with pytest.raises(Unavailable, match="expected the object that a listing names"):
        open_place(root).at(missed).removed()


def test_a_driver_refuses_to_start_in_a_folder_with_leftovers(root: LocalStore) -> None:
    place = start_run(root, {})
    place.store.put("attempts/0001.json", [b"x"])
    bury(place)
    with pytest.raises(RunError, match="hsx rm"):
        start_run(root, {})
    place.store.delete("attempts/0001.json")
    start_run(root, {})


@pytest.mark.parametrize(
    "name",
    ["manifest/0001/w/000001.json", "manifest/compacted-0001.jsonl.zst", "data/part-0001-w-000001.safetensors"],
)
def test_leftovers_of_version_1_are_not_an_empty_folder(root: LocalStore, name: str) -> None:
    root.put(name, [b"x"])
    with pytest.raises(RunError, match="hsx rm"):
        start_run(root, {})
    close_place(root)
    assert json.loads(root.get(RUN))["format"] == "hsx-run/2"  # version 1 refuses this format
    root.delete(name)
    assert start_run(root, {}).pointer == "run.0002.json"


def test_a_run_of_version_1_is_stored_next_to_its_description(root: LocalStore) -> None:
    write_v1_run(root, {"id": "abc"})
    place = open_place(root)
    assert (place.version, place.folder, place.store) == (1, "", root)
    root.put("manifest/0001/w/000001.json", [b"x"])
    assert list(leftovers(root)) == []
    bury(place)
    assert leftovers(root, removed_only=True) == [""]


def test_other_files_at_the_place_are_no_leftovers(root: LocalStore) -> None:
    names = ["data/mine.txt", "running/x", "run-notes/x", "run-abc", "README", "run-20261123/run.json"]
    names += ["manifest/train.csv", "attempts/notes.txt", "data/part-00000-abc.snappy.parquet"]
    # Other programs also use a run's names.
    names += ["check.json", "complete.json", "statistics/2024.json", "attempts/0001.json", "attempts/0001.closed.json"]
    names += [f"run-{7:016x}/{name}" for name in ("check.json", "statistics/2024.json", "attempts/0001.json")]
    names += ["run-0123456789abcdef/notes.txt", "run-0123456789abcdef/run-fedcba9876543210/attempts/0001.json"]
    for name in names:
        root.put(name, [b"x"])
    assert list(leftovers(root)) == []
    start_run(root, {})


def test_a_folder_that_no_tombstone_names_is_not_garbage(root: LocalStore) -> None:
    """Its description may have been deleted by mistake."""
    root.put("run-0123456789abcdef/data/part-0001-w-000001.safetensors", [b"x"])
    assert leftovers(root) == ["run-0123456789abcdef/"]
    assert leftovers(root, removed_only=True) == []


def test_a_runs_folder_is_no_place_with_leftovers(root: LocalStore) -> None:
    """``hsx rm`` would remove a run's objects there, and leave its description above them."""
    inner = PrefixStore(root, start_run(root, {}).folder)
    inner.put("data/part-0001-w-000001.safetensors", [b"x"])
    for removed_only in (True, False):
        with pytest.raises(RunError, match=r"run-[0-9a-f]{16}: expected a run's place, .* Name the folder above it"):
            leftovers(inner, removed_only=removed_only)


@pytest.mark.parametrize("form", ["link", "moved", "dots"])
def test_a_runs_folder_is_recognised_by_each_of_its_paths(root: LocalStore, tmp_path: Path, form: str) -> None:
    """``link``: a link to the folder. ``moved``: the folder is on another disk, and a link replaces it."""
    folder = Path(root.url) / start_run(root, {}).folder
    LocalStore(folder).put("data/part-0001-w-000001.safetensors", [b"x"])
    path = folder
    if form == "link":
        path = tmp_path / "latest"
        path.symlink_to(folder)
    elif form == "moved":
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "moved")
    else:
        path = folder / "data" / ".."
    with pytest.raises(RunError, match=r"run-[0-9a-f]{16}: expected a run's place, .* Name the folder above it"):
        leftovers(LocalStore(path))


def test_a_version_1_run_in_a_folder_of_the_place_is_no_leftover(root: LocalStore) -> None:
    """Its folder may be named like a run's."""
    inner = PrefixStore(root, f"run-{7:016x}")
    write_v1_run(inner, {})
    inner.put("data/part-0001-w-000001.safetensors", [b"x"])
    assert leftovers(root) == []
    bury(start_run(root, {}))
    assert leftovers(root) == []


def test_where_a_run_of_version_2_was_removed_no_run_of_version_1_is_left(root: LocalStore) -> None:
    bury(start_run(root, {}))
    root.put("data/part-0001-w-000001.safetensors", [b"x"])
    assert leftovers(root) == []


def test_the_removal_of_a_version_1_run_without_receipts_continues(root: LocalStore) -> None:
    write_v1_run(root, {})
    take_attempt(root, {})
    bury(open_place(root))
    assert leftovers(root, removed_only=True) == leftovers(root) == [""]
    root.delete("attempts/0001.json")
    root.put("attempts/0001.json", [b'{"attempt": "of another program"}'])
    assert leftovers(root) == []


class Counting(MemoryStore):
    """Counts listings and the listed objects."""

    lists = given = 0

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        self.lists += 1
        for info in super().list(prefix, after):
            self.given += 1
            yield info


@pytest.mark.parametrize("name", ["data/x", "data/part-0001-w-000001.safetensors"])
def test_many_folders_are_listed_with_one_request(name: str) -> None:
    root = Counting()
    folders = [f"run-{i:016x}/" for i in range(300)]
    for folder in folders:
        root.put(folder + name, [b"x"])
    assert leftovers(root) == (folders if name != "data/x" else [])
    assert root.lists < 10


def test_a_folder_that_holds_much_is_passed_over() -> None:
    root = Counting()
    for i in range(5000):
        root.put(f"run-{1:016x}/data/a{i}", [b"x"])
        root.put(f"run-{2:016x}/attempts/x{i}", [b"x"])
    root.put(f"run-{1:016x}/data/part-0001-w-000001.safetensors", [b"x"])
    root.put(f"run-{3:016x}/data/part-0001-w-000001.safetensors", [b"x"])
    assert leftovers(root) == [f"run-{1:016x}/", f"run-{3:016x}/"]
    assert root.given < 8000  # 5000 of them are requested by name


def deep(levels: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    "settings", [deep(250), deep(5000), {1: 1, "1": 2}, {"x": float("nan")}, {"x": object()}, ["a list"]]
)
def test_descriptions_that_readers_refuse_do_not_start_a_run(root: LocalStore, settings: object) -> None:
    with pytest.raises(FormatError):
        start_run(root, {"meaning": {}, "settings": settings})
    assert list(root.list()) == []
