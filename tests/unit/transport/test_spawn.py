"""A bare connector's writers in a separate process: after any death each sample is stored or reported lost."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

import hsx_dist
from hsx_dist.connector.connector_config import read_connector_config
from hsx_dist.connector.object_writer import StoreOutlet, store_outlet
from hsx_dist.connector.step import Expect
from hsx_dist.errors import ConfigError, EngineError, SampleFailed
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page, Segment
from hsx_dist.store.local import LocalStore
from hsx_dist.transport import remote_sender
from hsx_dist.transport.channel import Peer
from hsx_dist.transport.remote_sender import RemoteSender
from hsx_dist.transport.writer_process import WriterProcessSpec, spawn
from hsx_dist.writers.events import Event
from hsx_dist.writers.sink import SinkOptions
from tests.unit.connector.small_outlet import LAYERS, outlet_on, some, submit
from tests.unit.transport import placements
from tests.unit.transport.placements import RING, place, spawned, until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def outlet(tmp_path):
    made = outlet_on(tmp_path, apart=True)
    yield made
    made.close(10)


def settle(outlet: StoreOutlet) -> None:
    end = time.monotonic() + 60
    while outlet.pending:
        assert time.monotonic() < end, "expected each sample to be stored or reported lost within 60 s"
        time.sleep(0.005)


def states_of(tmp_path, key: str) -> np.ndarray:
    found = hsx_dist.load_hidden_states(str(tmp_path / f"{key}.safetensors"), framework="numpy")
    return found["hidden_states"].transpose(1, 0, 2)


def pids() -> list[int]:
    """The running writer processes that this process started."""
    children = psutil.Process().children()
    return [
        child.pid
        for child in children
        if child.status() != psutil.STATUS_ZOMBIE and any("writer_process" in word for word in child.cmdline())
    ]


def pid() -> int:
    (found,) = pids()
    return found


def test_the_process_has_low_priority_on_shared_cores_and_ends_with_its_engine(outlet):
    process = pid()
    assert psutil.Process(process).nice() > psutil.Process().nice()
    outlet.close(10)
    assert not psutil.pid_exists(process)


def test_a_killed_process_fails_its_samples_and_the_next_samples_are_stored(outlet, tmp_path, caplog):
    process = pid()
    os.kill(process, signal.SIGSTOP)
    for i in range(3):
        submit(outlet, f"lost{i}", some(seed=i))
    while outlet.ring.used_bytes and outlet.end.pending:  # handed over to the writers
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    settle(outlet)
    assert outlet.ring.used_bytes == 0
    for i in range(3):
        with pytest.raises(SampleFailed, match="exit code -9"):
            states_of(tmp_path, f"lost{i}")
    assert "ended with exit code -9: 3 samples are lost" in caplog.text
    submit(outlet, "next", some(seed=9))
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "next"), some(seed=9))
    assert pid() != process
    # The same request again, as its client would repeat it.
    submit(outlet, "lost0", some(seed=0), request="again")
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "lost0"), some(seed=0))


def test_later_pages_of_a_lost_sample_are_dropped(outlet, tmp_path):
    states = np.concatenate([some(4), some(4, seed=1)], axis=1)
    segment = Segment("a", 0, 0, 8, 8, source="r:0")

    def page(start: int) -> None:
        rows = np.ascontiguousarray(states[:, start : start + 4])
        offset = outlet.ring.allocate(rows.nbytes)
        outlet.memory[offset : offset + rows.nbytes] = rows.reshape(-1).view(np.uint8)
        ids = np.arange(start, start + 4, dtype=np.int64)
        outlet.submit(
            (Page(segment, start, start + 4, 4, LAYERS, "float32", rows.shape, "LTH", ids, offset=offset), None)
        )

    page(0)
    while outlet.ring.used_bytes:  # taken by the writers, which now have half a segment
        time.sleep(0.001)
    assert outlet.pending
    os.kill(pid(), signal.SIGKILL)
    settle(outlet)
    page(4)
    submit(outlet, "b", some())
    settle(outlet)
    assert outlet.ring.used_bytes == 0
    np.testing.assert_array_equal(states_of(tmp_path, "b"), some())
    with pytest.raises(SampleFailed, match="exit code -9"):
        states_of(tmp_path, "a")
    submit(outlet, "a", some(), request="r")  # the same source: no page of the lost sample is used
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "a"), some())


def test_later_columns_of_a_lost_sample_are_dropped(outlet, tmp_path):
    columns = {"columns": 3, "request": "r"}
    submit(outlet, "a", some(), column=0, point="p0", **columns)
    while outlet.ring.used_bytes:
        time.sleep(0.001)
    os.kill(pid(), signal.SIGKILL)
    settle(outlet)
    for column in (1, 2):  # a new process would wait forever for the column that the ended one had
        submit(outlet, "a", some(), column=column, point=f"p{column}", **columns)
    submit(outlet, "b", some())
    settle(outlet)
    assert (outlet._writers._copies, outlet._writers._broken) == ({}, set())
    np.testing.assert_array_equal(states_of(tmp_path, "b"), some())


def test_samples_fail_at_once_while_the_process_cannot_start(outlet, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    os.kill(pid(), signal.SIGKILL)
    for i in range(2):
        submit(outlet, f"k{i}", some())
        settle(outlet)
        with pytest.raises(SampleFailed, match=r"exit code -9|does not run"):
            states_of(tmp_path, f"k{i}")
    monkeypatch.undo()
    monkeypatch.setattr(remote_sender, "RESTART_S", 0.0)  # as some seconds later
    submit(outlet, "c", some())
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "c"), some())


def test_the_process_does_not_start_again_while_the_mount_of_the_folder_is_gone(tmp_path, monkeypatch):
    """A new process would make the folder below the mount, and take it for the output."""
    monkeypatch.setattr(remote_sender, "RESTART_S", 0.0)
    mount, away = tmp_path / "mount", tmp_path / "away"
    mount.mkdir()
    outlet = outlet_on(mount, apart=True, locks=False)
    try:
        submit(outlet, "a", some())
        settle(outlet)
        mount.rename(away)
        os.kill(pid(), signal.SIGKILL)
        until(lambda: outlet._writers.pid is None)
        submit(outlet, "b", some())
        until(lambda: not outlet.ring.used_bytes)
        assert outlet._writers.pid is None
        assert not mount.exists()
        away.rename(mount)
        submit(outlet, "c", some())
        settle(outlet)
        np.testing.assert_array_equal(states_of(mount, "c"), some())
        with pytest.raises(SampleFailed, match="does not run"):
            states_of(mount, "b")
    finally:
        outlet.close(10)


def test_the_end_while_another_one_starts_leaves_it_the_ring_and_no_process(tmp_path):
    before = rings()
    begun, go_on, made = threading.Event(), threading.Event(), []

    def slowly(spec, ring: int) -> Peer:
        if made:
            begun.set()
            assert go_on.wait(60)
        made.append(spawn(spec, ring))  # maps the ring
        return made[-1]

    sender = sender_of(spec(tmp_path), slowly)
    os.kill(sender.pid, signal.SIGKILL)
    while sender.pid is not None:
        time.sleep(0.005)
    starting = threading.Thread(target=sender.send, args=([place(0, 64)], lambda _: None))
    starting.start()
    assert begun.wait(60)
    sender.close()
    assert rings() != before
    go_on.set()
    starting.join(60)
    assert sender.pid is None
    assert made[1].process.poll() is not None
    sender.memory = None
    assert rings() == before


@pytest.mark.parametrize("error", [OSError("stale"), ValueError("no")])
def test_an_error_of_the_event_handler_does_not_stop_later_events(tmp_path, caplog, error):
    told: list[str] = []

    def fail_once(event: Event) -> None:
        keys = [segment.key for segment in event.segments]
        told.extend(keys)
        if "a" in keys:
            raise error

    with spawned(tmp_path, fail_once) as placement:
        sent = {key: placements.some(40, seed=i) for i, key in enumerate(["a", *map(str, range(300))])}
        assert sum(states.nbytes for states in sent.values()) > RING
        for key, states in sent.items():
            placement.submit(key, states)
        until(lambda: len(told) == len(sent))
        until(lambda: not placement.end.ring.used_bytes)
        assert set(told) == set(sent)
        np.testing.assert_array_equal(placement.states("299"), sent["299"])
    assert "was not handled" in caplog.text


class _Raising(logging.Handler):
    def emit(self, _: logging.LogRecord) -> None:
        raise OSError("disk full")


def test_a_log_handler_that_raises_loses_only_its_line(outlet, tmp_path):
    handler = _Raising(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        bad = some()
        bad[0, 0, 0] = np.inf
        submit(outlet, "a", bad)
        submit(outlet, "b", some())
        settle(outlet)
    finally:
        logging.getLogger().removeHandler(handler)
    np.testing.assert_array_equal(states_of(tmp_path, "b"), some())


def test_the_process_imports_nothing_from_the_engines_working_folder(tmp_path, monkeypatch):
    (tmp_path / "uuid.py").write_text("raise RuntimeError('not to be run')")
    monkeypatch.chdir(tmp_path)
    outlet = outlet_on(tmp_path, apart=True)
    submit(outlet, "a", some())
    settle(outlet)
    outlet.close(10)
    np.testing.assert_array_equal(states_of(tmp_path, "a"), some())


def test_a_slow_event_handler_does_not_delay_the_end(tmp_path):
    go, telling = threading.Event(), threading.Event()

    def slowly(_: Event) -> None:
        telling.set()
        go.wait(60)

    with spawned(tmp_path, slowly, drain_seconds=0.2) as placement:
        placement.submit("a", placements.some())
        process = pid()
        assert telling.wait(60)
        began = time.monotonic()
    assert time.monotonic() - began < 30  # not the minute that the slow event handler takes
    assert not psutil.pid_exists(process)
    go.set()


def test_signals_to_the_servers_process_group_do_not_end_it_before_its_engine(outlet, tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid(), number)
    submit(outlet, "a", some())
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "a"), some())


DYING = """
import os, signal, sys, time
from pathlib import Path
from tests.unit.connector.small_outlet import outlet_on, some, submit
from tests.unit.transport.test_spawn import pid
if __name__ == "__main__":
    outlet = outlet_on(Path(sys.argv[1]), apart=True, drain_seconds=30)
    process = pid()
    os.kill(process, signal.SIGSTOP)
    for i in range(3):
        submit(outlet, f"k{i}", some(seed=i))
    while outlet.end.pending:
        time.sleep(0.001)
    os.kill(process, signal.SIGCONT)
    print(process, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_stores_what_it_has_when_the_engine_is_killed_and_ends(tmp_path):
    script = [sys.executable, "-c", DYING, str(tmp_path)]
    ended = subprocess.run(script, cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    process = int(ended.stdout)
    end = time.monotonic() + 60
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "expected the process to end with its engine"
        time.sleep(0.02)
    for i in range(3):
        np.testing.assert_array_equal(states_of(tmp_path, f"k{i}"), some(seed=i))


def test_closing_waits_no_longer_than_its_time_limit(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_TEST", "not-to-be-seen")
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        outlet = outlet_on(
            tmp_path,
            apart=True,
            output="s3://bucket/run",
            storage_options={
                "key": "${env:SECRET_OF_THE_TEST}",
                "secret": "${env:SECRET_OF_THE_TEST}",
                "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "client_kwargs": {"region_name": "us-east-1"},
            },
        )
        process = pid()
        assert "not-to-be-seen" not in " ".join(psutil.Process(process).cmdline())
        submit(outlet, "a", some())
        outlet.close(0.3)
    assert "1 requests were not stored in time" in caplog.text
    assert not psutil.pid_exists(process)


def test_log_lines_of_the_process_reach_the_engines_log(outlet, caplog):
    states = some()
    states[0, 1, 1] = np.nan
    with caplog.at_level(logging.WARNING):
        submit(outlet, "strange", states)
        settle(outlet)
    [line] = [r for r in caplog.records if "wrong hidden states" in r.getMessage()]
    assert line.name == "hsx_dist.writers.sink"
    assert line.key == "strange"


def rings() -> int:
    """Number of this process's open descriptors of rings."""
    return sum("hsx-ring" in os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry))  # noqa: PTH115


def sender_of(spec: WriterProcessSpec, connect=spawn) -> RemoteSender:
    return RemoteSender(partial(connect, spec), spec.ring_bytes, print, Meter())


def spec(tmp_path, **changes) -> WriterProcessSpec:
    options = SinkOptions(resolve_codec("none"), {"model": "m"}, "worker", layout="sample")
    return replace(WriterProcessSpec(str(tmp_path), {}, options, 1, 1 << 20, 4.0), **changes)


def test_the_reason_of_a_failed_start_is_in_the_error(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="without credentials"):
        sender_of(spec(tmp_path, url="s3://user:word@bucket/x"))
    monkeypatch.setattr("sys.executable", "/bin/false")
    before = rings()
    with pytest.raises(EngineError, match=r"exit code 1 .*\. Set hsx.transport to 'inline'"):
        sender_of(spec(tmp_path))
    assert rings() == before


class _Config:
    """The part of vLLM's configuration that an outlet reads."""

    class model_config:  # noqa: N801
        model, revision, skip_tokenizer_init, hf_text_config = "m", None, True, None

    class load_config:  # noqa: N801
        load_format = "auto"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, 1), ({"transport": "inline"}, 0), ({"output": "memory://hsx-apart"}, 0)],
)
def test_which_bare_connectors_start_a_process(tmp_path, given, expected):
    settings = read_connector_config({"hsx": {"output": str(tmp_path), "in_flight_bytes": 1 << 20, **given}})
    outlet = store_outlet(settings, _Config)
    try:
        assert len(pids()) == expected
    finally:
        outlet.close(10)


