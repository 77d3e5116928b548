"""A key stands for one sample on all servers: the scheduler, the writers and the markers agree which one."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import threading
import time
from contextlib import suppress
from itertools import permutations

import numpy as np
import pytest
from vllm.v1.request import RequestStatus

from hsx_dist.connector.failure_markers import Markers
from hsx_dist.errors import Denied, FormatError, SampleFailed
from hsx_dist.format.codecs import CODECS, resolve_codec
from hsx_dist.format.container import Part, SegmentEncoder, build_part, with_expires
from hsx_dist.format.identity import identity_hash
from hsx_dist.page import Page, Segment
from hsx_dist.reading.load import _sample_in_object, load_object
from hsx_dist.store import open_store
from hsx_dist.testing.faulty_stores import FailingStore, Strike, WrappedStore
from hsx_dist.testing.stores import MemoryStore
from hsx_dist.writers import committer
from tests.unit.connector.small_server import SmallServer

NAME = "k.safetensors"
PROMPT = [1, 2, 3, 4, 5, 6]

#: Parameters with ``PROMPT``, and the change in another request of the key. Stored token ids stay equal if possible.
OTHERS = {
    "mean": ({"tokens": "mean"}, {"prompt": [9, 2, 3, 4, 5, 6]}),
    "last": ({"tokens": "last"}, {"prompt": [9, 2, 3, 4, 5, 6]}),
    "range": ({"tokens": [1, 3]}, {"prompt": [9, 2, 3, 4, 5, 6]}),
    "a longer range": ({"tokens": [1, 3]}, {"tokens": [1, 4]}),
    "a tail that is not stored": ({"tokens": [1, 3]}, {"prompt": [1, 2, 3, 4, 5, 9]}),
    "stride": ({"tokens": "stride:2"}, {"prompt": [1, 9, 3, 4, 5, 6]}),
    "selected by a mask": (
        {"tokens": "loss_mask", "loss_mask": [0, 0, 0, 1, 1, 1]},
        {"prompt": [9, 2, 3, 4, 5, 6]},
    ),
    "another mask": ({"loss_mask": [1, 1, 0, 0, 1, 1]}, {"loss_mask": [1, 1, 0, 0, 1, 0]}),
    "no mask": ({"loss_mask": [1, 1, 0, 0, 1, 1]}, {"loss_mask": None}),
    "another attached array": (
        {"tokens": [0, 4], "loss_mask": [1, 1, 0, 0, 1, 1]},
        {"tokens": [0, 4], "loss_mask": [1, 0, 0, 0, 1, 1]},
    ),
    "other metadata": ({"metadata": {"a": 1}}, {"metadata": {"a": True}}),
    "no metadata": ({"metadata": {"a": 1}}, {"metadata": None}),
    "other tokens": ({}, {"prompt": [1, 2, 3, 4, 5, 7]}),
    "other layers": ({}, {"layers": [2]}),
    "another adapter of that name": ({"lora": "/a"}, {"lora": "/b"}),
    "an image at another place": ({"images": [1]}, {"images": [2]}),
    "another salt": ({"salt": "a"}, {"salt": "b"}),
}
#: How the second request is sent: (to the same server, settings of the second server, by path).
SCENES = {
    "restart": (False, {}, False),
    "second server": (True, {}, False),
    "path": (False, {}, True),
    "renewal": (False, {"ttl_seconds": 7200}, False),
}


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return open_store(str(tmp_path)) if request.param == "folder" else MemoryStore()


def read(store, name=NAME):
    return _sample_in_object(store, name, None).load(framework="numpy")


def asked(first: dict, change: dict) -> dict:
    return {"prompt": PROMPT, "key": "k", **{k: v for k, v in {**first, **change}.items() if v is not None}}


def by_path(request: dict) -> dict:
    return {**{k: v for k, v in request.items() if k != "key"}, "path": NAME}


@pytest.mark.parametrize(
    ("store", "other", "scene"),
    [
        # Each combination of request and scene with one store. make soak has the other.
        pytest.param(store, other, scene, marks=[pytest.mark.soak] if (i + j + k) % 2 else [])
        for i, store in enumerate(("folder", "memory"))
        for j, other in enumerate(OTHERS)
        for k, scene in enumerate(SCENES)
    ],
    indirect=["store"],
)
def test_another_sample_is_a_conflict_and_the_same_one_is_stored(store, tmp_path, other, scene):
    together, more, path = SCENES[scene]
    first, change = OTHERS[other]
    one, two = asked(first, {}), asked(first, change)
    if path:
        one, two = by_path(one), by_path(two)
    a = SmallServer(tmp_path, store, ttl_seconds=3600)
    assert "saved" not in a.ask(**one)
    if not together:
        a.close()
    before, states = store.get(NAME), read(store)
    # The same sample, from a server that does not remember the first, and computes other states.
    b = SmallServer(tmp_path, store, **{"ttl_seconds": 3600, **more})
    b.ask(**one)
    again = read(store)
    np.testing.assert_array_equal(again["hidden_states"], states["hidden_states"])
    assert {**again["meta"], "expires": 0} == {**states["meta"], "expires": 0}
    kept = store.get(NAME)
    if scene == "renewal":
        assert again["meta"]["expires"] >= states["meta"]["expires"] + 3000
        data = Part.open(store, NAME).header_bytes
        assert kept[data:] == before[len(before) - (len(kept) - data) :]
    # Another sample of that key, from a third server.
    b.close()
    c = SmallServer(tmp_path, store, **{"ttl_seconds": 3600, **more})
    c.ask(**two)
    with pytest.raises(SampleFailed, match="another sample"):
        read(store)
    assert store.get(NAME) == kept
    # The conflict stays after any other request. Without its marker the first sample is readable.
    c.close()
    d = SmallServer(tmp_path, store, ttl_seconds=3600)
    d.ask(**one)
    d.ask(**one, computed=2)
    d.close()
    with pytest.raises(SampleFailed, match="another sample"):
        read(store)
    store.delete(f"{NAME}.conflict.json")
    np.testing.assert_array_equal(read(store)["hidden_states"], states["hidden_states"])
    if together:
        a.close()


@pytest.mark.parametrize("other", OTHERS)
def test_conflicts_are_found_within_one_server(store, tmp_path, other):
    """The scheduler knows it before the request's first token."""
    first, change = OTHERS[other]
    server = SmallServer(tmp_path, store)
    server.ask(**asked(first, {}))
    assert "refused" not in server.ask(**asked(first, {}))
    assert read(store)["key"] == "k"
    request = server.begin(**asked(first, change))
    server.settle()
    with pytest.raises(SampleFailed, match="another sample"):
        read(store)
    assert "hidden_states_key" in server.end(request)["refused"]
    server.close()


