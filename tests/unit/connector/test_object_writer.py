"""A bare connector's outlet: every expected request is stored or gets a marker with a reason, in all store failures."""

from __future__ import annotations

import fcntl
import json
import pickle
import sys
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

import hsx_dist
from hsx_dist.connector.connector_config import read_connector_config
from hsx_dist.connector.object_writer import StoreOutlet, ThreadWriters
from hsx_dist.connector.point_copier import hidden_states_in
from hsx_dist.connector.step import Expect, Save, Skip, Step
from hsx_dist.connector.worker import WorkerHalf
from hsx_dist.errors import Denied, NotFound, SampleFailed
from hsx_dist.page import Page, Segment
from hsx_dist.store import open_store
from hsx_dist.testing.faulty_stores import PUTS, CountingStore, FailingStore, HangingStore, Strike
from hsx_dist.testing.stores import MemoryStore
from hsx_dist.writers.sink import PartSink
from tests.harness.traced_memory import trace_memory
from tests.unit.connector.small_outlet import HIDDEN, LAYERS, outlet_on, some, submit


def test_stored_in_vllms_schema_with_its_own_loader(tmp_path):
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllms

    outlet = outlet_on(tmp_path)
    states = some()
    submit(outlet, "a", states, meta={"tokens": {"start": 0, "step": 2, "of": 9}})
    path = str(tmp_path / "a.safetensors")
    theirs = vllms.load_hidden_states(path)  # waits for the lock until the object exists
    assert set(theirs) == {"hidden_states", "token_ids"}
    np.testing.assert_array_equal(theirs["hidden_states"].numpy(), states.transpose(1, 0, 2))
    assert theirs["token_ids"].tolist() == [0, 1, 2, 3, 4]
    run = hsx_dist.load_hidden_states(path, framework="numpy")
    np.testing.assert_array_equal(run["hidden_states"], states.transpose(1, 0, 2))
    outlet.close()
    vllms.cleanup_hidden_states(path)
    assert list(tmp_path.iterdir()) == []


def test_a_skipped_request_leaves_a_marker_and_no_lock(tmp_path):
    outlet = outlet_on(tmp_path)
    outlet.expect(Expect("r", "a.safetensors", 0, True))
    outlet.skip(Skip("r", "a", "a.safetensors", 0, "expected 9 computed tokens, got 3"))
    outlet.expect(Expect("s", "b.safetensors", 0, True))
    outlet.skip(Skip("s", "b", "b.safetensors", 0, "the request set hidden_states_save to false", quiet=True))
    outlet.close()
    assert [p.name for p in tmp_path.iterdir()] == ["a.error.json"]
    started = time.monotonic()
    with pytest.raises(SampleFailed, match="expected 9 computed tokens, got 3"):
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"), wait=60)
    assert time.monotonic() - started < 30  # immediately, not after the wait


def test_a_key_used_again_for_other_tokens_is_a_conflict_and_replaces_nothing(tmp_path):
    outlet = outlet_on(tmp_path)
    first = some()
    submit(outlet, "a", first)
    outlet.close()
    outlet = outlet_on(tmp_path)  # another server, which remembers nothing
    submit(outlet, "a", some(seed=1), ids=[9, 9, 9, 9, 9])
    outlet.close()
    with pytest.raises(SampleFailed, match="the key 'a' was used before for another sample"):
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"))
    marker = tmp_path / "a.safetensors.conflict.json"
    assert str(tmp_path) not in marker.read_text()  # a server's clients read the reason
    marker.unlink()
    np.testing.assert_array_equal(
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"), framework="numpy")["hidden_states"],
        first.transpose(1, 0, 2),
    )


def test_storing_the_same_sample_again_succeeds_and_removes_an_old_marker(tmp_path):
    (tmp_path / "a.error.json").write_text(json.dumps({"key": "a", "error": "before"}))
    for _ in range(2):
        outlet = outlet_on(tmp_path)
        submit(outlet, "a", some())
        outlet.close()
    assert hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"))["hidden_states"].shape == (5, 2, HIDDEN)


def test_a_path_that_the_client_chose_is_replaced(tmp_path):
    for seed in (0, 1):
        outlet = outlet_on(tmp_path)
        submit(outlet, "sub/x", some(seed=seed), name="sub/x.bin", ids=[seed] * 5)
        outlet.close()
    part = open_store(str(tmp_path)).get("sub/x.bin")
    assert len(part) > 0
    assert (tmp_path / "sub/x.bin.lock").exists()


