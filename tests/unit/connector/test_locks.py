"""Companion locks as vLLM's own ``load_hidden_states`` takes them."""

from __future__ import annotations

import fcntl
import os

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
    locks.hold("sub/a.safetensors")
    locks.hold("sub/a.safetensors")  # a second request of the same name: must not wait for the first
    path = tmp_path / "sub/a.safetensors.lock"
    assert is_held(path)
    locks.release("sub/a.safetensors", stored=True)
    assert is_held(path)
    locks.release("sub/a.safetensors", stored=True)
    assert not is_held(path)
    locks.release("sub/a.safetensors", stored=True)  # nobody's


def test_a_lock_of_nothing_is_removed_but_never_beside_an_object(tmp_path):
    locks = CompanionLocks(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        locks.hold(name)
    (tmp_path / "b.safetensors").write_bytes(b"x")
    for name in ("a.safetensors", "b.safetensors"):
        locks.release(name, stored=False)
    assert not (tmp_path / "a.safetensors.lock").exists()
    assert not is_held(tmp_path / "b.safetensors.lock")


def test_another_process_writing_the_same_object_does_not_stop_a_step(tmp_path):
    first, second = CompanionLocks(tmp_path), CompanionLocks(tmp_path)
    first.hold("a.safetensors")
    second.hold("a.safetensors")
    second.release("a.safetensors", stored=True)
    assert is_held(tmp_path / "a.safetensors.lock")
    first.release_all()
    assert not is_held(tmp_path / "a.safetensors.lock")


def test_a_folder_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        CompanionLocks(tmp_path / "file").hold("a")
