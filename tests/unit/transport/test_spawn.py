"""A bare connector's writers in a process of their own: whatever dies, each sample is stored or told as lost."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import psutil
import pytest

import hsx_dist
from hsx_dist.connector.connector_config import read_connector_config
from hsx_dist.connector.object_writer import StoreOutlet, ThreadWriters, store_outlet
from hsx_dist.connector.step import Expect
from hsx_dist.errors import ConfigError, EngineError, SampleFailed
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.observe.metrics import Meter
from hsx_dist.page import Page, Segment
from hsx_dist.transport import channel
from hsx_dist.transport.channel import Peer, ReturnQueue
from hsx_dist.transport.remote_sender import RemoteSender
from hsx_dist.transport.writer_process import WriterProcessSpec, spawn
from hsx_dist.writers.events import Stored
from hsx_dist.writers.sink import SinkOptions
from tests.unit.connector.small_outlet import LAYERS, outlet_on, some, submit

ROOT = Path(__file__).parents[3]


@pytest.fixture
def outlet(tmp_path):
    made = outlet_on(tmp_path, apart=True)
    yield made
    made.close(10)


def settle(outlet: StoreOutlet) -> None:
    end = time.monotonic() + 60
    while outlet.pending:
        assert time.monotonic() < end, "neither stored nor told as lost"
        time.sleep(0.005)


def states_of(tmp_path, key: str) -> np.ndarray:
    found = hsx_dist.load_hidden_states(str(tmp_path / f"{key}.safetensors"), framework="numpy")
    return found["hidden_states"].transpose(1, 0, 2)


def pid_of(outlet: StoreOutlet) -> int:
    writers = outlet._writers
    assert isinstance(writers, RemoteSender)
    assert writers.pid is not None
    return writers.pid


def test_what_is_to_be_told_is_told_at_one_go_with_the_numbers_first(monkeypatch):
    monkeypatch.setattr(channel, "LINGER_S", 0.5)
    ours, theirs = Pipe()
    meter = Meter()
    with ours, theirs:
        teller = ReturnQueue(theirs, 100, meter)
        teller.took(10)
        meter.add("parts", 1)
        teller.free(place(7, 10))
        segment = Segment("k", 0, 0, 5, 5, source="r:0", metadata='{"long": 1}', meta={"a": 1})
        teller.event(Stored((segment,), "k.safetensors"))
        teller.close()
        stored = Stored((segment,), "k.safetensors")
        messages = ours.recv()
        assert messages == [("numbers", {("parts", ""): 1}), ("free", 7), ("event", stored)]
        told = messages[-1][1].segments[0]  # without what a client may have made long
        assert (told.source, told.metadata, told.meta) == ("r:0", "", {})
        assert not ours.poll()


def test_a_line_of_the_log_that_cannot_be_sent_is_sent_without_what_is_beside_its_words():
    ours, theirs = Pipe()
    with ours, theirs:
        teller = ReturnQueue(theirs, 100, Meter())
        handler = logging.handlers.QueueHandler(teller)
        line = {"name": "library", "msg": "slow: %s", "args": ("x",), "its": threading.Lock()}
        handler.handle(logging.makeLogRecord(line))
        teller.free(place(7, 2))
        messages = []
        while ("free", 7) not in messages:
            assert ours.poll(60)
            messages += ours.recv()
        (record,) = [what for kind, what in messages if kind == "log"]
        assert (record.name, record.getMessage()) == ("library", "slow: x")


def test_pages_whose_first_one_could_not_be_sent_cost_their_sample_alone(outlet, tmp_path):
    rows = some(4)
    offset = outlet.ring.allocate(rows.nbytes)
    segment = Segment("a", 0, 0, 8, 8, name="a.safetensors", source="r:0")
    ids = np.arange(4, dtype=np.int64)
    late = Page(segment, 4, 8, 4, LAYERS, "float32", rows.shape, "LTH", ids, offset=offset)
    outlet.expect(Expect("r", "a.safetensors", 0, True))
    with outlet._state:
        outlet._submitted["r"] = "a.safetensors"  # its first page was submitted
    outlet.submit((late, None))
    submit(outlet, "b", some())
    settle(outlet)
    assert outlet.ring.used_bytes == 0
    assert states_of(tmp_path, "b").shape == (2, 5, 8)
    with pytest.raises(SampleFailed, match="not all of its pages came"):
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"), wait=30)


def test_a_ring_that_is_half_full_gets_its_room_back_at_once(monkeypatch):
    monkeypatch.setattr(channel, "LINGER_S", 600)
    ours, theirs = Pipe()
    with ours, theirs:
        teller = ReturnQueue(theirs, 100, Meter())
        teller.took(90)
        teller.free(place(0, 20))
        assert ours.poll(60)
        assert ours.recv() == [("free", 0)]


def test_what_is_stored_is_what_was_sent_and_the_ring_goes_round(outlet, tmp_path):
    sent = {f"k{i}": some(seed=i) for i in range(200)}  # three times the ring
    for key, states in sent.items():
        while outlet.ring.used_bytes > outlet.ring.capacity // 2:
            time.sleep(0.001)
        submit(outlet, key, states)
    settle(outlet)
    assert outlet.ring.used_bytes == 0
    for key, states in sent.items():
        np.testing.assert_array_equal(states_of(tmp_path, key), states)
    counted = {name: value for (name, _), value in outlet.meter.sums().items()}
    assert counted["stored"] == counted["parts"] == counted["samples"] == 200
    assert counted["raw_bytes"] == sum(s.nbytes for s in sent.values())
    pid = pid_of(outlet)
    outlet.close(10)
    assert not psutil.pid_exists(pid)


def test_the_process_is_no_engines_equal_where_they_share_cores(outlet):
    assert psutil.Process(pid_of(outlet)).nice() > psutil.Process().nice()


def test_when_it_is_killed_its_samples_are_told_and_the_next_are_stored(outlet, tmp_path, caplog):
    pid = pid_of(outlet)
    os.kill(pid, signal.SIGSTOP)
    for i in range(3):
        submit(outlet, f"lost{i}", some(seed=i))
    while outlet.ring.used_bytes and outlet.end.pending:  # handed over
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    settle(outlet)
    assert outlet.ring.used_bytes == 0
    for i in range(3):
        with pytest.raises(SampleFailed, match="exit code -9"):
            states_of(tmp_path, f"lost{i}")
    assert "ended with exit code -9 and 3 samples" in caplog.text
    submit(outlet, "next", some(seed=9))
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "next"), some(seed=9))
    assert pid_of(outlet) != pid
    # The same request once more, as its client will try it.
    submit(outlet, "lost0", some(seed=0), request="again")
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "lost0"), some(seed=0))


def test_what_still_comes_of_a_sample_that_was_lost_joins_nothing(outlet, tmp_path):
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
    while outlet.ring.used_bytes:  # taken, and half of a segment
        time.sleep(0.001)
    assert outlet.pending
    os.kill(pid_of(outlet), signal.SIGKILL)
    settle(outlet)
    page(4)
    submit(outlet, "b", some())
    settle(outlet)
    assert outlet.ring.used_bytes == 0
    np.testing.assert_array_equal(states_of(tmp_path, "b"), some())
    with pytest.raises(SampleFailed, match="exit code -9"):
        states_of(tmp_path, "a")
    assert not outlet._writers._broken


def test_while_it_cannot_be_started_samples_fail_at_once(outlet, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    os.kill(pid_of(outlet), signal.SIGKILL)
    for i in range(2):
        submit(outlet, f"k{i}", some())
        settle(outlet)
        with pytest.raises(SampleFailed, match=r"exit code -9|does not run"):
            states_of(tmp_path, f"k{i}")
    monkeypatch.undo()
    outlet._writers._failed_at = None  # some seconds later
    submit(outlet, "c", some())
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "c"), some())


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
    starting = threading.Thread(target=sender._living)
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
def test_whom_it_tells_may_fail_and_the_rest_is_told(outlet, tmp_path, monkeypatch, caplog, error):
    tell = outlet._writers._on_event

    def fail_once(event) -> None:
        if event.segments[0].key == "a":
            raise error
        tell(event)

    monkeypatch.setattr(outlet._writers, "_on_event", fail_once)
    submit(outlet, "a", some())
    for i in range(100):  # more than the ring
        while outlet.ring.used_bytes > outlet.ring.capacity // 2:
            time.sleep(0.001)
        submit(outlet, f"k{i}", some(seed=i))
    end = time.monotonic() + 60
    while outlet.pending > 1:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert outlet.ring.used_bytes == 0
    np.testing.assert_array_equal(states_of(tmp_path, "k99"), some(seed=99))
    assert "could not be taken" in caplog.text
    outlet._submitted.clear()


class _Raising(logging.Handler):
    def emit(self, _: logging.LogRecord) -> None:
        raise OSError("disk full")


def test_a_log_handler_that_raises_costs_its_line(outlet, tmp_path):
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


def test_what_a_client_said_of_a_sample_of_several_pages_is_stored_with_it(outlet, tmp_path):
    states = np.concatenate([some(4), some(4, seed=1), some(2, seed=2)], axis=1)
    said = {"meta": {"user": {"id": 7}}, "attached": {"loss_mask": np.arange(10, dtype=np.int64) % 2}}
    segment = Segment("a", 0, 0, 10, 10, source="r:0", **said)
    outlet.expect(Expect("r", "a.safetensors", 0, True))
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        rows = np.ascontiguousarray(states[:, start:stop])
        offset = outlet.ring.allocate(rows.nbytes)
        outlet.memory[offset : offset + rows.nbytes] = rows.reshape(-1).view(np.uint8)
        ids = np.arange(start, stop, dtype=np.int64)
        outlet.submit((Page(segment, start, stop, 4, LAYERS, "float32", rows.shape, "LTH", ids, offset=offset), None))
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "a"), states)
    found = hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"), framework="numpy")
    assert found["meta"]["user"] == {"id": 7}
    assert found["loss_mask"].tolist() == [0, 1] * 5


def test_it_runs_nothing_of_the_folder_that_its_engine_was_started_in(tmp_path, monkeypatch):
    (tmp_path / "uuid.py").write_text("raise RuntimeError('not to be run')")
    monkeypatch.chdir(tmp_path)
    outlet = outlet_on(tmp_path, apart=True)
    submit(outlet, "a", some())
    settle(outlet)
    outlet.close(10)
    np.testing.assert_array_equal(states_of(tmp_path, "a"), some())


def test_what_is_told_slowly_does_not_keep_the_end(tmp_path):
    outlet = outlet_on(tmp_path, apart=True, drain_seconds=0.2)
    go = threading.Event()
    outlet._writers._on_event = lambda _: go.wait(60)
    submit(outlet, "a", some())
    pid = pid_of(outlet)
    began = time.monotonic()
    outlet.close(0.2)
    assert time.monotonic() - began < 30  # not the minute that whom it tells takes
    assert not psutil.pid_exists(pid)
    go.set()


def test_signals_to_the_servers_process_group_do_not_end_it_before_its_engine(outlet, tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid_of(outlet), number)
    submit(outlet, "a", some())
    settle(outlet)
    np.testing.assert_array_equal(states_of(tmp_path, "a"), some())


DYING = """
import os, signal, sys, time
from pathlib import Path
from tests.unit.connector.small_outlet import outlet_on, some, submit
if __name__ == "__main__":
    outlet = outlet_on(Path(sys.argv[1]), apart=True, drain_seconds=30)
    pid = outlet._writers.pid
    os.kill(pid, signal.SIGSTOP)
    for i in range(3):
        submit(outlet, f"k{i}", some(seed=i))
    while outlet.end.pending:
        time.sleep(0.001)
    os.kill(pid, signal.SIGCONT)
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_stores_what_it_has_when_the_engine_is_killed_and_ends(tmp_path):
    script = [sys.executable, "-c", DYING, str(tmp_path)]
    ended = subprocess.run(script, cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    pid = int(ended.stdout)
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it outlives its engine"
        time.sleep(0.02)
    for i in range(3):
        np.testing.assert_array_equal(states_of(tmp_path, f"k{i}"), some(seed=i))


def test_the_end_is_not_waited_for_longer_than_asked(tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        outlet = outlet_on(
            tmp_path,
            apart=True,
            output="s3://bucket/run",
            storage_options={
                "key": "any",
                "secret": "not-to-be-seen",
                "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "client_kwargs": {"region_name": "us-east-1"},
            },
        )
        pid = pid_of(outlet)
        assert "not-to-be-seen" not in " ".join(psutil.Process(pid).cmdline())
        assert "not-to-be-seen" not in str(psutil.Process(pid).environ())
        submit(outlet, "a", some())
        outlet.close(0.3)
    assert "1 requests were not stored in time" in caplog.text
    assert not psutil.pid_exists(pid)


def test_its_log_lines_are_the_engines(outlet, caplog):
    states = some()
    states[0, 1, 1] = np.nan
    with caplog.at_level(logging.WARNING):
        submit(outlet, "strange", states)
        settle(outlet)
    [line] = [r for r in caplog.records if "look wrong" in r.getMessage()]
    assert line.name == "hsx_dist.writers.sink"
    assert line.key == "strange"


def rings() -> int:
    """Descriptors of rings that this process has open."""
    return sum("hsx-ring" in os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry))  # noqa: PTH115


def place(offset: int, nbytes: int) -> Page:
    """A page of so many bytes, which is all that counts of it."""
    segment = Segment("k", 0, 0, 1, 1)
    return Page(segment, 0, 1, 1, (1,), "float16", (1, 1, nbytes // 2), "LTH", np.zeros(1, np.int64), offset=offset)


def sender_of(spec: WriterProcessSpec, connect=spawn) -> RemoteSender:
    return RemoteSender(partial(connect, spec), spec.ring_bytes, print, Meter())


def spec(tmp_path, **changes) -> WriterProcessSpec:
    options = SinkOptions(resolve_codec("none"), {"model": "m"}, "worker", layout="sample")
    return replace(WriterProcessSpec(str(tmp_path), {}, options, 1, 1 << 20, 4.0), **changes)


def test_what_keeps_it_from_starting_is_an_error_that_says_it(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="without credentials"):
        sender_of(spec(tmp_path, url="s3://user:word@bucket/x"))
    monkeypatch.setattr("sys.executable", "/bin/false")
    before = rings()
    with pytest.raises(EngineError, match=r"exit code 1 .*\. Set hsx.transport to 'inline'"):
        sender_of(spec(tmp_path))
    assert rings() == before


class _Config:
    """Of vLLM's, what an outlet asks."""

    class model_config:  # noqa: N801
        model, revision, skip_tokenizer_init, hf_text_config = "m", None, True, None


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, RemoteSender), ({"transport": "inline"}, ThreadWriters), ({"output": "memory://hsx-apart"}, ThreadWriters)],
)
def test_which_writers_a_bare_connector_has(tmp_path, given, expected):
    settings = read_connector_config({"hsx": {"output": str(tmp_path), "in_flight_bytes": 1 << 20, **given}})
    outlet = store_outlet(settings, _Config)
    try:
        assert type(outlet._writers) is expected
    finally:
        outlet.close(10)


