"""``hsx gc`` removes only objects with an expiry time, and only after it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading

import numpy as np
import pytest

from hsx_dist.cli import gc, main
from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.errors import ConfigError, Denied, StoreError, Unavailable
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.page import Page, Segment
from hsx_dist.reading import expiry
from hsx_dist.reading.expiry import expired, remove
from hsx_dist.reading.object_lock import exclusive_lock, shared_lock
from hsx_dist.store import local, open_store
from hsx_dist.testing.stores import MemoryStore
from hsx_dist.writers.sink import PartSink, SinkOptions
from tests.harness.runs import write_v1_run
from tests.harness.users import OTHER, as_a_user, as_root


def put(store, key, meta):
    data = np.ones((1, 4, 8), np.uint32)
    segment = Segment(key, 0, 0, 4, 4, meta=meta)
    page = Page(segment, 0, 4, 4, (1,), "float32", data.shape, "LTH", np.arange(4, dtype=np.int64), data)
    sink = PartSink(store, SinkOptions(resolve_codec("none"), {"model": "m"}, "w", layout="sample"), lambda _: None)
    sink.add(page)
    sink.close()


@pytest.fixture
def prefix(tmp_path):
    store = open_store(str(tmp_path))
    put(store, "old", {"expires": 1000})
    put(store, "new", {"expires": 4e9})
    put(store, "kept", {})
    (tmp_path / "old.safetensors.lock").touch()
    (tmp_path / "bad.error.json").write_text(json.dumps({"key": "bad", "error": "x", "expires": 1000}))
    (tmp_path / "odd.bin.failed.json").write_text(json.dumps({"key": "odd", "error": "x", "expires": 1000}))
    (tmp_path / "told.error.json").write_text(json.dumps({"key": "told", "error": "x"}))
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "odd.safetensors").write_bytes(b"\x00" * 100)
    return tmp_path


def test_only_expired_objects_and_markers_are_found(prefix):
    store = open_store(str(prefix))
    assert sorted(name for name, _ in expired(store)) == ["bad.error.json", "odd.bin.failed.json", "old.safetensors"]
    assert [name for name, _ in expired(store, now=999)] == []


@pytest.mark.parametrize("ending", ["error", "failed", "conflict"])
@pytest.mark.parametrize(
    "members", [{}, {"key": "a"}, {"error": "x"}, {"key": "a", "error": "x", "session": "abc"}], ids=len
)
def test_a_file_of_another_program_with_a_markers_name_does_not_expire(tmp_path, ending, members):
    (tmp_path / f"login.{ending}.json").write_text(json.dumps({"expires": 1000, **members}))
    store = open_store(str(tmp_path))
    assert list(expired(store)) == []
    assert not remove(store, f"login.{ending}.json")


@pytest.mark.parametrize("name", [".failed.json", ".conflict.json", "a/.failed.json", "x.safetensors/.conflict.json"])
def test_a_marker_without_a_valid_object_name_is_kept_by_gc(prefix, name, capsys):
    (prefix / name).parent.mkdir(exist_ok=True)
    (prefix / name).write_text(json.dumps({"key": "k", "error": "x", "expires": 1000}))
    assert name not in dict(expired(open_store(str(prefix))))
    assert not remove(open_store(str(prefix)), name)
    with pytest.raises(SystemExit) as ended:
        main(["gc", str(prefix), "--delete"])
    capsys.readouterr()
    assert ended.value.code == 0
    assert (prefix / name).exists()
    assert not (prefix / "bad.error.json").exists()


def test_gc_only_lists_without_the_delete_option(prefix, capsys):
    before = sorted(p.name for p in prefix.iterdir())
    for arguments, left in ((["--json"], before), (["--delete"], None)):
        with pytest.raises(SystemExit) as end:
            main(["gc", str(prefix), *arguments])
        assert end.value.code == 0
        if left is not None:
            found = json.loads(capsys.readouterr().out)
            assert found["deleted"] is False
            assert sorted(found["expired"]) == ["bad.error.json", "odd.bin.failed.json", "old.safetensors"]
            assert sorted(p.name for p in prefix.iterdir()) == left
    gone = {"old.safetensors", "old.safetensors.lock", "bad.error.json", "odd.bin.failed.json"}
    assert sorted(p.name for p in prefix.iterdir()) == sorted(set(before) - gone)


@pytest.fixture
def with_unreadable_folders(tmp_path):
    for sub in ("a-first", "m/closed/deep", "m/no-look", "m/open", "z"):
        put(open_store(str(tmp_path / sub)), "old", {"expires": 1000})
    (tmp_path / "m" / "open" / "link").symlink_to(tmp_path / "m" / "closed" / "deep")
    modes = {"a-first": 0o000, "m/closed": 0o000, "m/no-look": 0o400}
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    yield tmp_path
    for name in modes:
        (tmp_path / name).chmod(0o700)


GC = "from hsx_dist.cli import main\nmain(['gc', *sys.argv[1:]])"


def test_folders_that_may_not_be_read_are_skipped_reported_and_logged_once(with_unreadable_folders):
    root = with_unreadable_folders
    unreadable = ["a-first", "m/closed", "m/no-look", "m/open/link"]
    for more in ([], ["--delete"]):
        out, err = as_a_user(GC, str(root), "--json", *more)
        found = json.loads(out)
        assert found["expired"] == ["m/open/old.safetensors", "z/old.safetensors"], err
        assert sorted(found["unreadable"]) == unreadable
        assert [err.count(f"name={name}") for name in unreadable] == [1, 1, 1, 1]
    assert not (root / "z" / "old.safetensors").exists()
    out, err = as_a_user(GC, str(root))
    assert "4 objects, folders or links cannot be read, and were skipped: check mounts, or run gc as owner" in out, err


@as_root
def test_a_file_of_another_user_stops_no_gc(prefix):
    """In a folder that every user can write to, such as the default output."""
    prefix.chmod(0o1777)
    os.chown(prefix, OTHER, OTHER)
    for name in (".hsx-unfinished-x", "bad.error.json", "gone.safetensors.lock"):
        (prefix / name).touch()
        os.utime(prefix / name, (1000, 1000))
        (prefix / name).chmod(0o644)
        os.chown(prefix / name, OTHER, OTHER)
    out, err = as_a_user(GC, str(prefix), "--delete", "--json")
    found = json.loads(out)
    assert sorted(found["expired"]) == ["odd.bin.failed.json", "old.safetensors"], err
    assert sorted(found["denied"]) == [".hsx-unfinished-x", "bad.error.json", "gone.safetensors.lock"]
    assert (prefix / "bad.error.json").exists()
    out, _ = as_a_user(GC, str(prefix), "--delete")
    assert "3 files may not be removed by this user, and stay" in out


def test_objects_that_may_not_be_read_are_skipped_reported_and_logged(prefix):
    names = ["bad.error.json", "old.safetensors"]
    for name in names:
        (prefix / name).chmod(0o200)
    for more in ([], ["--delete"]):
        out, err = as_a_user(GC, str(prefix), "--json", *more)
        found = json.loads(out)
        assert (found["expired"], sorted(found["unreadable"])) == (["odd.bin.failed.json"], names), err
        assert [err.count(f"name={name}") for name in names] == [1, 1]
    assert all((prefix / name).exists() for name in names)


def test_an_object_that_may_not_be_read_after_the_look_is_skipped(tmp_path):
    """A server stored it anew, with another mode."""
    (tmp_path / "bad.error.json").touch(0o200)
    code = """