def test_a_store_that_refuses_fails_its_samples_alone(tmp_path, caplog):
    """After a terminal failure the ring and the locks are freed, the keys are marked, and later requests are stored."""
    stored = MemoryStore()
    outlet = outlet_on(tmp_path, store=FailingStore(stored, Denied("not allowed"), Strike(PUTS, times=3)))
    for i in range(5):
        submit(outlet, f"k{i}", some(seed=i))
        while outlet.pending:
            time.sleep(0.005)
    assert outlet.ring.used_bytes == 0
    outlet.close()
    for i in range(5):
        if i < 3:
            with pytest.raises(SampleFailed, match="Denied: the sample could not be stored") as failed:
                hsx_dist.load_hidden_states(str(tmp_path / f"k{i}.safetensors"))
            assert "not allowed" not in str(failed.value)  # a server's clients read the reason
    assert "not allowed" in caplog.text
    assert sorted(stored.objects) == ["k3.safetensors", "k4.safetensors"]
    counts = {name: value for (name, _), value in outlet.meter.sums().items()}
    assert (counts["stored"], counts["failed"], counts["samples"]) == (2, 3, 5)
    assert outlet.meter.sums()["failed_parts", "Denied"] == 3
    assert counts["puts"] == 5


@pytest.mark.parametrize("policy", ["flag", "fail"])
def test_states_that_cannot_be_right_are_flagged_or_refused(tmp_path, policy):
    outlet = outlet_on(tmp_path, on_bad_rows=policy)
    states = some()
    states[1] = 0
    states[0, 3, 1] = np.nan
    submit(outlet, "a", states)
    outlet.close()
    path = str(tmp_path / "a.safetensors")
    if policy == "fail":
        with pytest.raises(SampleFailed, match="on_bad_rows"):
            hsx_dist.load_hidden_states(path)
    else:
        data = hsx_dist.load_hidden_states(path)
        assert data["meta"]["bad"] == [{"start": 0, "stop": 5, "nonfinite_rows": {"1": 1}, "zero_layers": [2]}]


def test_closing_waits_no_longer_than_its_time_limit(tmp_path):
    hanging = HangingStore(MemoryStore(), Strike(PUTS))
    outlet = outlet_on(tmp_path, store=hanging)
    submit(outlet, "a", some())
    outlet.close(0.2)
    assert outlet.pending == 1
    hanging.release()


def test_readers_of_a_key_by_the_answer_of_its_second_use_get_the_conflict(tmp_path):
    """At no moment a reader gets the first sample as the second: the lock is held until the marker exists."""
    hanging = HangingStore(open_store(str(tmp_path)), Strike(PUTS, prefix="a.safetensors.conflict"))
    outlet = outlet_on(tmp_path, markers=hanging)
    submit(outlet, "a", some())
    path = str(tmp_path / "a.safetensors")
    assert hsx_dist.load_hidden_states(path, wait=30)["hidden_states"].shape == (5, 2, HIDDEN)
    outlet.skip(Skip("b", "a", "a.safetensors", 0, "the key 'a' was used before", conflict=True))
    outlet.prepared()
    with pytest.raises(NotFound, match=r"a\.safetensors\.lock"):
        hsx_dist.load_hidden_states(path)
    assert outlet.pending
    hanging.release()
    with pytest.raises(SampleFailed, match="used before"):
        hsx_dist.load_hidden_states(path, wait=30)
    # A third request, for the first sample again, does not remove the marker. Neither does a failed request.
    submit(outlet, "a", some(), request="c")
    outlet.skip(Skip("d", "a", "a.safetensors", 0, "aborted"))
    outlet.close()
    with pytest.raises(SampleFailed, match="used before"):
        hsx_dist.load_hidden_states(path)


