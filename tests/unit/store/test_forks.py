"""obstore's runtime does not survive a fork. No call of a forked process may reach its parent's runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CODE = """
import os, sys, weakref
from hsx_dist.errors import ConfigError, StoreError
from hsx_dist.store import open_store
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.obstore import ObstoreStore

OPTIONS = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}

def opened(backend):
    return open_store("s3://b/r", OPTIONS, backend=backend, retry_seconds=0)

def in_child(check):
    child = os.fork()
    if not child:
        try:
            check()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def raises(kind, call):
    try:
        call()
    except kind as e:
        assert "spawn" in str(e), e
    else:
        raise AssertionError(f"expected {kind}")

def before():
    assert isinstance(opened("obstore")._inner, ObstoreStore)
    in_child(after)

def after():
    for _ in range(2):
        assert isinstance(opened("auto")._inner, FsspecStore)
        raises(ConfigError, lambda: opened("obstore"))

def inherited():
    global store
    for call in (
        lambda: store.put("a", [b"1"]), lambda: store.put_if_absent("a", b"1"), lambda: store.get("a"),
        lambda: store.get("a", 1), lambda: store.get_ranges("a", [(0, 1), (1 << 30, 2 << 30)]), lambda: store.head("a"),
        lambda: list(store.list()), lambda: store.delete("a"), lambda: store.version("a"),
        lambda: store.delete_version("a", "1"), lambda: store.put_version("a", [b"1"], "1"),
        lambda: list(files.list()),
    ):
        raises(StoreError, call)
    kept = weakref.ref(store._inner)
    del store
    assert kept() is not None  # otherwise destructors of obstore run here
    after()

in_child(before)  # the parent has not loaded obstore
store = opened("auto")
assert isinstance(store._inner, ObstoreStore)
files = ObstoreStore("file://" + sys.argv[1])
files.put("a", [b"1"])  # starts obstore's threads
in_child(inherited)
assert [info.name for info in files.list()] == ["a"]
"""


def test_a_forked_process_uses_no_obstore_of_its_parent(tmp_path: Path) -> None:
    code = [sys.executable, "-c", _CODE, str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