from hsx_dist.cli.gc import _is_left
from hsx_dist.store import open_store
skipped = []
print(_is_left(open_store(sys.argv[1]), "bad.error.json", 1.0, skipped.append), skipped)
"""
    out, err = as_a_user(code, str(tmp_path))
    assert out == "False ['bad.error.json']\n", err


def test_an_object_in_use_is_tried_again_and_reported(prefix):
    with (prefix / "old.safetensors.lock").open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        out, _ = as_a_user(GC, str(prefix), "--delete", "--json")
    found = json.loads(out)
    assert found["in_use"] == ["old.safetensors"]
    assert sorted(found["expired"]) == ["bad.error.json", "odd.bin.failed.json"]
    assert json.loads(as_a_user(GC, str(prefix), "--delete", "--json")[0])["in_use"] == []
    assert not (prefix / "old.safetensors").exists()


@as_root
@pytest.mark.parametrize(("mode", "member"), [(0o640, "in_use"), (0o600, "denied")])
@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_gc_of_another_user_leaves_an_object_in_use(prefix, kind, mode, member):
    """The server's lock files have mode 0640. With umask 002, its objects have 0664."""
    prefix.chmod(0o777)
    lock = prefix / "old.safetensors.lock"
    for path, bits in ((prefix / "old.safetensors", 0o664), (lock, mode)):
        os.chown(path, OTHER, os.getegid())
        path.chmod(bits)
    with lock.open("r+") as holder:
        fcntl.flock(holder, kind)
        out, err = as_a_user(GC, str(prefix), "--delete", "--json")
    found = json.loads(out)
    assert found[member] == ["old.safetensors"], err
    assert sorted(found["expired"]) == ["bad.error.json", "odd.bin.failed.json"]
    assert (prefix / "old.safetensors").exists()
    found = json.loads(as_a_user(GC, str(prefix), "--delete", "--json")[0])
    assert found["denied"] == (["old.safetensors"] if member == "denied" else [])
    assert (prefix / "old.safetensors").exists() is lock.exists() is (member == "denied")