def test_the_words_of_a_selection_do_not_count_and_the_order_of_metadata_does_not(store, tmp_path):
    for tokens, metadata in (("last", {"a": 1, "b": 2}), ([-1, None], {"b": 2, "a": 1}), ([5, 6], {"a": 1, "b": 2})):
        server = SmallServer(tmp_path, store)
        assert "saved" not in server.ask(PROMPT, key="k", tokens=tokens, metadata=metadata)
        server.close()
    assert read(store)["token_ids"].tolist() == [6]


def test_an_answer_and_its_object_have_the_same_identity(store, tmp_path):
    server = SmallServer(tmp_path, store)
    answer = server.ask(PROMPT, key="k", tokens="mean")
    assert read(store)["meta"]["identity"] == answer["identity"]
    assert {len(h) for h in answer["identity"].values()} == {32}
    server.close()


def test_hashes_differ_by_type_shape_and_array_border():
    a = np.arange(4, dtype=np.int64)
    values = [
        (a,),
        (a.astype(np.int32),),
        (a.reshape(2, 2),),
        (a[:2], a[2:]),
        (1,),
        (1.0,),
        (True,),
        ("1",),
        (1, 1),
        (11,),
    ]
    assert len({identity_hash(*v) for v in values}) == len(values)


@pytest.mark.parametrize(("codecs", "same"), [(("none", "split"), True), (("fp8-token", "none"), False)])
def test_a_lossy_codec_makes_another_sample(store, tmp_path, codecs, same):
    for codec in codecs:
        server = SmallServer(tmp_path, store, codec=codec)
        server.ask(PROMPT, key="k")
        server.close()
    assert (f"{NAME}.conflict.json" in names(store)) is not same