def test_a_path_that_is_used_again_is_not_read_before_it_is_replaced(tmp_path):
    outlet = outlet_on(tmp_path)
    path = str(tmp_path / "x.safetensors")
    submit(outlet, "x", some(seed=0), name="x.safetensors", request="r0")
    hsx_dist.load_hidden_states(path, wait=30)
    with (tmp_path / "x.safetensors.lock").open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)  # a reader still reads the old object when the next request is scheduled
        outlet.expect(Expect("r1", "x.safetensors", 0, True))
        outlet.prepared()
        with pytest.raises(NotFound, match="lock"):
            hsx_dist.load_hidden_states(path)
    states = some(seed=1)
    submit(outlet, "x", states, name="x.safetensors", request="r1")
    data = hsx_dist.load_hidden_states(path, wait=30, framework="numpy")
    np.testing.assert_array_equal(data["hidden_states"], states.transpose(1, 0, 2))
    outlet.close()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_request_that_ends_early_does_not_harm_another_of_its_key(tmp_path, quiet):
    hanging = HangingStore(open_store(str(tmp_path)), Strike(PUTS))
    outlet = outlet_on(tmp_path, store=hanging)
    submit(outlet, "a", some())
    assert hanging.hanging.wait(30)
    outlet.skip(Skip("b", "a", "a.safetensors", 0, "expected 9 computed tokens, got 0", quiet=quiet))
    path = str(tmp_path / "a.safetensors")
    with pytest.raises(NotFound, match="lock"):  # still held, and no failure is reported
        hsx_dist.load_hidden_states(path)
    hanging.release()
    assert hsx_dist.load_hidden_states(path, wait=30)["hidden_states"].shape == (5, 2, HIDDEN)
    outlet.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "a.safetensors.lock"]