def test_a_full_listing_raises_at_an_unreadable_folder(with_unreadable_folders):
    root = with_unreadable_folders
    code = """
from hsx_dist.errors import Denied
from hsx_dist.store import open_store
store = open_store(sys.argv[1])
for find in (store.list, lambda: store.list("m/open/l"), store.unfinished, open_store(sys.argv[1] + "/m/no-look").list,
             lambda: open_store(sys.argv[1] + "/a-first").list_readable(print)):
    try:
        print(list(find()))
    except Denied:
        print("denied")
"""
    out, err = as_a_user(code, str(root))
    assert out.split() == ["denied"] * 5, err


def test_gc_and_rm_of_a_run_end_at_a_folder_that_may_not_be_read(tmp_path):
    write_v1_run(open_store(str(tmp_path)), {"meaning": {}})
    closed = tmp_path / "manifest" / "0001"
    closed.mkdir(parents=True)
    closed.chmod(0)
    try:
        for command in (["gc", str(tmp_path), "--json"], ["rm", str(tmp_path), "--yes"]):
            out, err = as_a_user(f"from hsx_dist.cli import main\nmain({command!r})")
            assert "Permission denied" in err, (out, err)
            assert "garbage" not in out
    finally:
        closed.chmod(0o700)


def test_a_run_is_refused(tmp_path):
    store = open_store(str(tmp_path))
    write_v1_run(store, {"meaning": {}})
    with pytest.raises(ConfigError, match="got a run"):
        list(expired(store))


# -- next to a server that stores a key again ------------------------------------------------------------------------

KEYS = ["old.safetensors", "old.error.json"]