@pytest.mark.parametrize("computed", [None, 3])
def test_another_model_makes_another_sample(store, tmp_path, computed):
    server = SmallServer(tmp_path, store)
    server.ask(PROMPT, key="k")
    server.close()
    server = SmallServer(tmp_path, store, about={"model": "other"})
    server.ask(PROMPT, key="k", computed=computed)
    server.close()
    with pytest.raises(SampleFailed, match="another sample"):
        read(store)


# -- objects of earlier versions ---------------------------------------------------------------------------------------


def put_old(store, meta: dict, ids: list[int], *, attached=None, dtype="float32", about=None) -> None:
    n = len(ids)
    segment = Segment("k", 0, 0, n, n, meta=meta, attached=attached or {})
    data = np.ones((2, n, 8), np.uint32)
    codec = resolve_codec("none")
    encoder = SegmentEncoder(codec, alone=True)
    encoder.add(Page(segment, 0, n, n, (1, 2), dtype, data.shape, "LTH", np.asarray(ids, np.int64), data))
    part = build_part([encoder.finish()], codec, about or {"model": "m", "revision": None, "norm": "pre"})
    store.put(NAME, part.buffers)


@pytest.mark.parametrize(
    ("meta", "ids", "params", "same"),
    [
        ({}, PROMPT, {}, True),
        ({"expires": 5, "bad": []}, PROMPT, {}, True),
        ({"metadata": {"a": 1}}, PROMPT, {"metadata": {"a": 1}}, True),
        ({"metadata": {"a": 1}}, PROMPT, {}, False),
        ({}, PROMPT, {"loss_mask": [1] * 6}, False),
        ({}, PROMPT, {"tokens": [0, 6, 1], "lora": "/a"}, False),
        ({"tokens": {"start": 5, "step": 1, "of": 6}}, [6], {"tokens": "last"}, False),
        ({"tokens": {"mean": True, "of": 6}}, [-1], {"tokens": "mean"}, False),
    ],
)
def test_an_object_without_identity_counts_where_it_holds_all_tokens(store, tmp_path, meta, ids, params, same):
    put_old(store, meta, ids)
    server = SmallServer(tmp_path, store)
    server.ask(PROMPT, key="k", **params)
    server.close()
    if same:
        assert "expires" not in read(store)["meta"]
        assert (read(store)["hidden_states"].view(np.uint32) == 1).all()
    else:
        with pytest.raises(SampleFailed, match="another sample"):
            read(store)


@pytest.mark.parametrize("content", [b"", b"no part", b"\xff" * 100])
def test_an_unreadable_object_fails_the_request_and_is_no_conflict(store, tmp_path, content):
    store.put(NAME, [content])
    server = SmallServer(tmp_path, store)
    server.ask(PROMPT, key="k")
    server.close()
    assert names(store) == {NAME, "k.error.json"}
    assert store.get(NAME) == content


@pytest.mark.parametrize(("prompt", "same"), [(PROMPT, True), ([9, 9, 9], False)])
@pytest.mark.parametrize("computed", [None, 1])
def test_an_object_of_an_unknown_codec_has_a_known_request(store, tmp_path, monkeypatch, prompt, same, computed):
    """Two servers share a prefix. The second server lacks the codec of the first one."""
    server = SmallServer(tmp_path, store, codec="split")
    server.ask(PROMPT, key="k")
    server.close()
    with monkeypatch.context() as patch:
        patch.delitem(CODECS, "split")
        server = SmallServer(tmp_path, store, codec="zstd")
        server.ask(prompt, key="k", computed=computed)
        server.close()
    if same:
        assert names(store) == {NAME}
        assert read(store)["token_ids"].tolist() == PROMPT
    else:
        with pytest.raises(SampleFailed, match="another sample"):
            read(store)


def test_an_object_that_the_writer_cannot_read_for_a_moment_stays_readable(store, tmp_path):
    for failing in (store, FailingStore(store, FormatError("a page"), Strike({"get_ranges"}))):
        server = SmallServer(tmp_path, failing, markers=store)
        server.ask(PROMPT, key="k")
        server.close()
    assert names(store) == {NAME}
    assert read(store)["token_ids"].tolist() == PROMPT


