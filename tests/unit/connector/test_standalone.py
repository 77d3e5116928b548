"""A bare connector's outlet: every request that was expected is stored, or told why not, whatever the store does."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

import hsx_dist
from hsx_dist.connector.locks import CompanionLocks
from hsx_dist.connector.metadata import Expect, Skip
from hsx_dist.connector.outlet import PageRef
from hsx_dist.connector.settings import read_settings
from hsx_dist.connector.standalone import StoreOutlet
from hsx_dist.errors import Denied, SampleFailed
from hsx_dist.page import Segment
from hsx_dist.store import open_store
from hsx_dist.testing.faulty_stores import PUTS, FailingStore, HangingStore, Strike
from hsx_dist.testing.stores import MemoryStore

HIDDEN, LAYERS = 8, (1, 2)


def outlet_on(tmp_path, *, store=None, locks=True, **settings) -> StoreOutlet:
    extra = {"hsx": {"output": str(tmp_path), "in_flight_bytes": 1 << 20, "segment_bytes": 1 << 18, **settings}}
    return StoreOutlet(
        store or open_store(str(tmp_path)),
        read_settings(extra),
        {"model": "m", "revision": None, "norm": "pre"},
        markers=open_store(str(tmp_path)),
        locks=CompanionLocks(tmp_path) if locks else None,
    )


def submit(
    outlet: StoreOutlet, key: str, states: np.ndarray, ids=None, *, name="", chosen=True, meta=None, request=""
) -> None:
    """``states``: float32 ``[L, T, H]``, as one page."""
    n = states.shape[1]
    outlet.expect(Expect(request or key, name or f"{key}.safetensors", 0, chosen))
    offset = outlet.ring.allocate(states.nbytes)
    assert offset is not None
    outlet.memory[offset : offset + states.nbytes] = states.reshape(-1).view(np.uint8)
    segment = Segment(key, 0, 0, n, n, name=name, meta=meta or {}, source=f"{request or key}:0")
    ids = np.arange(n, dtype=np.int64) if ids is None else np.asarray(ids, np.int64)
    outlet.submit(PageRef(offset, states.shape, segment, 0, n, n, LAYERS, "float32", "LTH", ids), None)


def some(n=5, seed=0):
    return np.random.default_rng(seed).standard_normal((len(LAYERS), n, HIDDEN)).astype(np.float32)


def test_stored_in_vllms_schema_with_its_own_loader(tmp_path):
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as vllms

    outlet = outlet_on(tmp_path)
    states = some()
    submit(outlet, "a", states, meta={"tokens": {"start": 0, "step": 2, "of": 9}})
    path = str(tmp_path / "a.safetensors")
    theirs = vllms.load_hidden_states(path)  # sleeps on the lock until the object is there
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
    outlet.skip(Skip("r", "a", "a.safetensors", 0, "computed 3 of 9 tokens"))
    outlet.expect(Expect("s", "b.safetensors", 0, True))
    outlet.skip(Skip("s", "b", "b.safetensors", 0, "the request asked for none", quiet=True))
    outlet.close()
    assert [p.name for p in tmp_path.iterdir()] == ["a.error.json"]
    started = time.monotonic()
    with pytest.raises(SampleFailed, match="3 of 9"):
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"), wait=60)
    assert time.monotonic() - started < 30  # at once, not after the wait


def test_the_same_key_with_other_tokens_is_told_to_both_and_replaces_nothing(tmp_path):
    outlet = outlet_on(tmp_path)
    first = some()
    submit(outlet, "a", first)
    outlet.close()
    outlet = outlet_on(tmp_path)  # another server, which remembers nothing
    submit(outlet, "a", some(seed=1), ids=[9, 9, 9, 9, 9])
    outlet.close()
    with pytest.raises(SampleFailed, match="another sample of that key"):
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"))
    (tmp_path / "a.error.json").unlink()
    np.testing.assert_array_equal(
        hsx_dist.load_hidden_states(str(tmp_path / "a.safetensors"), framework="numpy")["hidden_states"],
        first.transpose(1, 0, 2),
    )


def test_the_same_sample_again_is_fine_and_clears_an_old_marker(tmp_path):
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


def test_a_store_that_refuses_costs_its_samples_and_nothing_else(tmp_path):
    """Terminal failure: ring and locks come free, the keys are marked, and what comes later is stored."""
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
            with pytest.raises(SampleFailed, match="Denied"):
                hsx_dist.load_hidden_states(str(tmp_path / f"k{i}.safetensors"))
    assert sorted(stored.objects) == ["k3.safetensors", "k4.safetensors"]
    counts = outlet.counts.take()
    assert (counts["stored"], counts["failed"], counts["samples"]) == (2, 3, 5)


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


def test_the_end_is_not_waited_for_longer_than_asked(tmp_path):
    hanging = HangingStore(MemoryStore(), Strike(PUTS))
    outlet = outlet_on(tmp_path, store=hanging)
    submit(outlet, "a", some())
    outlet.close(0.2)
    assert outlet.pending == 1
    hanging.release()


def test_what_a_sender_could_not_pass_on_is_told_and_its_room_comes_free():
    from hsx_dist.connector.outlet import LocalOutlet

    class BrokenSender:
        def send(self, pages, release):
            release(pages[0])
            raise RuntimeError("the object store is full")

        def flush(self): ...
        def close(self): ...

    told = []
    outlet = LocalOutlet(BrokenSender(), 1 << 20, told.append)
    for key in "ab":
        submit(outlet, key, some())
    outlet.close()
    assert [s.key for s in told] == ["a", "b"]
    assert all("object store is full" in s.reason for s in told)
    assert outlet.ring.used_bytes == 0