def store_anew(store, name, expires):
    if name.endswith(".json"):
        store.put(name, [json.dumps({"key": "old", "error": "x", "expires": expires}).encode()])
    else:
        put(store, "old", {"expires": expires})


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return open_store(str(tmp_path)) if request.param == "folder" else MemoryStore()


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("moment", ["before the version", "before the end is read", "before the delete"])
def test_an_object_that_is_stored_anew_after_gc_looked_stays(store, monkeypatch, name, moment):
    """gc pauses at any moment, and a server stores the object again."""
    store_anew(store, name, 1000)
    [(found, _)] = expired(store)
    read, version, delete = expiry._end, type(store).version, type(store).delete_version

    def server():
        monkeypatch.undo()
        store_anew(store, name, 4e9)

    if moment == "before the version":
        monkeypatch.setattr(type(store), "version", lambda *a: (server(), version(*a))[1])
    elif moment == "before the end is read":
        monkeypatch.setattr(expiry, "_end", lambda *a: (server(), read(*a))[1])
    else:
        monkeypatch.setattr(type(store), "delete_version", lambda *a: (server(), delete(*a))[1])
    assert not remove(store, found)
    assert b"4000000000" in store.get(name)
    store.delete(name)
    store_anew(store, name, 1000)
    assert remove(store, name)
    assert list(store.list()) == []


@pytest.mark.parametrize("name", KEYS)
def test_a_put_waits_for_a_delete_that_has_looked_and_not_deleted(tmp_path, monkeypatch, name):
    """gc pauses between its last check of the version and the deletion."""
    store = open_store(str(tmp_path))
    store_anew(store, name, 1000)
    stored = threading.Event()

    def server():
        store_anew(store, name, 4e9)
        stored.set()

    look = local._version
    threads = []

    def looked(found):
        version = look(found)
        if not threads and (tmp_path / name).exists() and version == versions[0]:
            threads.append(threading.Thread(target=server))
            threads[0].start()
            assert not stored.wait(0.2)
        return version

    versions = [store.version(name)]
    monkeypatch.setattr(local, "_version", looked)
    deleted = store.delete_version(name, versions[0])
    threads[0].join(30)
    assert deleted
    assert stored.is_set()
    assert b"4000000000" in store.get(name)


@pytest.mark.slow
def test_no_order_of_puts_and_deletes_loses_an_object_that_has_not_expired(tmp_path):
    store = open_store(str(tmp_path))
    name = "old.error.json"
    done = threading.Event()
    removed = []

    def gc():
        mine = open_store(str(tmp_path))
        while not done.is_set():
            removed.append(remove(mine, name))

    collectors = [threading.Thread(target=gc) for _ in range(2)]
    for thread in collectors:
        thread.start()
    try:
        for _ in range(60):
            store_anew(store, name, 1000)
            store_anew(store, name, 4e9)
            assert b"4000000000" in store.get(name)
    finally:
        done.set()
        for thread in collectors:
            thread.join()
    assert any(removed)