# -- renewal -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(3600, 60), (None, 60), (60, 3600), (60, None)])
def test_an_object_never_ends_earlier_than_it_said(store, tmp_path, before, after):
    for seconds in (before, after):
        server = SmallServer(tmp_path, store, ttl_seconds=seconds)
        server.ask(PROMPT, key="k")
        server.close()
    expires = read(store)["meta"].get("expires")
    if None in (before, after):
        assert expires is None
    else:
        assert abs(expires - time.time() - 3600) < 600


def test_an_end_that_is_no_number_is_never(store, tmp_path):
    put_old(store, {"expires": [5]}, PROMPT)
    server = SmallServer(tmp_path, store, ttl_seconds=60)
    server.ask(PROMPT, key="k")
    server.close()
    assert names(store) == {NAME}
    assert read(store)["meta"]["expires"] == [5]


@pytest.mark.parametrize(("left_s", "said", "tries"), [(3600, "object is not renewed", 3), (1, "was not stored", 10)])
def test_a_process_that_locks_an_object_stops_no_writer(tmp_path, caplog, monkeypatch, left_s, said, tries):
    """Any user who may read a file can take a shared lock on the file. Then it cannot be renewed."""
    tried = []
    monkeypatch.setattr(committer, "with_expires", lambda *args: tried.append(1) or with_expires(*args))
    server = SmallServer(tmp_path, ttl_seconds=left_s)
    server.ask(PROMPT, key="k")
    server.close()
    stored = (tmp_path / NAME).read_bytes()
    with (tmp_path / NAME).open("rb") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        server = SmallServer(tmp_path, ttl_seconds=7200)
        server.ask(PROMPT, key="k")
        server.ask([9] * 6, key="another")
        server.close()
    assert (tmp_path / NAME).read_bytes() == stored
    assert load_object(open_store(str(tmp_path)), "another.safetensors")["token_ids"].tolist() == [9] * 6
    assert said in caplog.text
    assert 0 < len(tried) <= tries


def test_a_store_that_refuses_the_probe_once_is_probed_again(tmp_path, monkeypatch):
    class Refusing(WrappedStore):
        def put(self, name, buffers):
            if name.startswith(".hsx-probe-") and not refused:
                refused.append(1)
                raise Denied("a role is being replaced")
            super().put(name, buffers)

    monkeypatch.setattr(committer, "_PROBE_AGAIN_S", 0.0)
    refused: list[int] = []
    for seconds in (60, 3600, 3600):
        server = SmallServer(tmp_path, Refusing(open_store(str(tmp_path))), ttl_seconds=seconds)
        for _ in range(3):
            server.ask(PROMPT, key="k")
        server.close()
    assert refused
    assert read(open_store(str(tmp_path)))["meta"]["expires"] > time.time() + 3000


def test_an_object_that_is_deleted_while_it_is_looked_at_is_stored(store, tmp_path):
    class Deleting(WrappedStore):
        def head(self, name):
            if name == NAME and deleted.append(1) is None and len(deleted) == 1:
                store.delete(NAME)
            return super().head(name)

    deleted: list[int] = []
    server = SmallServer(tmp_path, store)
    server.ask(PROMPT, key="k")
    server.close()
    server = SmallServer(tmp_path, Deleting(store), markers=store)
    server.ask([9] * 6, key="k")
    server.close()
    assert read(store)["token_ids"].tolist() == [9] * 6