def test_it_runs_where_its_starter_was_allowed_to_run_not_where_the_engine_is(tmp_path, monkeypatch):
    """vLLM pins the engine's thread to cores of its choice, and what is started from it inherits them."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one core")
    monkeypatch.setattr("hsx_dist.transport.affinity.CORES", frozenset(allowed))
    os.sched_setaffinity(0, {min(allowed)})
    try:
        outlet = outlet_on(tmp_path, apart=True)
        try:
            assert os.sched_getaffinity(pid_of(outlet)) == allowed
        finally:
            outlet.close(10)
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_page_that_cannot_be_sent_or_read_costs_its_sample_alone(outlet, tmp_path, monkeypatch):
    """All of them in one call, as the shipping thread makes it."""
    refs = []
    for key in ("a", "bad", "c", "bad-shape"):
        rows = some(4)
        offset = outlet.ring.allocate(rows.nbytes)
        outlet.memory[offset : offset + rows.nbytes] = rows.reshape(-1).view(np.uint8)
        attached = {"x": lambda: None} if key == "bad" else {}
        segment = Segment(key, 0, 0, 4, 4, source=f"{key}:0", attached=attached)
        ids = np.arange(4, dtype=np.int64)
        refs.append(Page(segment, 0, 4, 4, LAYERS, "float32", rows.shape, "LTH", ids, offset=offset))
        outlet.expect(Expect(key, f"{key}.safetensors", 0, True))
    whole = Page.detached

    def detached(page: Page) -> Page:
        sent = whole(page)
        return replace(sent, shape=(1 << 20, 1 << 20, 1)) if page.segment.key == "bad-shape" else sent

    monkeypatch.setattr(Page, "detached", detached)
    outlet.submit(*[(ref, None) for ref in refs])
    submit(outlet, "later", some())
    settle(outlet)
    for key in ("a", "c", "later"):
        assert states_of(tmp_path, key).shape[0] == 2
    for key, why in (("bad", "cannot be passed on"), ("bad-shape", "cannot be read")):
        with pytest.raises(SampleFailed, match=why):
            hsx_dist.load_hidden_states(str(tmp_path / f"{key}.safetensors"), wait=30)


def memory_of(pid: int, name: str) -> int:
    """``VmRSS`` or ``VmHWM`` (the peak) of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def test_of_long_samples_the_writers_hold_one_and_keep_nothing_of_it(tmp_path):
    """A sample is one object: the writers hold it whole. Two at once, or what is kept of one, would show."""
    tokens, width, pages, budget = 128, 1024, 48, 8 << 20
    outlet = outlet_on(tmp_path, apart=True, in_flight_bytes=budget)
    submit(outlet, "first", some())
    settle(outlet)
    pid = pid_of(outlet)
    base = memory_of(pid, "VmRSS")
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
    assert memory_of(pid, "VmHWM") - base < sample + budget + (16 << 20)
    end = time.monotonic() + 30
    while memory_of(pid, "VmRSS") - base >= budget + (
        16 << 20
    ):  # the memory of the last sample is freed after its event
        assert time.monotonic() < end, "what the last sample took is kept"
        time.sleep(0.005)
    assert states_of(tmp_path, "k3")[0, -1, 0] == (pages - 1) * tokens + 1
    assert outlet.ring.claimed_bytes == 0
    outlet.close(10)
