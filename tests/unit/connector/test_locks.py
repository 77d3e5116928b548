"""Companion locks as vLLM's own ``load_hidden_states`` takes them."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from hsx_dist.connector.locks import CompanionLocks


def is_held(path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_held_until_the_last_holder_is_done(tmp_path):
    locks = CompanionLocks(tmp_path)
    locks.hold("sub/a.safetensors", "r1")
    locks.hold("sub/a.safetensors", "r2")  # a second request of the same name: must not wait for the first
    locks.hold("sub/a.safetensors", "r2")  # once each
    path = tmp_path / "sub/a.safetensors.lock"
    assert is_held(path)
    locks.release("r1", stored=True)
    locks.release("r1", stored=True)  # only its own
    locks.release("r3", stored=False)  # nobody's
    assert is_held(path)
    locks.release("r2", stored=True)
    assert not is_held(path)


def test_a_lock_of_nothing_is_removed_but_never_beside_an_object(tmp_path):
    locks = CompanionLocks(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        locks.hold(name, name)
    (tmp_path / "b.safetensors").write_bytes(b"x")
    for name in ("a.safetensors", "b.safetensors"):
        locks.release(name, stored=False)
    assert not (tmp_path / "a.safetensors.lock").exists()
    assert not is_held(tmp_path / "b.safetensors.lock")


def test_asked_for_it_is_held_by_a_thread_and_given_back_in_whatever_order(tmp_path, monkeypatch):
    """Whoever asks does not wait for the file system; whoever gives back before it is held does not leave it held."""
    inside, go = threading.Event(), threading.Event()
    make = CompanionLocks._open

    def waiting(self, name):
        inside.set()
        assert go.wait(30)
        return make(self, name)

    monkeypatch.setattr(CompanionLocks, "_open", waiting)
    locks = CompanionLocks(tmp_path)
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


def test_a_file_system_that_hangs_does_not_keep_a_process_from_ending(tmp_path, monkeypatch):
    go = threading.Event()

    def hanging(*_):
        assert go.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(CompanionLocks, "_open", hanging)
    monkeypatch.setattr("hsx_dist.connector.locks.END_S", 0.05)
    locks = CompanionLocks(tmp_path)
    locks.ask("a", "a")
    ending = threading.Thread(target=locks.release_all)
    ending.start()
    ending.join(30)
    ended = not ending.is_alive()
    go.set()
    assert ended


def test_a_lock_that_cannot_be_made_is_logged_and_nobody_waits_for_it(tmp_path, caplog):
    locks = CompanionLocks(tmp_path)
    locks.ask("x" * 300, "r")
    locks.ask("a", "s")
    locks.wait()
    assert is_held(tmp_path / "a.lock")
    assert "no lock file for 'xxx" in caplog.text
    locks.release("r", stored=False)


def test_a_file_system_that_does_not_say_what_is_there_keeps_no_lock_shut(tmp_path, monkeypatch):
    locks = CompanionLocks(tmp_path)
    locks.hold("a", "r")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "exists", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        locks.release("r", stored=False)
    assert not is_held(tmp_path / "a.lock")


def test_a_lock_stays_beside_what_was_stored_while_another_release_looked(tmp_path, monkeypatch):
    locks = CompanionLocks(tmp_path)
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
    first, second = CompanionLocks(tmp_path), CompanionLocks(tmp_path)
    first.hold("a.safetensors", "r")
    second.hold("a.safetensors", "r")
    second.release("r", stored=True)
    assert is_held(tmp_path / "a.safetensors.lock")
    first.release_all()
    assert not is_held(tmp_path / "a.safetensors.lock")


def test_readers_of_what_lies_there_do_not_keep_the_next_ones_from_waiting(tmp_path):
    """A lock that a reader holds is replaced: the reader goes on, and whoever comes now waits."""
    path = tmp_path / "a.safetensors.lock"
    path.touch()
    locks = CompanionLocks(tmp_path)
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        locks.hold("a.safetensors", "r")
        assert is_held(path)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
    locks.release("r", stored=True)
    assert not is_held(path)


@pytest.mark.parametrize("when", [(Path, "exists"), (CompanionLocks, "_remove")])
@pytest.mark.parametrize("again", [False, True])
def test_a_step_does_not_wait_for_the_file_system_of_a_release(tmp_path, monkeypatch, when, again):
    """``hold`` returns while another thread's release looks at the disk; in the end it holds a lock."""
    locks = CompanionLocks(tmp_path)
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
        CompanionLocks(tmp_path / "file").hold("a", "r")


@pytest.mark.parametrize("kind", ["link", "dangling link", "link to a folder", "fifo"])
def test_what_another_user_planted_is_no_lock_file(tmp_path, caplog, kind):
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
    locks = CompanionLocks(folder)
    locks.ask("sub/precious", "r")
    locks.wait()
    assert "no lock file for 'sub/precious'" in caplog.text
    assert not is_held(victim / "precious.lock")
    locks.release("r", stored=False)
    locks.release_all()
    assert [p.name for p in victim.iterdir()] == ["precious.lock"]


def test_a_lock_file_that_is_removed_while_it_is_taken_is_made_again(tmp_path, monkeypatch):
    """``hsx gc`` removes the lock file next to an object that has expired."""
    path = tmp_path / "a.lock"
    opened = os.open

    def open_then_removed(name, *args, **kwargs):
        fd = opened(name, *args, **kwargs)
        if name == "a.lock":
            monkeypatch.setattr(os, "open", opened)
            path.unlink()
        return fd

    monkeypatch.setattr(os, "open", open_then_removed)
    locks = CompanionLocks(tmp_path)
    locks.hold("a", "r")
    assert is_held(path)
    locks.release("r", stored=False)


def test_a_lock_that_gc_holds_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("hsx_dist.connector.locks.BRIEF_S", 30.0)
    path = tmp_path / "a.lock"
    path.touch()
    locks = CompanionLocks(tmp_path)
    with path.open("r+") as gc:
        fcntl.flock(gc, fcntl.LOCK_EX)
        locks.ask("a", "r")
        path.unlink()
    locks.wait()
    assert is_held(path)
    locks.release("r", stored=False)


def test_a_lock_that_another_process_holds_is_not_removed(tmp_path):
    first, second = CompanionLocks(tmp_path), CompanionLocks(tmp_path)
    first.hold("a", "r")
    second.hold("a", "r")
    second.release("r", stored=False)
    assert is_held(tmp_path / "a.lock")
    first.release("r", stored=False)
    assert list(tmp_path.iterdir()) == []