def test_a_renewal_by_another_server_between_two_requests_is_no_conflict(store, tmp_path):
    """The other object is the same sample with another length."""

    class Renewing(WrappedStore):
        def head(self, name):
            found = super().head(name)
            if name == NAME and not renewed:
                renewed.append(1)
                other = SmallServer(tmp_path, store)  # its samples do not expire
                other.ask(PROMPT, key="k")
                other.close()
            return found

        def version(self, name):
            return store.version(name)

        def put_version(self, name, buffers, version):
            return store.put_version(name, buffers, version)

        def delete_version(self, name, version):
            return store.delete_version(name, version)

    renewed: list[int] = []
    for of in (store, Renewing(store)):
        server = SmallServer(tmp_path, of, markers=store, ttl_seconds=60)
        server.ask(PROMPT, key="k")
        server.close()
    assert renewed
    assert names(store) == {NAME}
    assert "expires" not in read(store)["meta"]
    # A reader at that moment tries again.
    store.delete(NAME)
    server = SmallServer(tmp_path, store, markers=store, ttl_seconds=60)
    server.ask(PROMPT, key="k")
    server.close()
    renewed.clear()
    assert load_object(Renewing(store), NAME, framework="numpy")["token_ids"].tolist() == PROMPT
    assert renewed


@pytest.mark.parametrize("moment", ["version", "get", "put_version"])
def test_an_object_that_is_replaced_before_it_is_renewed_is_looked_at_again(store, tmp_path, moment):
    """It expired, gc deleted it, and another server stored another sample of the key."""

    class Replacing(WrappedStore):
        def _before(self, verb, name):
            if name == NAME and verb == moment and not replaced:
                replaced.append(1)
                store.delete(NAME)
                other = SmallServer(tmp_path, store, ttl_seconds=60)
                other.ask([9] * 6, key="k")
                other.close()

        def get(self, name, most=None):
            self._before("get", name)
            return super().get(name, most)

        def version(self, name):
            self._before("version", name)
            return store.version(name)

        def put_version(self, name, buffers, version):
            self._before("put_version", name)
            return store.put_version(name, buffers, version)

        def delete_version(self, name, version):
            return store.delete_version(name, version)

    replaced: list[int] = []
    for seconds, of in ((60, store), (3600, Replacing(store))):
        server = SmallServer(tmp_path, of, markers=store, ttl_seconds=seconds)
        server.ask(PROMPT, key="k")
        server.close()
    assert replaced
    assert Part.open(store, NAME).token_ids(0).tolist() == [9] * 6
    with pytest.raises(SampleFailed, match="another sample"):
        read(store)


class RenewedAtCall(WrappedStore):
    """Before call number ``at`` (from 0) for the object, another server removes its expiry.

    ``verbs``: the counted calls. Default: all.
    """

    def __init__(self, inner, at, tmp_path, verbs=()):
        super().__init__(inner)
        self.calls: list[str] = []
        self._at, self._tmp_path, self._verbs = at, tmp_path, verbs

    def _call(self, verb, name, call, nbytes):  # noqa: ARG002
        if name == NAME and (not self._verbs or verb in self._verbs):
            self.calls.append(verb)
            if len(self.calls) == self._at + 1:
                without = SmallServer(self._tmp_path, self._inner)
                without.ask(PROMPT, key="k")
                without.close()
        return call()


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("how", ["ask", "abort", "read"])
def test_an_object_that_is_renewed_while_it_is_opened_is_no_other_sample(tmp_path, how, at):
    """Another server at the prefix changes its expiry: the object then has another length."""
    store = MemoryStore()
    first = SmallServer(tmp_path, store, ttl_seconds=100)
    first.ask(PROMPT, key="k")
    first.close()

    racing = RenewedAtCall(store, at, tmp_path, verbs=("head", "get_ranges"))
    if how == "read":
        assert load_object(racing, NAME, framework="numpy")["token_ids"].tolist() == PROMPT
    else:
        second = SmallServer(tmp_path, racing, markers=racing if how == "abort" else store, ttl_seconds=100)
        second.ask(PROMPT, key="k", computed=3 if how == "abort" else None)
        second.close()
    assert racing.calls
    assert names(store) == {NAME}
    assert read(store)["token_ids"].tolist() == PROMPT