def test_the_last_failed_request_of_a_key_writes_the_marker(tmp_path):
    outlet = outlet_on(tmp_path)
    for request in "rs":
        outlet.expect(Expect(request, "a.safetensors", 0, True))
    outlet.prepared()
    outlet.skip(Skip("r", "a", "a.safetensors", 0, "expected 9 computed tokens, got 3"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors.lock"]
    outlet.skip(Skip("s", "a", "a.safetensors", 0, "the request set hidden_states_save to false", quiet=True))
    outlet.close()
    assert [p.name for p in tmp_path.iterdir()] == ["a.error.json"]


@pytest.mark.parametrize(("name", "kept"), [("x.bin", False), ("x.safetensors", True)])
def test_a_late_failure_at_a_path_does_not_hide_the_object_of_a_later_request(tmp_path, name, kept):
    outlet = outlet_on(tmp_path)
    for request in ("early", "late"):
        outlet.expect(Expect(request, name, 0, True))
    outlet.prepared()
    submit(outlet, "x", some(), name=name, request="late")
    while outlet.ring.used_bytes or "late" in outlet._requests:
        time.sleep(0.005)
    outlet.skip(Skip("early", "x", name, 0, "expected 9 computed tokens, got 3"))
    outlet.skip(Skip("other", "y", "y.bin", 0, "expected 9 computed tokens, got 3"))
    outlet.close()
    markers = {"x.error.json"} if kept else set()  # the marker of a key hides no stored object
    assert {p.name for p in tmp_path.iterdir() if "lock" not in p.name} == {name, "y.bin.failed.json"} | markers


def test_ordinary_requests_ask_the_store_nothing_before_their_sample_is_stored(tmp_path):
    counting = CountingStore(open_store(str(tmp_path)))
    outlet = outlet_on(tmp_path, markers=counting)
    for i in range(20):
        outlet.expect(Expect(f"r{i}", f"k{i}.safetensors", 0, True))
    assert not outlet.pending
    submit(outlet, "k", some(), chosen=False)
    hsx_dist.load_hidden_states(str(tmp_path / "k.safetensors"), wait=30)
    assert not counting.calls
    submit(outlet, "k3", some(), request="r3")
    outlet.close()
    assert counting.calls == {"get": 1}


def test_markers_count_as_pending_and_closing_waits_no_longer_than_its_time_limit(tmp_path, caplog):
    hanging = HangingStore(open_store(str(tmp_path)), Strike(PUTS))
    outlet = outlet_on(tmp_path, markers=hanging)
    for i in range(20):
        outlet.skip(Skip(f"r{i}", f"k{i}", f"k{i}.safetensors", 0, "aborted"))
    assert hanging.hanging.wait(30)
    started = time.monotonic()
    with caplog.at_level("ERROR"):
        outlet.close(0.2)
    assert time.monotonic() - started < 10
    assert outlet.pending >= 20
    assert "markers of 20 names were not stored in time" in caplog.text
    hanging.release()


@pytest.mark.traced
def test_failed_requests_of_one_key_do_not_affect_other_keys(tmp_path, caplog):
    caplog.set_level("ERROR", "hsx_dist")  # log lines would count as memory
    hanging = HangingStore(open_store(str(tmp_path)), Strike(PUTS, prefix="a."))
    outlet = outlet_on(tmp_path, markers=hanging)
    submit(outlet, "a", some(), meta={"identity": {"request": "0" * 32, "tokens": ""}})
    while outlet.pending:
        time.sleep(0.002)

    def fail(i: int) -> None:
        outlet.expect(Expect(f"r{i}", "a.safetensors", 0, True, f"{i:032x}"))
        outlet.prepared()
        outlet.skip(Skip(f"r{i}", "a", "a.safetensors", 0, "aborted", request=f"{i:032x}"))

    for i in range(1, 50):
        fail(i)
    assert hanging.hanging.wait(30)
    trace_memory()
    for i in range(50, 1000):
        fail(i)
    grown = tracemalloc.get_traced_memory()[0]
    assert grown < 50_000
    submit(outlet, "b", some())
    assert hsx_dist.load_hidden_states(str(tmp_path / "b.safetensors"), wait=30)["key"] == "b"
    with pytest.raises(NotFound, match="lock"):
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"))
    hanging.release()
    with pytest.raises(SampleFailed, match="used before"):
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"), wait=30)
    outlet.close()


def test_a_name_that_the_file_system_refuses_does_not_block_a_step(tmp_path):
    outlet = outlet_on(tmp_path)
    for name in ("x" * 300, "a\ud800", "a\x00b"):
        outlet.expect(Expect(name, name, 0, True))
    outlet.close(1)


def test_names_with_and_without_suffix_have_different_markers(tmp_path):
    outlet = outlet_on(tmp_path)
    submit(outlet, "foo", some(), name="foo.safetensors")
    outlet.skip(Skip("r", "foo", "foo", 0, "aborted"))
    outlet.close()
    assert hsx_dist.load_hidden_states(str(tmp_path / "foo.safetensors"))["key"] == "foo"
    with pytest.raises(SampleFailed, match="aborted"):
        hsx_dist.load_hidden_states(str(tmp_path / "foo"))
    assert (tmp_path / "foo.failed.json").exists()


def test_the_same_tokens_under_another_adapter_are_another_sample(tmp_path):
    for adapter in ("a", "b"):
        outlet = outlet_on(tmp_path)
        submit(outlet, "k", some(), meta={"lora": adapter})
        outlet.close()
    with pytest.raises(SampleFailed, match="was used before for another sample"):
        hsx_dist.load_hidden_states(str(tmp_path / "k.safetensors"))


def test_a_failed_copy_of_a_page_is_reported_to_waiting_readers(tmp_path):
    outlet = outlet_on(tmp_path)

    def fail() -> None:
        raise RuntimeError("device lost")

    submit(outlet, "a", some(), ready=fail)
    submit(outlet, "b", some())
    outlet.close(60)
    assert outlet.pending == 0
    assert outlet.meter.sums()["failed", ""] == 1
    assert {p.name for p in tmp_path.iterdir()} >= {"a.error.json", "b.safetensors"}
    assert not (tmp_path / "a.safetensors").exists()
    with pytest.raises(SampleFailed, match="device lost"):
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"), wait=60)
    assert outlet.ring.used_bytes == 0


class OnceMoreWriters(ThreadWriters):
    """Copies each segment once more in memory, as a writer process would."""

    def send(self, pages, release):
        for page in pages:
            copy = replace(page, segment=pickle.loads(pickle.dumps(page.segment)))
            super().send([copy], lambda _, page=page: release(page))


@pytest.mark.traced
def test_metadata_of_waiting_samples_takes_no_memory_outside_the_ring(tmp_path):
    budget, n = 8 << 20, 400
    settings = read_connector_config({"hsx": {"output": str(tmp_path), "in_flight_bytes": budget}})
    hanging = HangingStore(open_store(str(tmp_path)), Strike(PUTS, times=10**9))
    outlet = StoreOutlet(
        lambda options, on_event, meter, _: OnceMoreWriters(PartSink(hanging, options, on_event, meter), 2),
        settings,
        {"model": "m", "revision": None, "norm": "pre"},
        markers=open_store(str(tmp_path)),
    )
    cache = torch.randn(n, 2, 4, 8)
    worker = WorkerHalf([hidden_states_in(cache, (1, 2))], outlet, page_bytes=1 << 20, segment_bytes=sys.maxsize)
    saves = [
        Save(f"r{i}", f"k{i}", np.arange(1), np.array([i]), 0, metadata=json.dumps({"x": f"{i}".ljust(65000)}))
        for i in range(n)
    ]
    expected = [Expect(f"r{i}", f"k{i}.safetensors", 0, chosen=True) for i in range(n)]
    trace_memory()
    worker.begin(Step(expected=expected))
    worker.step(Step(saves=saves))
    assert hanging.hanging.wait(60)
    for _ in range(20):
        worker.step(Step(idle=True))
    grown = tracemalloc.get_traced_memory()[0]
    assert worker.blocks_held > n - 20  # vLLM's scheduler waits for free blocks
    assert outlet.ring.claimed_bytes <= settings.sample_bytes
    assert grown < settings.encoded_bytes + 2 * settings.sample_bytes
    hanging.release()
    while worker.pending:
        worker.step(Step(idle=True))
        worker.finished()
    outlet.close(60)
    assert len(list(tmp_path.glob("*.safetensors"))) == n
    assert outlet.ring.claimed_bytes == 0


@pytest.mark.traced
@pytest.mark.parametrize("metadata", ["", "y" * 65000, "\U0001f600" * 16000])
def test_a_sample_takes_no_more_memory_than_it_is_counted_with(tmp_path, metadata):
    """The memory of both processes: the objects of a hundred one-token samples that wait for a store."""
    n = 100
    hanging = HangingStore(open_store(str(tmp_path)), Strike(PUTS, times=10**9))
    settings = read_connector_config({"hsx": {"output": str(tmp_path), "in_flight_bytes": 160 << 20}})
    memory = np.ones(80 << 20, np.uint8)

    def make(options, on_event, meter, _):
        made = OnceMoreWriters(PartSink(hanging, options, on_event, meter), 2)
        made.memory = memory
        return made

    outlet = StoreOutlet(make, settings, {"model": "m", "revision": None, "norm": "pre"}, markers=hanging)
    submit(outlet, "first", some(1))
    assert hanging.hanging.wait(60)
    trace_memory()
    for i in range(n):
        text = json.dumps({"x": f"{metadata}{i}"}, ensure_ascii=False) if metadata else ""
        segment = Segment(f"k{i}", 0, 0, 1, 1, source=f"r{i}:0", metadata=text, meta={"prompt_tokens": i})
        assert outlet.admit(segment)
        outlet.expect(Expect(f"r{i}", f"k{i}.safetensors", 0, chosen=True))
        offset = outlet.ring.allocate(64)
        outlet.submit(
            (Page(segment, 0, 1, 1, LAYERS, "float32", (2, 1, 8), "LTH", np.zeros(1, int), offset=offset), None)
        )
        del segment, text
    while outlet.ring.used_bytes:
        outlet.ring.wait(1.0)
    # The ring is freed before the threads drop their last pages.
    end = time.monotonic() + 30
    while (grown := tracemalloc.get_traced_memory()[0]) >= 2 * outlet.ring.claimed_bytes:
        assert time.monotonic() < end, (grown, *tracemalloc.take_snapshot().statistics("lineno")[:10])
        time.sleep(0.05)
    hanging.release()
    outlet.close(60)


def test_a_marker_that_the_store_refuses_keeps_no_memory_that_others_need(tmp_path):
    """Names below an object: the store accepts neither the objects nor their markers."""
    outlet = outlet_on(tmp_path)
    submit(outlet, "a", some(1), name="a")
    for i in range(20):
        segment = Segment(f"k{i}", 0, 0, 1, 1, name=f"a/{i}", source=f"r{i}:0", metadata='"' + "y" * 60000 + '"')
        end = time.monotonic() + 30
        while not outlet.admit(segment):
            assert time.monotonic() < end
            outlet.ring.wait(0.1)
        outlet.expect(Expect(f"r{i}", f"a/{i}", 0, chosen=True))
        offset = outlet.ring.allocate(64)
        outlet.submit(
            (Page(segment, 0, 1, 1, LAYERS, "float32", (2, 1, 8), "LTH", np.zeros(1, int), offset=offset), None)
        )
    outlet.close(5)
    assert outlet.ring.claimed_bytes == 0