def test_a_store_that_replaces_the_sample_of_a_used_key_is_refused_at_start(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStore, "put_if_absent", lambda self, name, data: self.put(name, [data]))
    settings = read_connector_config({"hsx": {"output": str(tmp_path), "in_flight_bytes": 1 << 20}})
    with pytest.raises(ConfigError, match="got a store that replaces it"):
        store_outlet(settings, _Config)
    assert not pids()


def test_it_runs_where_its_starter_was_allowed_to_run_not_where_the_engine_is(tmp_path, monkeypatch):
    """vLLM pins the engine's thread to some cores, and processes started by that thread inherit them."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one core")
    monkeypatch.setattr("hsx_dist.transport.affinity.CORES", frozenset(allowed))
    os.sched_setaffinity(0, {min(allowed)})
    try:
        outlet = outlet_on(tmp_path, apart=True)
        try:
            assert os.sched_getaffinity(pid()) == allowed
        finally:
            outlet.close(10)
    finally:
        os.sched_setaffinity(0, allowed)


def memory_of(process: int, name: str) -> int:
    """``VmRSS`` or ``VmHWM`` (the peak) of a process, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def test_writers_hold_one_long_sample_at_a_time_and_free_its_memory(tmp_path):
    """A sample is one object, and the writers hold it whole. A second sample, or a copy that stays, would show."""
    tokens, width, pages, budget = 128, 1024, 48, 8 << 20
    outlet = outlet_on(tmp_path, apart=True, in_flight_bytes=budget)
    submit(outlet, "first", some())
    settle(outlet)
    process = pid()
    base = memory_of(process, "VmRSS")
    shape = (len(LAYERS), tokens, width)
    size = 4 * len(LAYERS) * tokens * width
    sample = pages * size
    assert sample == 48 << 20
    for number in range(4):
        segment = Segment(f"k{number}", 0, 0, pages * tokens, pages * tokens, source=f"r{number}:0")
        outlet.expect(Expect(f"r{number}", f"k{number}.safetensors", 0, True))
        while not outlet.admit(segment):
            outlet.ring.wait(1.0)
        for at in range(0, pages * tokens, tokens):
            while (offset := outlet.ring.allocate(size)) is None:
                outlet.ring.wait(1.0)
            outlet.memory[offset : offset + size].view(np.float32)[:] = at + 1
            ids = np.arange(at, at + tokens)
            ref = Page(segment, at, at + tokens, tokens, LAYERS, "float32", shape, "LTH", ids, offset=offset)
            outlet.submit((ref, None))
    settle(outlet)
    others = sample // 2  # stacks and free blocks of the allocator; a second sample would be larger
    assert memory_of(process, "VmHWM") - base < sample + budget + others
    end = time.monotonic() + 30
    # The memory of the last sample is freed after its event.
    while memory_of(process, "VmRSS") - base >= budget + others:
        assert time.monotonic() < end, "expected the last sample's memory to be freed"
        time.sleep(0.005)
    assert states_of(tmp_path, "k3")[0, -1, 0] == (pages - 1) * tokens + 1
    assert outlet.ring.claimed_bytes == 0
    outlet.close(10)
