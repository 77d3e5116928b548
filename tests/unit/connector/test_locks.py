"""Companion locks, in the form that vLLM's own ``load_hidden_states`` waits for."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save

from hsx_dist.connector import locks as locks_module
from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.errors import Denied, NotFound, SampleFailed, Unavailable
from hsx_dist.reading import load
from hsx_dist.reading.object_lock import LockAppeared, exclusive_lock, shared_lock
from hsx_dist.serving.sample_source import SampleSource
from hsx_dist.serving.states_file import Range
from hsx_dist.store import open_store
from tests.unit.open_files import open_files


def is_held(path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_lock_is_held_until_its_last_holder_releases_it(tmp_path):
    locks = ObjectLocks(tmp_path)
    locks.hold("sub/a.safetensors", "r1")
    locks.hold("sub/a.safetensors", "r2")  # a second request of the same name must not wait for the first
    locks.hold("sub/a.safetensors", "r2")  # counted once per request
    path = tmp_path / "sub/a.safetensors.lock"
    assert is_held(path)
    locks.release("r1", stored=True)
    locks.release("r1", stored=True)  # releases only its own
    locks.release("r3", stored=False)  # held by no request
    assert is_held(path)
    locks.release("r2", stored=True)
    assert not is_held(path)


def test_one_holder_stands_for_any_number_of_requests(tmp_path):
    locks = ObjectLocks(tmp_path)
    locks.ask("a.safetensors", "r0")
    for i in range(1, 100):
        locks.ask("a.safetensors", f"r{i}")
        locks.pass_on(f"r{i}", "r0")
    locks.pass_on("unknown", "r0")
    locks.wait()
    assert (locks._held["a.safetensors"].holders, locks._names) == ({"r0"}, {"r0": "a.safetensors"})
    # Also to a request that holds no lock, or holds it no longer.
    locks.hold("a.safetensors", "s")
    locks.release("r0", stored=True)
    locks.pass_on("s", "r0")
    assert is_held(tmp_path / "a.safetensors.lock")
    locks.release("r0", stored=True)
    assert not is_held(tmp_path / "a.safetensors.lock")
    assert (locks._held, locks._names) == ({}, {})


def test_lock_files_are_removed_only_without_an_object(tmp_path):
    locks = ObjectLocks(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        locks.hold(name, name)
    (tmp_path / "b.safetensors").write_bytes(b"x")
    for name in ("a.safetensors", "b.safetensors"):
        locks.release(name, stored=False)
    assert not (tmp_path / "a.safetensors.lock").exists()
    assert not is_held(tmp_path / "b.safetensors.lock")


def test_requested_locks_are_taken_on_a_thread_and_can_be_released_before(tmp_path, monkeypatch):
    """A request for a lock does not wait for the file system. A lock released before it is held does not stay held."""
    inside, go = threading.Event(), threading.Event()
    make = ObjectLocks._open

    def waiting(self, name, *, last):
        inside.set()
        assert go.wait(30)
        return make(self, name, last=last)

    monkeypatch.setattr(ObjectLocks, "_open", waiting)
    locks = ObjectLocks(tmp_path)
    for name in "ab":
        locks.ask(name, name)
    assert inside.wait(30)
    assert list(tmp_path.iterdir()) == []
    giving_back = threading.Thread(target=locks.release, args=("b",), kwargs={"stored": False})
    giving_back.start()
    go.set()
    locks.wait()
    assert is_held(tmp_path / "a.lock")
    giving_back.join(30)
    assert [p.name for p in tmp_path.iterdir()] == ["a.lock"]
    locks.release_all()
    locks.release_all()
    assert not is_held(tmp_path / "a.lock")
    locks.ask("c", "c")  # too late
    locks.wait()
    locks.release("c", stored=False)
    assert [p.name for p in tmp_path.iterdir()] == ["a.lock"]


def test_a_hanging_file_system_does_not_block_the_end_of_a_process(tmp_path, monkeypatch):
    go = threading.Event()

    def hanging(*_, **__):
        assert go.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(ObjectLocks, "_open", hanging)
    monkeypatch.setattr("hsx_dist.connector.locks.END_S", 0.05)
    locks = ObjectLocks(tmp_path)
    locks.ask("a", "a")
    ending = threading.Thread(target=locks.release_all)
    ending.start()
    ending.join(30)
    ended = not ending.is_alive()
    go.set()
    assert ended


def test_a_lock_that_cannot_be_created_is_logged_and_does_not_block(tmp_path, caplog):
    locks = ObjectLocks(tmp_path)
    locks.ask("x" * 300, "r")
    locks.ask("a", "s")
    locks.wait()
    assert is_held(tmp_path / "a.lock")
    assert "no lock file for 'xxx" in caplog.text
    locks.release("r", stored=False)


@pytest.mark.parametrize("there", [False, True])
def test_no_new_lock_file_stays_on_a_mount_without_locks(tmp_path, monkeypatch, caplog, there):
    """A reader of a file that cannot be locked does not know whether a server holds it."""
    if there:  # another server may hold it
        (tmp_path / "a.lock").touch()
    locks = ObjectLocks(tmp_path)

    def fails(*_args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fails)
    locks.ask("a", "r")
    locks.wait()
    assert (tmp_path / "a.lock").exists() == there
    assert "no lock file for 'a'" in caplog.text
    assert "If the mount has no locks, set use_synchronization_lock=false" in caplog.text
    with pytest.raises(Unavailable) if there else nullcontext(), shared_lock(str(tmp_path), "a"):
        pass
    locks.release("r", stored=True)


def test_a_lock_is_released_when_the_file_system_raises_an_error(tmp_path, monkeypatch):
    locks = ObjectLocks(tmp_path)
    locks.hold("a", "r")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "exists", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        locks.release("r", stored=False)
    assert not is_held(tmp_path / "a.lock")


def test_a_lock_file_stays_if_an_object_is_stored_during_a_release(tmp_path, monkeypatch):
    locks = ObjectLocks(tmp_path)
    locks.hold("a", "r1")
    looked = Path.exists

    def meanwhile(path):
        found = looked(path)
        locks.hold("a", "r2")
        (tmp_path / "a").write_bytes(b"x")
        locks.release("r2", stored=True)
        return found

    monkeypatch.setattr(Path, "exists", meanwhile)
    locks.release("r1", stored=False)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.lock"]
    assert not is_held(tmp_path / "a.lock")


def test_another_process_writing_the_same_object_does_not_stop_a_step(tmp_path):
    first, second = ObjectLocks(tmp_path), ObjectLocks(tmp_path)
    first.hold("a.safetensors", "r")
    second.hold("a.safetensors", "r")
    second.release("r", stored=True)
    assert is_held(tmp_path / "a.safetensors.lock")
    first.release_all()
    assert not is_held(tmp_path / "a.safetensors.lock")


def test_a_lock_held_by_a_reader_is_replaced_so_that_new_readers_wait(tmp_path):
    """A lock held by a reader is replaced: that reader goes on, and new readers wait."""
    path = tmp_path / "a.safetensors.lock"
    path.touch()
    locks = ObjectLocks(tmp_path)
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        locks.hold("a.safetensors", "r")
        assert is_held(path)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
    locks.release("r", stored=True)
    assert not is_held(path)


@pytest.mark.parametrize("when", ["before it locks", "before it replaces"])
def test_of_two_servers_that_replace_a_readers_lock_one_holds_it(tmp_path, monkeypatch, when):
    """The second server has opened the file before the first one replaced it."""
    name, path = "a.safetensors", tmp_path / "a.safetensors.lock"
    path.touch()
    first, second = ObjectLocks(tmp_path), ObjectLocks(tmp_path)
    step = "_flock" if when == "before it locks" else "_replace"
    theirs = getattr(locks_module, step)

    def later(*args):
        if step == "_replace" or args[1] == fcntl.LOCK_SH:
            monkeypatch.setattr(locks_module, step, theirs)
            first.hold(name, "a")
        return theirs(*args)

    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        monkeypatch.setattr(locks_module, step, later)
        second.hold(name, "b")
    assert [locks._held[name].held for locks in (first, second)].count(True) == 1
    assert is_held(path)
    for locks, request in ((first, "a"), (second, "b")):
        locks.release(request, stored=True)
    assert not is_held(path)


@pytest.mark.parametrize("when", [(Path, "exists"), (ObjectLocks, "_remove")])
@pytest.mark.parametrize("again", [False, True])
def test_a_step_does_not_wait_for_the_file_system_of_a_release(tmp_path, monkeypatch, when, again):
    """``hold`` returns while another thread's release waits for the disk. At the end it holds a lock."""
    locks = ObjectLocks(tmp_path)
    locks.hold("a.safetensors", "r1")
    inside, go = threading.Event(), threading.Event()
    slow = getattr(*when)

    def waiting(self, *args, **kwargs):
        if not inside.is_set():
            inside.set()
            assert go.wait(30)
        return slow(self, *args, **kwargs)

    monkeypatch.setattr(*when, waiting)
    thread = threading.Thread(target=locks.release, args=("r1",), kwargs={"stored": False})
    thread.start()
    assert inside.wait(30)
    name = "a.safetensors" if again else "b.safetensors"
    step = threading.Thread(target=locks.hold, args=(name, "r2"))
    step.start()
    step.join(30)
    held_in_time = not step.is_alive()
    go.set()
    thread.join(30)
    assert held_in_time
    assert is_held(tmp_path / f"{name}.lock")
    locks.release("r2", stored=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        ObjectLocks(tmp_path / "file").hold("a", "r")


@pytest.mark.parametrize("kind", ["link", "dangling link", "link to a folder", "fifo"])
def test_a_file_of_another_user_is_not_used_as_a_lock_file(tmp_path, caplog, kind):
    victim, folder = tmp_path / "victim", tmp_path / "output"
    victim.mkdir()
    folder.mkdir()
    (victim / "precious.lock").touch()
    if kind == "link to a folder":
        (folder / "sub").symlink_to(victim)
        os.chown(folder / "sub", 65534, 65534, follow_symlinks=False)
    else:
        (folder / "sub").mkdir()
        if kind == "fifo":
            os.mkfifo(folder / "sub/precious.lock")
        else:
            target = victim / ("precious.lock" if kind == "link" else "new")
            (folder / "sub/precious.lock").symlink_to(target)
    locks = ObjectLocks(folder)
    locks.ask("sub/precious", "r")
    locks.wait()
    assert "no lock file for 'sub/precious'" in caplog.text
    assert not is_held(victim / "precious.lock")
    locks.release("r", stored=False)
    locks.release_all()
    assert [p.name for p in victim.iterdir()] == ["precious.lock"]


def test_a_lock_file_that_is_removed_during_locking_is_created_again(tmp_path, monkeypatch):
    """``hsx gc`` removes the lock file next to an expired object."""
    path = tmp_path / "a.lock"
    opened = os.open

    def open_then_removed(name, *args, **kwargs):
        fd = opened(name, *args, **kwargs)
        if name == "a.lock":
            monkeypatch.setattr(os, "open", opened)
            path.unlink()
        return fd

    monkeypatch.setattr(os, "open", open_then_removed)
    locks = ObjectLocks(tmp_path)
    locks.hold("a", "r")
    assert is_held(path)
    locks.release("r", stored=False)


def test_a_lock_that_gc_holds_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("hsx_dist.connector.locks.BRIEF_S", 30.0)
    path = tmp_path / "a.lock"
    path.touch()
    locks = ObjectLocks(tmp_path)
    with path.open("r+") as gc:
        fcntl.flock(gc, fcntl.LOCK_EX)
        locks.ask("a", "r")
        locks.ask("b", "s")
        while not (tmp_path / "b.lock").exists():
            pass  # "a" was tried first
        path.unlink()
    locks.wait()
    assert is_held(path)
    locks.release("r", stored=False)


def test_a_lock_that_another_process_holds_is_not_removed(tmp_path):
    first, second = ObjectLocks(tmp_path), ObjectLocks(tmp_path)
    first.hold("a", "r")
    second.hold("a", "r")
    second.release("r", stored=False)
    assert is_held(tmp_path / "a.lock")
    first.release("r", stored=False)
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import fcntl, sys
files = [open(name) for name in sys.argv[1:]]  # read only, as vLLM's load_hidden_states opens them
for file in files:
    fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process_that_holds(*paths: Path):
    for path in paths:
        path.touch()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.communicate()


def test_locks_that_another_process_holds_delay_a_step_once_for_all(tmp_path, monkeypatch):
    seconds, count = 1.0, 40
    monkeypatch.setattr("hsx_dist.connector.locks.BRIEF_S", seconds)
    names = [f"{i}.safetensors" for i in range(count)]
    with another_process_that_holds(*[tmp_path / f"{name}.lock" for name in names]):
        locks = ObjectLocks(tmp_path)
        before = time.monotonic()
        for name in names:
            locks.ask(name, name)
        locks.ask("mine", "mine")
        locks.wait()
        waited = time.monotonic() - before
        assert seconds <= waited < seconds * count / 2
        assert is_held(tmp_path / "mine.lock")
        assert locks._end is None  # the next step has a new time limit
        for name in names:
            locks.release(name, stored=False)
        assert all(is_held(tmp_path / f"{name}.lock") for name in names)


def test_a_lock_that_another_process_holds_delays_no_other_lock_and_is_taken_when_it_opens(tmp_path, monkeypatch):
    monkeypatch.setattr("hsx_dist.connector.locks.BRIEF_S", 600.0)
    paths = [tmp_path / f"{name}.lock" for name in "ab"]
    with another_process_that_holds(*paths) as process:
        locks = ObjectLocks(tmp_path)
        for name in "abc":
            locks.ask(name, name)
        while not (tmp_path / "c.lock").exists() or not is_held(tmp_path / "c.lock"):
            assert process.poll() is None
    locks.wait()
    locks.release("a", stored=False)
    locks.release("c", stored=False)
    assert [p.name for p in tmp_path.iterdir()] == ["b.lock"]
    assert is_held(tmp_path / "b.lock")


def test_a_lock_that_opens_is_taken_while_other_requests_never_pause(tmp_path):
    path = tmp_path / "row.lock"
    path.touch()
    locks = ObjectLocks(tmp_path)
    with path.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        locks.ask("row", "r")
        locks.wait()
        for i in range(20_000):  # requests for far longer than the time between two tries, without a pause as long
            if i == 100:
                fcntl.flock(other, fcntl.LOCK_UN)
            locks.ask(f"{i}", f"{i}")
            locks.wait()
            locks.release(f"{i}", stored=False)
            if locks._held["row"].held:
                break
        assert i > 100
        assert locks._held["row"].held


def test_the_end_waits_for_no_lock_of_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr("hsx_dist.connector.locks.BRIEF_S", 600.0)
    with another_process_that_holds(tmp_path / "a.lock"):
        locks = ObjectLocks(tmp_path)
        locks.ask("a", "r")
        locks.release_all()
        locks.wait()


@pytest.mark.parametrize("there", [None, 0o666])
def test_only_the_servers_user_and_group_can_open_a_lock_file(tmp_path, there):
    """Every user who can open the file can hold the lock. vLLM's ``load_hidden_states`` must be able to read it."""
    path = tmp_path / "a.lock"
    if there is not None:  # from an earlier version
        path.touch()
        path.chmod(there)
    locks = ObjectLocks(tmp_path)
    before = os.umask(0)
    try:
        locks.hold("a", "r")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    locks.release("r", stored=True)


def test_a_file_that_another_user_linked_in_the_place_of_a_lock_keeps_its_mode(tmp_path):
    command = tmp_path / "command"
    command.touch()
    command.chmod(0o4755)
    (tmp_path / "a.lock").hardlink_to(command)
    locks = ObjectLocks(tmp_path)
    locks.hold("a", "r")
    locks.release("r", stored=True)
    assert command.stat().st_mode & 0o7777 == 0o4755


def test_another_programs_file_is_not_used_as_a_lock_file(tmp_path, caplog):
    """A client may choose the path ``uv``, whose lock would be ``uv.lock``."""
    file = tmp_path / "uv.lock"
    file.write_text("version = 1")
    file.chmod(0o644)
    locks = ObjectLocks(tmp_path)
    with pytest.raises(OSError, match="expected an empty lock file"):
        locks.hold("uv", "request")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("version = 1", 0o644)
    locks.ask("uv", "later")
    locks.wait()
    locks.release("later", stored=False)
    locks.release_all()
    assert file.read_text() == "version = 1"
    assert "file of another program" in caplog.text


def test_a_lock_file_without_read_permission_raises_an_error_with_advice(tmp_path, monkeypatch):
    """Without the lock a reader could get an earlier request's sample, and ``hsx gc`` could delete one in use."""

    def denied(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    expected = r"a.lock: expected a lock file that this user may read, .* in its group"
    for lock in (shared_lock, exclusive_lock):
        with pytest.raises(Denied, match=expected), lock(str(tmp_path), "a"):
            pass


def test_nfs_locks_only_a_file_opened_for_writing_exclusively(tmp_path, monkeypatch):
    """A retry does not help, and the user should not remove the server's lock files."""

    def as_nfs(_fd, _kind):
        raise OSError(errno.EBADF, "Bad file descriptor")

    (tmp_path / "a.lock").touch()
    monkeypatch.setattr(fcntl, "flock", as_nfs)
    expected = r"a lock file that this user may write, got Bad file descriptor. Run `hsx gc` as the server's user$"
    with pytest.raises(Denied, match=expected), exclusive_lock(str(tmp_path), "a"):
        pass


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_lock_that_cannot_be_looked_at_is_not_free(tmp_path, monkeypatch, number, call):
    locks = ObjectLocks(tmp_path)
    locks.hold("a", "r")

    def fails(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    before = open_files(tmp_path)
    for lock in (shared_lock, exclusive_lock):
        with monkeypatch.context() as patch:
            patch.setattr(*((os, "open") if call == "open" else (fcntl, "flock")), fails)
            with pytest.raises(Unavailable, match=r"a\.lock: expected a lock file"), lock(str(tmp_path), "a"):
                pass
        with pytest.raises(NotFound, match="held by a server"), lock(str(tmp_path), "a"):
            pass
    assert open_files(tmp_path) == before
    locks.release_all()


@pytest.mark.parametrize("failed", [False, True])
def test_a_read_that_began_while_the_mount_was_gone_ends_if_a_server_holds_the_lock(tmp_path, failed):
    """The store tries a read again until the mount is back. What it finds is of an earlier request."""
    root, away = tmp_path / "mount", tmp_path / "away"

    def read():
        with shared_lock(str(root), "a"):
            away.rename(root)
            if failed:
                raise SampleFailed("recorded by an earlier request")

    root.mkdir()
    locks = ObjectLocks(root)
    locks.hold("a", "r")
    root.rename(away)
    with pytest.raises(NotFound, match="held by a server"):
        read()
    root.rename(away)
    locks.release("r", stored=True)
    with pytest.raises(LockAppeared) as raised:  # the server may have held it while the object was read
        read()
    assert isinstance(raised.value.__cause__, SampleFailed if failed else type(None))


@pytest.mark.parametrize(
    ("reader", "earlier"), [("load", "sample"), ("load", "failure"), ("load", "none"), ("look", "failure")]
)
def test_a_read_during_which_a_lock_file_appears_returns_the_later_object(tmp_path, monkeypatch, reader, earlier):
    """At the first look the mount was gone, or the lock file was not made yet."""
    store, locks = open_store(str(tmp_path)), ObjectLocks(tmp_path)
    place, call = (load.Sample, "load") if earlier == "sample" else (load, "_sample_in_object")
    read = getattr(place, call)

    def put(value):
        states = {"hidden_states": np.full((4, 1, 8), value, np.float32), "token_ids": np.arange(4)}
        store.put("a.safetensors", [save(states)])

    def then_a_server_stores(*args, **options):
        try:
            return read(*args, **options)
        finally:
            if not (tmp_path / "a.safetensors.lock").exists():
                locks.hold("a.safetensors", "r")
                put(2)
                store.delete("a.error.json")
                locks.release("r", stored=True)

    if earlier == "sample":
        put(1)
    elif earlier == "failure":
        (tmp_path / "a.error.json").write_text('{"key": "a", "error": "recorded by an earlier request"}')
    monkeypatch.setattr(place, call, then_a_server_stores)
    if reader == "load":
        found = load.load_object(store, "a.safetensors", framework="numpy")["hidden_states"]
        assert found.min() == 2
    else:
        file = SampleSource(ConnectorConfig(output=str(tmp_path))).look("a", Range())
        pieces = b"".join(bytes(file.piece(i)) for i in range(len(file)))
        assert load_safetensors(pieces)["hidden_states"].min() == 2


def test_a_request_that_joins_a_lock_without_its_file_makes_a_new_file(tmp_path):
    """vLLM's ``cleanup_hidden_states`` removes the lock file of a request that still runs."""
    path, locks = tmp_path / "a.safetensors.lock", ObjectLocks(tmp_path)
    locks.hold("a.safetensors", "r1")
    kept = tmp_path / "kept"
    os.link(path, kept)  # a reader of the first request has the file open
    path.unlink()
    locks.ask("a.safetensors", "r2")
    locks.wait()
    assert is_held(path)
    locks.hold("a.safetensors", "r3")  # the new file is there
    assert len(locks._held["a.safetensors"].removed) == locks._removed == 1
    for holder in ("r2", "r1"):
        locks.release(holder, stored=False)
        assert is_held(path)
        assert is_held(kept)
    locks.release("r3", stored=False)
    assert not path.exists()
    assert not is_held(kept)
    assert locks._removed == 0
    locks.release_all()


@pytest.mark.parametrize("stored", [False, True])
def test_a_request_that_joins_a_released_lock_without_its_file_makes_a_new_file(tmp_path, monkeypatch, stored):
    """A client removed the lock file, and an earlier request's object is there."""
    path, locks = tmp_path / "a.safetensors.lock", ObjectLocks(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"of an earlier request")
    locks.hold("a.safetensors", "r1")
    path.unlink()
    begun, joined = threading.Event(), threading.Event()
    look = locks._is_there

    def slow_look(name):
        begun.set()
        assert joined.wait(60)
        return look(name)

    monkeypatch.setattr(locks, "_is_there", slow_look)
    release = threading.Thread(target=locks.release, args=("r1",), kwargs={"stored": False})
    release.start()
    assert begun.wait(60)
    locks.ask("a.safetensors", "r2")
    locks.wait()
    joined.set()
    release.join()
    assert is_held(path)
    monkeypatch.undo()
    locks.release("r2", stored=stored)
    assert not is_held(path)
    assert locks._removed == 0
    locks.release_all()


def test_a_removed_lock_file_that_is_back_is_not_made_again(tmp_path):
    """The mount was gone when the second request began."""
    root, away = tmp_path / "mount", tmp_path / "away"
    root.mkdir()
    locks = ObjectLocks(root)
    locks.hold("a", "r1")
    root.rename(away)
    with pytest.raises(FileNotFoundError):
        locks.hold("a", "r2")
    root.mkdir()  # the folder of the disk below the mount
    locks.hold("a", "r3")
    assert is_held(root / "a.lock")
    root.rename(tmp_path / "below")
    away.rename(root)
    locks.hold("a", "r4")
    assert len(locks._held["a"].removed) == 1
    for i in range(1, 5):
        assert is_held(root / "a.lock")
        locks.release(f"r{i}", stored=False)
    assert list(root.iterdir()) == []
    locks.release_all()


def test_removed_lock_files_count_as_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    path, locks = tmp_path / "a.lock", ObjectLocks(tmp_path)
    for i in range(4):
        locks.hold("a", f"r{i}")
        path.unlink()
    with pytest.raises(OSError, match="half of RLIMIT_NOFILE"):
        locks.hold("a", "r4")
    for i in range(5):  # the last request has the lock nevertheless, for the readers that have its file open
        assert "a" in locks._held
        locks.release(f"r{i}", stored=False)
    assert locks._held == {}
    locks.release_all()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_has_no_lock_of_an_object(tmp_path, monkeypatch, number):
    def fails(*_args):
        raise OSError(number, os.strerror(number))

    (tmp_path / "a.lock").touch()
    monkeypatch.setattr(fcntl, "flock", fails)
    with shared_lock(str(tmp_path), "a"):
        pass


def test_locks_leave_half_of_the_descriptors_to_the_rest_of_the_process(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    locks = ObjectLocks(tmp_path)
    for i in range(30):
        locks.ask(f"k{i}.safetensors", f"r{i}")
    locks.wait()  # a step continues
    assert len(list(tmp_path.iterdir())) == 10
    assert caplog.text.count("half of RLIMIT_NOFILE") == 1  # once, not for each request
    locks.ask("k0.safetensors", "again")  # a locked name needs no further descriptor
    locks.wait()
    for holder in ["again", *(f"r{i}" for i in range(30))]:
        locks.release(holder, stored=False)
    assert list(tmp_path.iterdir()) == []
    locks.hold("later.safetensors", "later")
    assert is_held(tmp_path / "later.safetensors.lock")
    locks.release_all()


def test_a_lock_below_the_mount_point_removes_no_lock_on_the_mount(tmp_path):
    root, away = tmp_path / "mount", tmp_path / "away"
    root.mkdir()
    mine, other = ObjectLocks(root), ObjectLocks(root)
    root.rename(away)
    root.mkdir()  # the folder of the disk below the mount
    mine.hold("a.safetensors", "r")
    root.rename(tmp_path / "below")
    away.rename(root)
    other.hold("a.safetensors", "s")
    mine.release("r", stored=False)
    assert is_held(root / "a.safetensors.lock")
    other.release_all()


def test_locks_do_not_make_a_folder_again_that_was_there(tmp_path):
    root = tmp_path / "mount/states"
    root.mkdir(parents=True)
    locks = ObjectLocks(root)
    (tmp_path / "mount").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        locks.hold("a.safetensors", "r")
    locks.release("r", stored=False)
    assert not (tmp_path / "mount").exists()
    (tmp_path / "away").rename(tmp_path / "mount")
    locks.hold("a.safetensors", "s")
    assert is_held(root / "a.safetensors.lock")
    locks.release_all()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOTCONN, errno.ESTALE])
def test_a_folder_that_cannot_be_looked_at_does_not_end_the_server(tmp_path, monkeypatch, number):
    stat = os.stat

    def fails(path, *args, **kwargs):
        if Path(path) == tmp_path:
            raise OSError(number, os.strerror(number))
        return stat(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fails)
        locks = ObjectLocks(tmp_path)
    locks.hold("a", "r")
    assert is_held(tmp_path / "a.lock")
    locks.release_all()


_FORKED = """
import os, sys
from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.reading.object_lock import exclusive_lock, shared_lock

locks, root = ObjectLocks(sys.argv[1]), sys.argv[1]

def has_no_lock_after(release):
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(wait, 1)  # until the parent closes its end
        os._exit(0)
    release()
    with exclusive_lock(root, "a"):
        pass
    os.close(end)
    os.waitpid(child, 0)

locks.hold("a", "r1")
has_no_lock_after(lambda: locks.release("r1", stored=True))
for lock in (shared_lock, exclusive_lock):
    held = lock(root, "a")
    held.__enter__()
    has_no_lock_after(lambda: held.__exit__(None, None, None))
locks.hold("a", "r2")
has_no_lock_after(locks.release_all)
"""


def test_a_released_lock_is_not_kept_by_a_forked_process(tmp_path):
    done = subprocess.run([sys.executable, "-c", _FORKED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
