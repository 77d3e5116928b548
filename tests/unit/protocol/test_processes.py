"""The races of ``test_interleavings``, with real processes, real signals and real commands."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hsx_dist import open_run
from hsx_dist.config import load_config
from hsx_dist.errors import RunError
from hsx_dist.format.codecs import NoneCodec
from hsx_dist.format.place import open_place, start_run
from hsx_dist.jobs.attempt import begin_attempt, take_over
from hsx_dist.reading import verify_run
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import RunWriter, store_run, whole
from tests.unit.protocol.scenarios import half, remember, sample, with_an_old_completion
from tests.unit.reading.test_expiry import store_anew

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[3]
#: The calls before which a writer pauses: the part, the check whether its attempt is closed, the receipt.
MOMENTS = [("put", "data/"), ("get", "closed"), ("put_if_absent", "manifest/")]
#: ``hsx`` in a process that gets SIGKILL before its 21st deletion.
KILLED_REMOVAL = """
import os, signal
from hsx_dist.cli import main
from hsx_dist.store.local import LocalStore
delete, deleted = LocalStore.delete, []
def counted(store, name):
    if len(deleted) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    deleted.append(name)
    delete(store, name)
LocalStore.delete = counted
main()
"""


#: ``hsx`` in a process that stops itself before its first call of a store's method for a name with a text.
PAUSED = """
import os, signal, sys
from hsx_dist.store.local import LocalStore
_, verb, part, *arguments = sys.argv
call = getattr(LocalStore, verb)
def paused(store, name, *more):
    if part in name:
        setattr(LocalStore, verb, call)
        print("paused", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return call(store, name, *more)
setattr(LocalStore, verb, paused)
from hsx_dist.cli import main
main(arguments)
"""
#: A consumer that has used sample ``a`` and removes parts.
CONSUMER = """
import sys
from hsx_dist.format.place import open_place
from hsx_dist.reading.retention import Retention
from hsx_dist.store.local import LocalStore
Retention(open_place(LocalStore(sys.argv[1]))).ack("a")
"""


@pytest.fixture
def root(tmp_path: Path) -> LocalStore:
    """Another writer of attempt 1, whose driver died, has proven sample ``a``."""
    made = LocalStore(tmp_path / "run")
    start_run(made, {"meaning": {"model": "m"}})
    RunWriter(made, NoneCodec(), about={"model": "m"}).put([whole(sample("m", "a"))])
    return made


def hsx(*args: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "hsx_dist.cli", *args], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def paused_writer(root: LocalStore, verb: str, part: str) -> AbstractContextManager[list[str]]:
    return paused("-m", "tests.unit.protocol.paused_writer", root.url, verb, part)


@contextmanager
def paused(*arguments: str) -> Iterator[list[str]]:
    """Run the block while a process of Python is stopped, then continue it. The list receives its further output."""
    argv = [sys.executable, *arguments]
    process = subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    said: list[str] = []
    try:
        assert process.stdout is not None
        assert "paused\n" in iter(process.stdout.readline, "")
        yield said
        # The process prints before it stops, so wait until it has stopped: an earlier SIGCONT would be lost.
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGCONT)
        said += process.communicate(timeout=60)[0].split()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("verb", "part"), MOMENTS)
def test_gc_next_to_a_writer_that_pauses(root: LocalStore, verb: str, part: str) -> None:
    with paused_writer(root, verb, part) as said:
        hsx("gc", root.url, "--delete", "--watch", "0.1")
    # If gc saw no object of the writer, it continues. If gc deleted its part, it is stopped.
    assert said == (["stored"] if verb == "put" else ["Fenced"])
    run = open_run(root.url)
    assert sorted(run.keys()) == (["a", "b"] if verb == "put" else ["a"])
    assert verify_run(root).ok
    assert all(len(s.load()["token_ids"]) == 3 for s in run)


@pytest.mark.parametrize(("verb", "part"), MOMENTS)
def test_the_next_driver_next_to_a_writer_that_pauses(root: LocalStore, verb: str, part: str) -> None:
    with paused_writer(root, verb, part) as said:
        config = load_config(None, (), model="m", output=root.url)
        place = open_place(root)
        _, manifest = take_over(place, begin_attempt(config, place), Console(file=io.StringIO()))
        assert set(manifest.samples) == {"a"}
    assert said == ["Fenced"]
    assert open_run(root.url).keys() == ["a"]  # no sample is added after the driver's look


@pytest.mark.parametrize(("verb", "part"), MOMENTS)
def test_a_writer_of_a_removed_run_reaches_nothing_of_the_next_one(root: LocalStore, verb: str, part: str) -> None:
    with paused_writer(root, verb, part) as said:
        hsx("rm", root.url, "--yes", "--watch", "0.1")
        store_run(root, [random_sample("b", 5, seed=9)], info={"meaning": {"model": "other"}}, about={"model": "other"})
    assert said == ["stored"]  # in the folder of its removed run
    (found,) = open_run(root.url)
    assert (found.key, found.num_tokens, found.about["model"]) == ("b", 5, "other")
    assert verify_run(root).ok
    assert "of runs that were removed here" in hsx("gc", root.url, "--delete")
    assert [s.key for s in open_run(root.url)] == ["b"]


def test_a_driver_of_another_model_next_to_a_removal_that_pauses(root: LocalStore) -> None:
    other: dict[str, Any] = {"info": {"meaning": {"model": "other"}}, "about": {"model": "other"}}
    removal = ("rm", root.url, "--yes", "--watch", "0.1")
    with paused("-c", PAUSED, "delete", "data/", *removal), pytest.raises(RunError, match="removal did not finish"):
        store_run(root, [random_sample("b", 5, seed=9)], **other)
    store_run(root, [random_sample("b", 5, seed=9)], **other)
    (found,) = open_run(root.url)
    assert (found.key, found.num_tokens, found.about["model"]) == ("b", 5, "other")
    assert verify_run(root).ok


def test_the_rest_of_a_sample_after_a_consumer_of_its_first_part(tmp_path: Path) -> None:
    """Attempt 1 is complete. Attempt 2 stores ``long`` in two parts. The consumer has used the other sample of one."""
    root: Any = LocalStore(tmp_path / "run")
    remember(with_an_old_completion)(root)
    subprocess.run([sys.executable, "-c", CONSUMER, root.url], cwd=PROJECT, check=True)
    half(root)
    run = open_run(root.url)
    assert "long" in run
    assert len(run["long"].load()["token_ids"]) == run["long"].num_tokens == len(sample("m", "long").token_ids)
    assert verify_run(root).ok


@pytest.mark.parametrize("name", ["old.safetensors", "old.error.json"])
def test_a_server_that_stores_an_expired_object_anew_next_to_gc_that_pauses(tmp_path: Path, name: str) -> None:
    prefix = LocalStore(tmp_path / "states")
    store_anew(prefix, name, 1000)
    with paused("-c", PAUSED, "delete_version", "old", "gc", prefix.url, "--delete"):
        store_anew(prefix, name, 4e9)
    assert b"4000000000" in prefix.get(name)
    assert hsx("gc", prefix.url, "--delete", "--json")
    assert b"4000000000" in prefix.get(name)


def test_a_removal_that_is_killed_leaves_nothing_to_adopt(tmp_path: Path) -> None:
    root = LocalStore(tmp_path / "run")
    store_run(root, [random_sample(f"k{i}", 3, seed=i) for i in range(40)], per_part=1)
    removal = subprocess.run([sys.executable, "-c", KILLED_REMOVAL, "rm", root.url, "--yes"], cwd=PROJECT)
    assert removal.returncode == -signal.SIGKILL
    assert "removed" in hsx("ls", root.url, code=2)
    with pytest.raises(RunError, match="hsx rm"):
        store_run(root, [random_sample("k0", 3)])
    hsx("rm", root.url, "--yes")
    store_run(root, [random_sample("k0", 3)])
    assert len(open_run(root.url)) == 1