def test_objects_locked_by_a_server_or_a_reader_are_kept(tmp_path):
    store = open_store(str(tmp_path))
    put(store, "old", {"expires": 1000})
    lock = tmp_path / "old.safetensors.lock"
    locks = ObjectLocks(tmp_path)
    locks.hold("old.safetensors", "r")
    assert not remove(store, "old.safetensors")
    locks.release("r", stored=True)
    with lock.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert not remove(store, "old.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old.safetensors", lock.name]
    assert remove(store, "old.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_another_programs_file_with_the_name_of_a_lock_stays(tmp_path):
    """Another user may store an expired object whose lock would have the name of this user's file."""
    store = open_store(str(tmp_path))
    put(store, "uv", {"expires": 1000})
    (tmp_path / "uv.safetensors.lock").write_text("version = 1")
    assert remove(store, "uv.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["uv.safetensors.lock"]


def test_a_lock_file_that_a_server_makes_during_a_delete_stays(tmp_path, monkeypatch):
    put(open_store(str(tmp_path)), "old", {"expires": 1000})
    lock, locks = tmp_path / "old.safetensors.lock", ObjectLocks(tmp_path)
    lock.touch()
    delete = local.LocalStore.delete_version

    def then_a_client_removes_the_lock_file(*args):
        deleted = delete(*args)
        lock.unlink()
        locks.hold("old.safetensors", "r")
        return deleted

    monkeypatch.setattr(local.LocalStore, "delete_version", then_a_client_removes_the_lock_file)
    assert remove(open_store(str(tmp_path)), "old.safetensors")
    assert list(tmp_path.iterdir()) == [lock]
    locks.release_all()


@pytest.fixture
def with_lock_files(tmp_path):
    """``unused`` and ``killed`` are without an object. The others stay."""
    put(open_store(str(tmp_path)), "kept", {})
    names = ("unused", "sub/killed", "kept", "young", "full", "held")
    (tmp_path / "sub").mkdir()
    for lock in [*(tmp_path / f"{name}.safetensors.lock" for name in names), tmp_path / "uv.lock"]:
        lock.touch()
        if "full" in lock.name:
            lock.write_text("of another program")
        if "young" not in lock.name:
            os.utime(lock, (1000, 1000))
    return tmp_path


def test_gc_removes_old_lock_files_without_an_object(with_lock_files, monkeypatch, capsys):
    before = set(with_lock_files.rglob("*.lock"))
    locks = ObjectLocks(with_lock_files)
    locks.hold("held.safetensors", "r")
    code, output = _gc(monkeypatch, capsys, with_lock_files)
    assert code == 0
    assert json.loads(output.out)["locks"] == [f"{name}.safetensors.lock" for name in ("held", "sub/killed", "unused")]
    assert set(with_lock_files.rglob("*.lock")) == before
    code, output = _gc(monkeypatch, capsys, with_lock_files, "--delete")
    gone = ["sub/killed.safetensors.lock", "unused.safetensors.lock"]
    assert (code, json.loads(output.out)["locks"]) == (0, gone)
    assert set(with_lock_files.rglob("*.lock")) == before - {with_lock_files / name for name in gone}
    locks.release_all()
    with pytest.raises(SystemExit):
        main(["gc", str(with_lock_files), "--delete"])
    assert "removed held.safetensors.lock\n0 objects" in (out := capsys.readouterr().out)
    assert "1 lock files without an object were removed" in out


@pytest.mark.parametrize("event", ["stored", "opened", "made again"])
def test_a_lock_file_that_is_used_again_after_gc_looked_stays(tmp_path, monkeypatch, event):
    lock, store, locks = tmp_path / "a.safetensors.lock", open_store(str(tmp_path)), ObjectLocks(tmp_path)
    locks.hold("a.safetensors", "killed")
    locks.release_all()
    looks = expiry.exists
    locks = ObjectLocks(tmp_path)

    def after(store, name):
        found = looks(store, name)
        if event == "made again":  # gc holds the lock of the file that a client removes
            lock.unlink()
            locks.hold("a.safetensors", "r")
        return found

    monkeypatch.setattr(expiry, "exists", after)
    if event == "stored":
        put(store, "a", {})
    elif event == "opened":
        locks.hold("a.safetensors", "r")
    assert not expiry.remove_lock(store, lock.name)
    assert lock.exists()
    locks.release_all()


@pytest.mark.parametrize("count", [2, 3])
def test_gc_leaves_lock_files_with_an_error_and_ends_in_a_store_that_is_down(tmp_path, monkeypatch, capsys, count):
    for i in range(count):
        (tmp_path / f"{i}.safetensors.lock").touch()
        os.utime(tmp_path / f"{i}.safetensors.lock", (1000, 1000))

    def fails(*_):
        raise Unavailable("expected the store's answer, got none")

    monkeypatch.setattr(expiry, "exists", fails)
    code, output = _gc(monkeypatch, capsys, tmp_path)
    assert (code != 0) == (count == 3)
    if code == 0:
        assert json.loads(output.out)["in_use"] == ["0.safetensors.lock", "1.safetensors.lock"]


def test_a_lock_file_with_an_error_stops_no_gc(prefix, monkeypatch, capsys, caplog):
    for name in ("old.safetensors", "old.safetensors.lock"):
        shutil.copy(prefix / name, prefix / f"b{name}")
    open_file = os.open

    def fails(path, *arguments, **options):
        if path == "bold.safetensors.lock":
            raise OSError(errno.EIO, "Input/output error")
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(SystemExit) as ended:
        main(["gc", str(prefix), "--delete", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert found["in_use"] == ["bold.safetensors"]
    assert sorted(found["expired"]) == ["bad.error.json", "odd.bin.failed.json", "old.safetensors"]
    assert "name=bold.safetensors error=" in caplog.text


def test_gc_follows_no_link(tmp_path):
    victim, prefix = tmp_path / "victim", tmp_path / "prefix"
    put(open_store(str(victim)), "old", {"expires": 1000})
    (victim / "old.safetensors.lock").touch()
    prefix.mkdir()
    (prefix / "sub").symlink_to(victim)
    store = open_store(str(prefix))
    assert [name for name, _ in expired(store)] == ["sub/old.safetensors"]
    with pytest.raises(StoreError, match="symbolic link"):
        remove(store, "sub/old.safetensors")
    assert len(list(victim.iterdir())) == 2
    (prefix / "sub").unlink()
    (prefix / "old.safetensors").symlink_to(victim / "old.safetensors")
    assert not remove(store, "old.safetensors")
    assert len(list(victim.iterdir())) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lock", [exclusive_lock, shared_lock])
def test_a_lock_is_no_link(tmp_path, lock):
    """A lock behind a link would never be that of its name: both would look for it again and again."""
    (tmp_path / "victim").touch()
    (tmp_path / "a.safetensors.lock").symlink_to("victim")
    with lock(str(tmp_path), "a.safetensors"):
        pass


@pytest.mark.parametrize("end", ["1" + 400 * "0", "NaN", "true", "[1]", '"1"', "[" * 100_000])
def test_a_malformed_expiry_time_is_ignored(tmp_path, end):
    (tmp_path / "a.error.json").write_text(f'{{"key": "a", "error": "x", "expires": {end}}}')
    assert list(expired(open_store(str(tmp_path)))) == []


@pytest.mark.parametrize(
    ("name", "marker", "more", "hides"),
    [
        ("old.safetensors", "old.safetensors.conflict.json", {"conflict": True}, True),
        ("old.safetensors", "old.error.json", {"conflict": True}, True),  # from an earlier version
        ("old.safetensors", "old.error.json", {}, True),  # of a path, not of a key
        ("sub/old.bin", "sub/old.bin.failed.json", {}, True),
        ("old.safetensors", "old.error.json", {"until_stored": True}, False),
    ],
)
def test_a_marker_that_hides_an_object_stays_as_long_as_the_object(store, name, marker, more, hides):
    put(store, "old", {"expires": 3000})
    content = store.get("old.safetensors")
    store.delete("old.safetensors")
    store.put(name, [content])
    store.put(marker, [json.dumps({"key": "old", "error": "x", "expires": 1000, **more}).encode()])
    assert remove(store, marker, 2000) is not hides
    assert remove(store, name, 4000)
    assert remove(store, marker, 4000) is hides
    assert list(store.list()) == []


@pytest.mark.parametrize("error", [Denied("not allowed"), Unavailable("expected the store's answer, got a page")])
def test_a_marker_stays_if_its_object_has_an_error_and_gc_continues(monkeypatch, capsys, caplog, tmp_path, error):
    for key in ("a", "b"):
        name = f"{key}.safetensors.conflict.json"
        (tmp_path / name).write_text(json.dumps({"key": key, "error": "x", "conflict": True, "expires": 1000}))
    get = local.LocalStore.get

    def fails(store, name, most=None):
        if name == "a.safetensors":
            raise error
        return get(store, name, most)

    monkeypatch.setattr(local.LocalStore, "get", fails)
    monkeypatch.setattr(gc, "open_store", lambda path, _: open_store(path, retry_seconds=0))
    with pytest.raises(SystemExit) as ended:
        main(["gc", str(tmp_path), "--delete", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert found["in_use"] == ["a.safetensors.conflict.json"]
    assert found["expired"] == ["b.safetensors.conflict.json"]
    assert "name=a.safetensors.conflict.json error=" in caplog.text


def _gc(monkeypatch, capsys, folder, *arguments):
    monkeypatch.setattr(gc, "open_store", lambda path, _: open_store(path, retry_seconds=0))
    with pytest.raises(SystemExit) as ended:
        main(["gc", str(folder), "--json", *arguments])
    return ended.value.code, capsys.readouterr()


@pytest.mark.parametrize("delete", [[], ["--delete"]])
def test_an_object_on_a_bad_sector_stays_and_gc_continues(monkeypatch, capsys, caplog, tmp_path, delete):
    for key in "abcdefgh":
        put(open_store(str(tmp_path)), key, {"expires": 1000})
    bad = {(tmp_path / f"{key}.safetensors").stat().st_ino for key in "bcef"}
    read_range = local.read_range

    def fails(fd, start, stop):
        if os.fstat(fd).st_ino in bad:
            raise OSError(errno.EIO, "Input/output error")
        return read_range(fd, start, stop)

    monkeypatch.setattr(local, "read_range", fails)
    code, output = _gc(monkeypatch, capsys, tmp_path, *delete)
    found = json.loads(output.out)
    assert code == 0
    assert found["expired"] == [f"{key}.safetensors" for key in "adgh"]
    assert found["in_use"] == [f"{key}.safetensors" for key in "bcef"]
    assert "name=b.safetensors error=" in caplog.text
    assert len(list(tmp_path.iterdir())) == (4 if delete else 8)


@pytest.mark.parametrize("method", ["get_ranges", "delete_version"])
def test_gc_ends_in_a_store_that_is_down(monkeypatch, capsys, tmp_path, method):
    for key in "abcdefgh":
        put(open_store(str(tmp_path)), key, {"expires": 1000})
    calls = []
    inner = getattr(local.LocalStore, method)

    def fails(store, name, *arguments):
        if name.startswith(".hsx-probe"):
            return inner(store, name, *arguments)
        calls.append(name)
        raise Unavailable("expected the store's answer, got none")

    monkeypatch.setattr(local.LocalStore, method, fails)
    code, output = _gc(monkeypatch, capsys, tmp_path, "--delete")
    assert code != 0
    assert "expected the store's answer, got none" in output.err
    assert len(calls) == 3


def test_an_expired_object_behind_a_link_stops_no_gc(monkeypatch, capsys, tmp_path):
    for folder in ("shared", "prefix"):
        put(open_store(str(tmp_path / folder)), "old", {"expires": 1000})
    (tmp_path / "prefix" / "a-link").symlink_to(tmp_path / "shared")
    code, output = _gc(monkeypatch, capsys, tmp_path / "prefix", "--delete")
    found = json.loads(output.out)
    assert code == 0
    assert (found["expired"], found["in_use"]) == (["old.safetensors"], ["a-link/old.safetensors"])
    assert (tmp_path / "shared" / "old.safetensors").exists()


def test_gc_names_no_cause_in_the_line_of_an_object_that_stays(capsys, tmp_path):
    """It may be in use, or have an error, as behind a link."""
    for folder in ("shared", "prefix"):
        put(open_store(str(tmp_path / folder)), "old", {"expires": 1000})
    (tmp_path / "prefix" / "a-link").symlink_to(tmp_path / "shared")
    with pytest.raises(SystemExit):
        main(["gc", str(tmp_path / "prefix"), "--delete"])
    out = capsys.readouterr().out
    assert "stays a-link/old.safetensors\n" in out
    assert "1 objects are in use or have an error, and stay: run gc again" in out