def test_one_stored_object_at_a_time_is_in_memory_to_be_renewed(tmp_path):
    inside: list[int] = []
    together: list[int] = []

    class Slow(MemoryStore):
        def get(self, name, most=None):
            if name.endswith(".safetensors"):
                inside.append(1)
                together.append(len(inside))
                time.sleep(0.01)
                inside.pop()
            return super().get(name, most)

    store = Slow()
    for seconds in (60, 3600):
        server = SmallServer(tmp_path, store, ttl_seconds=seconds)
        for i in range(8):
            server.end(server.begin(PROMPT, key=f"k{i}"))
        server.settle()
        server.close()
    assert together == [1] * 8


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("same", [True, False])
def test_a_failed_request_finds_what_the_object_is_while_another_server_renews_it(tmp_path, same, at):
    """The object then has another length. It is read in several requests."""
    store = MemoryStore()
    first = SmallServer(tmp_path, store, ttl_seconds=100)
    first.ask(PROMPT, key="k")
    first.close()

    racing = RenewedAtCall(store, at, tmp_path)
    second = SmallServer(tmp_path, store, markers=racing)
    second.ask(PROMPT if same else [9] * 6, key="k", computed=3)
    second.close()
    assert len(racing.calls) >= 3
    assert (f"{NAME}.conflict.json" in names(store)) is not same


def test_without_conditional_puts_an_object_keeps_its_end_which_is_logged_once(store, tmp_path, caplog):
    class Unconditional(WrappedStore):
        put_version = None

    for seconds, of in ((300, store), (3600, Unconditional(store))):
        server = SmallServer(tmp_path, of, markers=store, ttl_seconds=seconds)
        for _ in range(2):
            server.ask(PROMPT, key="k")
        server.close()
    assert read(store)["meta"]["expires"] < time.time() + 600
    assert caplog.text.count("has no conditional puts") == 1
    assert names(store) == {NAME}


def test_only_the_end_of_the_object_that_was_opened_is_changed():
    store = MemoryStore()
    put_old(store, {"expires": 5, "metadata": {"a": 1}}, PROMPT)
    part, data = Part.open(store, NAME), store.get(NAME)
    store.put(NAME, with_expires(data, part, 6000))
    renewed = Part.open(store, NAME)
    assert renewed.segments[0].segment.meta == {"expires": 6000, "metadata": {"a": 1}}
    assert store.get(NAME)[renewed.header_bytes :] == data[part.header_bytes :]
    others = []
    for n in (6, 7):
        put_old(store, {"expires": 5, "metadata": {"a": 1}}, [9] * n)
        others.append(store.get(NAME))
    assert [len(other) == len(data) for other in others] == [True, False]
    assert all(with_expires(other, part, 6000) is None for other in others)


def test_an_object_that_was_damaged_on_the_way_does_not_replace_the_stored_one():
    store = MemoryStore()
    put_old(store, {"expires": 5}, PROMPT)
    part, data = Part.open(store, NAME), store.get(NAME)
    for at in (0, 9, part.header_bytes // 2, part.header_bytes, len(data) - 1):
        damaged = bytearray(data)
        damaged[at] ^= 1
        assert with_expires(bytes(damaged), part, 6000) is None
    assert with_expires(data, part, 6000) is not None


# -- failures and markers ----------------------------------------------------------------------------------------------


def names(store) -> set[str]:
    return {info.name for info in store.list()}


@pytest.mark.parametrize("together", [True, False])
def test_an_aborted_repetition_leaves_the_stored_sample_readable(store, tmp_path, together):
    server = SmallServer(tmp_path, store)
    server.ask(PROMPT, key="k")
    other = server if together else SmallServer(tmp_path, store)
    other.ask(PROMPT, key="k", computed=3)
    assert read(store)["token_ids"].tolist() == PROMPT
    assert names(store) == {NAME}
    server.close()


@pytest.mark.parametrize("params", [{"key": "k"}, {"path": NAME}])
def test_a_failed_request_of_another_sample_is_a_conflict_where_there_is_an_object(store, tmp_path, params):
    """Otherwise its reader, who can compute the name, would get the first request's states."""
    server = SmallServer(tmp_path, store)
    server.ask(PROMPT, **params)
    server.close()
    server = SmallServer(tmp_path, store)
    server.ask([9] * 6, computed=3, **params)
    with pytest.raises(SampleFailed, match="another sample"):
        read(store)
    server.close()


def test_a_failed_request_without_an_object_makes_no_conflict(store, tmp_path):
    server = SmallServer(tmp_path, store)
    server.ask([9] * 6, key="k", computed=0)
    with pytest.raises(SampleFailed, match="expected 6 computed tokens, got 0"):
        read(store)
    server.close()
    server = SmallServer(tmp_path, store)
    server.ask(PROMPT, key="k")
    server.close()
    assert read(store)["token_ids"].tolist() == PROMPT
    assert names(store) == {NAME}


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("order", permutations("abc"))
def test_requests_of_one_path_that_a_key_has_are_under_way_together(store, tmp_path, same, order):
    """Paths claim no key, so the scheduler accepts them all. Two are stored, or fail, and one fails."""
    server = SmallServer(tmp_path, store)
    requests = {
        "a": server.begin(PROMPT, path=NAME),
        "b": server.begin(PROMPT if same else [9] * 6, path=NAME),
        "c": server.begin(PROMPT, path=NAME, save=False),
    }
    for which in order:
        server.end(requests[which], computed=3 if which == "b" else None)
        server.settle()
    server.close()
    if same:
        assert read(store)["token_ids"].tolist() == PROMPT
        assert names(store) == {NAME}
    else:
        with pytest.raises(SampleFailed, match="another sample"):
            read(store)


def test_a_prompt_of_embeddings_is_no_sample_of_a_used_key(store, tmp_path):
    for embeds in (False, True):
        server = SmallServer(tmp_path, store)
        server.ask(PROMPT, key="k", embeds=embeds)
        server.close()
    with pytest.raises(SampleFailed, match="another sample"):
        read(store)


def test_what_a_failed_path_says_hides_the_object_of_an_earlier_request(store, tmp_path):
    server = SmallServer(tmp_path, store)
    server.ask(PROMPT, path="sub/x.safetensors")
    server.ask([9] * 6, path="sub/x.safetensors", computed=3)
    with pytest.raises(SampleFailed, match="expected 6 computed tokens, got 3"):
        read(store, "sub/x.safetensors")
    server.ask([8] * 6, path="sub/x.safetensors")
    server.close()
    assert read(store, "sub/x.safetensors")["token_ids"].tolist() == [8] * 6
    assert names(store) == {"sub/x.safetensors"}


class Between(WrappedStore):
    """Runs ``events[i]`` before its ``i``-th call."""

    def __init__(self, inner, events=None):
        super().__init__(inner)
        self.events = events or {}
        self.calls: list[tuple[str, str]] = []

    def _call(self, verb, name, call, nbytes):  # noqa: ARG002
        for event in self.events.get(len(self.calls), ()):
            event()
        self.calls.append((verb, name))
        return call()


ABOUT = {"model": "m", "revision": None, "norm": "pre"}


def act(store, how, *args, **kwargs) -> Between:
    """Run one call of another server's ``Markers`` to its end."""
    found = store if isinstance(store, Between) else Between(store)
    markers = Markers(found, about=ABOUT)
    getattr(markers, how)("k", NAME, *args, **kwargs)
    end = time.monotonic() + 30
    while markers.pending:
        assert time.monotonic() < end
        time.sleep(0.0005)
    markers.close()
    return found


@pytest.mark.parametrize("same", [True, False])
def test_any_order_of_object_marker_and_clear_gives_readers_the_right_sample(same):
    """One server stores and clears, another one fails, at every pair of moments between the second one's calls."""
    identity = {"request": "1" * 32, "tokens": "2" * 32}
    request = identity["request"] if same else "3" * 32
    seen = set()
    for put_at in range(12):
        for clear_at in range(put_at, 12):
            store = MemoryStore()
            events: dict[int, list] = {}
            put = [lambda s=store: put_old(s, {"identity": identity}, PROMPT)]
            clear = [lambda s=store: act(s, "stored")]
            events[put_at] = put
            events[clear_at] = events.get(clear_at, []) + clear
            failing = act(Between(store, events), "fail", "aborted", requests=[request])
            looked = [name for _, name in failing.calls].index(NAME)
            for at, what in ((put_at, put), (clear_at, clear)):
                if at >= len(failing.calls):
                    what[0]()
            if not same and put_at <= looked:
                seen.add("conflict")
                with pytest.raises(SampleFailed, match="another sample"):
                    read(store)
            else:
                seen.add("stored")
                assert read(store)["token_ids"].tolist() == PROMPT
                assert names(store) == {NAME}
    assert seen == ({"stored"} if same else {"stored", "conflict"})


@pytest.mark.parametrize(("how", "args"), [("fail", ("aborted",)), ("stored", ())])
def test_a_conflict_survives_any_order_of_marker_and_clear(how, args):
    for conflict_at in range(12):
        store = MemoryStore()
        put_old(store, {}, PROMPT)
        events = {conflict_at: [lambda s=store: act(s, "conflict", "used twice")]}
        other = act(Between(store, events), how, *args, requests=["1" * 32])
        if conflict_at >= len(other.calls):
            events[conflict_at][0]()
        with pytest.raises(SampleFailed, match="used twice"):
            read(store)


def test_a_reader_that_looked_before_the_object_was_stored_looks_again():
    store = MemoryStore()
    act(store, "fail", "aborted", requests=["1" * 32])
    with pytest.raises(SampleFailed, match="aborted"):
        read(store)
    reader = Between(store)
    with suppress(SampleFailed):
        read(reader)
    # Before each call up to the read of the marker: the reader has then seen a state that never existed as a whole.
    for at in range([name for _, name in reader.calls].index("k.error.json") + 1):
        act(store, "fail", "aborted", requests=["1" * 32])
        racing = Between(store, {at: [lambda: put_old(store, {}, PROMPT)]})
        assert read(racing)["token_ids"].tolist() == PROMPT
        store.delete(NAME)


@pytest.mark.parametrize(
    ("marker", "hides"),
    [
        ({"error": "x"}, True),
        ({"error": "x", "conflict": True}, True),
        ({"error": "x", "until_stored": True}, False),
        ({"error": "x", "until_stored": "yes"}, True),
    ],
)
def test_markers_of_earlier_versions_hide_the_object(marker, hides):
    store = MemoryStore()
    put_old(store, {}, PROMPT)
    store.put("k.error.json", [json.dumps(marker).encode()])
    if hides:
        with pytest.raises(SampleFailed, match="x"):
            read(store)
    else:
        assert read(store)["token_ids"].tolist() == PROMPT


def test_a_refused_request_does_not_get_another_requests_sample(store, tmp_path):
    """Its texts are too long to be hashed, so it equals no other sample."""
    server = SmallServer(tmp_path, store, markers=store)
    server.ask(PROMPT, key="k")
    assert read(store)["token_ids"].tolist() == PROMPT
    server.ask(PROMPT, key="k", salt="x" * 2000)
    server.close()
    with pytest.raises(SampleFailed, match="another sample"):
        read(store)


def test_a_key_is_free_in_the_step_after_its_request_was_aborted(tmp_path):
    """A client cancels, and asks again at once, before the next step."""
    server = SmallServer(tmp_path)
    request = server.begin(PROMPT, key="k")
    request.num_computed_tokens, request.status = 0, RequestStatus.FINISHED_ABORTED
    server.scheduler.request_finished(request, [])
    answer = server.end(server.begin([9] * 6, key="k"))
    server.settle()
    server.close()
    found = load_object(open_store(str(tmp_path)), NAME, identity=answer["identity"])
    assert found["token_ids"].tolist() == [9] * 6


def test_requests_that_ended_before_do_not_join_a_group_of_requests(tmp_path):
    """``a`` fails and ``b`` is stored. Its writers report that late, so ``c`` joins ``b``'s group of its path."""

    class Late(WrappedStore):
        def put_if_absent(self, name, buffers):
            super().put_if_absent(name, buffers)
            if name == NAME and not late.is_set():
                stored.set()
                late.wait(30)

    late, stored, inner = threading.Event(), threading.Event(), MemoryStore()
    server = SmallServer(tmp_path, Late(inner), markers=inner)
    a, b = (server.begin(PROMPT, path=NAME) for _ in range(2))
    server.end(a, computed=0)
    server.end(b)
    while not stored.is_set():
        server._step()
    inner.delete(NAME)
    c = server.begin([9] * 6, path=NAME)
    late.set()
    answer = server.end(c)
    server.settle()
    server.close()
    assert load_object(inner, NAME, identity=answer["identity"])["token_ids"].tolist() == [9] * 6
