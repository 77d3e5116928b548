"""``HiddenStatesMiddleware`` behind vLLM's own middleware."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import threading
import time
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import safetensors.torch
import torch
from fastapi import FastAPI
from safetensors import safe_open
from starlette.testclient import TestClient

import hsx_dist
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.markers import OBJECT, conflict_name, marker_name
from hsx_dist.page import object_name
from hsx_dist.reading.load import object_sample
from hsx_dist.serving import inline_answers, middleware, sample_source, states_file
from hsx_dist.serving.middleware import connector_settings
from hsx_dist.serving.refusals import Refusal
from hsx_dist.serving.sample_source import MemoryLimit
from hsx_dist.store import open_store
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import RandomSample, random_sample
from tests.harness.traced_memory import trace_memory
from tests.unit.serving.outer_vllm import API_KEY, LAYERS, WITH_KEY, call, outer_server, store_sample

INLINE = {"model": "m", "prompt": "Hello.", "hidden_states_inline": True}


def client(server: Any, **kwargs: Any) -> TestClient:
    return TestClient(server.app, headers=WITH_KEY, **kwargs)


def same(data: bytes, sample: RandomSample, tokens: slice = slice(None), layers: Any = LAYERS) -> bool:
    """Whether a file holds these rows, bit for bit."""
    found = safetensors.torch.load(data)
    states = found["hidden_states"].view(torch.uint16).numpy()
    wanted = sample.states[tokens][:, [LAYERS.index(k) for k in layers]]
    assert found["layer_ids"].tolist() == list(layers)
    return np.array_equal(found["token_ids"], sample.token_ids[tokens]) and np.array_equal(states, wanted)


def error(answer: Any, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    said = answer.json()["error"]
    assert set(said) == {"message", "type", "param", "code"}
    assert (said["code"], said["type"]) == (status, kind)
    return str(said["message"])


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer another"}, {"Authorization": API_KEY}])
def test_without_the_servers_key_requests_are_refused_before_the_engine(tmp_path, headers):
    store_sample(tmp_path, random_sample("k"))
    server = outer_server(tmp_path)
    with TestClient(server.app) as guest:
        for path in ("/v1/hidden_states/k", "/v1/hidden_states/unknown", "/v1/hidden_states/k?wait=x"):
            assert guest.get(path, headers=headers).status_code == 401
            assert guest.head(path, headers=headers).status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            answer = guest.post(path, json=INLINE, headers=headers)
            assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
        assert server.seen == []
        assert guest.get("/v1/hidden_states/k", headers=WITH_KEY).status_code == 200


@pytest.mark.parametrize("codec", ["none", "split"])
@pytest.mark.parametrize(
    ("query", "tokens", "layers"),
    [
        ("", slice(None), LAYERS),
        ("?tokens=-1:&layers=15", slice(-1, None), (15,)),
        ("?tokens=3:21", slice(3, 21), LAYERS),
        ("?tokens=:-5&layers=30,2", slice(None, -5), (30, 2)),
        ("?tokens=20:10", slice(20, 10), LAYERS),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 16 * 24 * 2 * 3, 8 << 20])
def test_streamed_samples_and_token_ranges_are_bit_for_bit_equal(
    tmp_path, monkeypatch, codec, query, tokens, layers, piece_bytes
):
    monkeypatch.setattr(states_file, "PIECE_BYTES", piece_bytes)
    mask = (np.arange(70) % 3 == 0).astype(np.uint8)
    sample = random_sample("a/key ü", 70)
    store_sample(tmp_path, sample, codec=codec, attached={"loss_mask": mask}, finish_reason="abort")
    with client(outer_server(tmp_path)) as c:
        answer = c.get(f"/v1/hidden_states/a%2Fkey%20%C3%BC{query}")
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert answer.headers["x-request-id"]  # vLLM's middleware is around it
        assert same(answer.content, sample, tokens, layers)
        assert np.array_equal(safetensors.torch.load(answer.content)["loss_mask"], mask[tokens])
        (tmp_path / "got").write_bytes(answer.content)
        with safe_open(tmp_path / "got", "pt") as file:
            said = file.metadata()
        assert said["key"] == "a/key ü"
        assert json.loads(said["meta"])["finish_reason"] == "abort"
        head = c.head(f"/v1/hidden_states/a%2Fkey%20%C3%BC{query}")
        assert (head.headers["content-length"], head.content) == (str(len(answer.content)), b"")


@pytest.mark.parametrize("tokens", [{}, {"of": "37"}, [37], None])
def test_a_sample_whose_selection_is_not_described_as_ours_is_answered(tmp_path, tokens):
    sample = store_sample(tmp_path, random_sample("k"), tokens=tokens)
    with client(outer_server(tmp_path)) as c:
        assert same(c.get("/v1/hidden_states/k").content, sample)


def test_a_line_break_is_a_part_of_the_key(tmp_path):
    for key in ("a", "a\nb", "\n"):
        store_sample(tmp_path, random_sample(key))
    with client(outer_server(tmp_path)) as c:
        for key in ("a", "a\nb", "\n"):
            assert same(c.get(f"/v1/hidden_states/{quote(key)}").content, random_sample(key))
        error(c.get("/v1/hidden_states/a%0A"), 404, "NotFound")


def test_the_object_of_another_key_is_not_answered(tmp_path):
    """A file system that ignores letter case finds the object of ``a`` under the name of ``A``."""
    store_sample(tmp_path, random_sample("a"))
    [stored] = tmp_path.glob("*.safetensors")
    stored.with_name(object_name("A") + OBJECT).hardlink_to(stored)
    with client(outer_server(tmp_path)) as c:
        error(c.get("/v1/hidden_states/A"), 404, "SampleNotFound")
        assert same(c.get("/v1/hidden_states/a").content, random_sample("a"))


def test_streamed_ranges_are_fetched_once(tmp_path, monkeypatch):
    monkeypatch.setattr(states_file, "PIECE_BYTES", 1)
    sample = store_sample(tmp_path, random_sample("k", 320, hidden_size=512))
    fetched = []
    get_ranges = LocalStore.get_ranges

    def count(self: Any, name: str, ranges: Any) -> Any:
        fetched.extend(b - a for a, b in ranges if b - a > 4096)
        return get_ranges(self, name, ranges)

    monkeypatch.setattr(LocalStore, "get_ranges", count)
    with client(outer_server(tmp_path)) as c:
        data = c.get("/v1/hidden_states/k?tokens=8:").content
    assert same(data, sample, slice(8, None))
    assert sum(fetched) <= sample.states.nbytes


def test_points_are_tensors_of_their_names(tmp_path):
    sample = random_sample("k")
    store_sample(tmp_path, sample)
    with client(outer_server(tmp_path)) as c:
        found = safetensors.torch.load(c.get("/v1/hidden_states/k?points=hidden_states&layers=15").content)
        assert found["hidden_states.layer_ids"].tolist() == [15]
        assert np.array_equal(found["hidden_states"].view(torch.uint16)[:, 0], sample.states[:, 1])
        assert "got 'q'" in error(c.get("/v1/hidden_states/k?points=q"), 400, "ConfigError")


def test_a_key_that_is_not_stored_yet_is_waited_for(tmp_path):
    with client(outer_server(tmp_path)) as c:
        begin = time.monotonic()
        assert "after 0.3 s" in error(c.get("/v1/hidden_states/k?wait=0.3"), 404, "NotFound")
        assert time.monotonic() - begin >= 0.3
        threading.Timer(0.2, store_sample, [tmp_path, random_sample("k")]).start()
        assert same(c.get("/v1/hidden_states/k?wait=30").content, random_sample("k"))


def test_an_expired_sample_whose_key_is_used_again_is_waited_for(tmp_path):
    store_sample(tmp_path, random_sample("k"), expires=1000)
    with client(outer_server(tmp_path)) as c:
        begin = time.monotonic()
        assert "expired at 1000" in error(c.get("/v1/hidden_states/k?wait=0.3"), 410, "SampleExpired")
        assert time.monotonic() - begin >= 0.3
        threading.Timer(0.2, store_sample, [tmp_path, random_sample("k")], {"expires": 4e9}).start()  # the renewal
        assert same(c.get("/v1/hidden_states/k?wait=30").content, random_sample("k"))


def test_failed_expired_and_conflicting_samples_have_different_errors(tmp_path):
    def mark(name: str, reason: str, **more: Any) -> None:
        (tmp_path / name).write_text(json.dumps({"key": "k", "error": reason, **more}))

    mark(marker_name("failed.safetensors"), "the store refused it", until_stored=True)
    mark(marker_name("aborted.safetensors"), "aborted after 3 of 9 tokens", until_stored=True)
    for key in ("used", "old", "endless", "of-another", "damaged"):
        store_sample(
            tmp_path,
            random_sample(key, 70, hidden_size=64),
            identity={"request": "a", "tokens": "b"},
            **{"old": {"expires": 1000}, "endless": {"expires": -(10**400)}}.get(key, {}),
        )
    mark(conflict_name("used.safetensors"), "the key was used before", conflict=True)
    place = f"{tmp_path}/earlier.safetensors"
    mark(
        conflict_name("earlier.safetensors"), f"SampleConflict: {place}: expected a new key, got another", conflict=True
    )
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    with client(outer_server(tmp_path)) as c:
        url = "/v1/hidden_states"
        begin = time.monotonic()  # a failure ends the wait
        for key, reason in (
            ("failed", "the store refused it"),
            ("aborted", "aborted after 3 of 9 tokens"),
            ("used", "the key was used before"),
        ):
            told = error(c.get(f"{url}/{key}?wait=60"), 424, "SampleFailed")
            assert told == f"key '{key}': expected a sample, got a failed request: {reason}"
        told = error(c.get(f"{url}/earlier"), 424, "SampleFailed")  # an earlier version stored the marker
        assert told == "key 'earlier': expected a new key, got another"
        assert "expired at 1000" in error(c.get(f"{url}/old"), 410, "SampleExpired")
        assert c.get(f"{url}/endless").status_code == 200  # no time that a float has
        assert time.monotonic() - begin < 30
        identity = {"identity": json.dumps({"request": "a", "tokens": "c"})}
        told = error(c.get(f"{url}/of-another", params=identity), 409, "SampleConflict")
        assert told.startswith("key 'of-another': expected")
        assert str(tmp_path) not in told
        identity = {"identity": json.dumps({"request": "a", "tokens": "b"})}
        assert c.get(f"{url}/of-another", params=identity).status_code == 200
        told = error(c.get(f"{url}/damaged"), 500, "IntegrityError")
        assert str(tmp_path) not in told


def test_an_object_that_is_deleted_before_it_is_read_is_not_named_as_in_the_store(tmp_path, monkeypatch):
    store_sample(tmp_path, random_sample("k"))
    read = states_file.StatesFile.piece

    def piece(self: Any, i: int) -> Any:
        (tmp_path / "k.safetensors").unlink(missing_ok=True)
        return read(self, i)

    monkeypatch.setattr(states_file.StatesFile, "piece", piece)
    with client(outer_server(tmp_path)) as c:
        told = error(c.get("/v1/hidden_states/k"), 404, "NotFound")
    assert "key 'k'" in told
    assert str(tmp_path) not in told


def test_an_error_after_the_beginning_cuts_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(states_file, "PIECE_BYTES", 1)
    store_sample(tmp_path, random_sample("k", 70))
    object_ = tmp_path / "k.safetensors"
    object_.write_bytes(object_.read_bytes()[:-1] + b"\x55")
    with client(outer_server(tmp_path)) as c, pytest.raises(Exception, match=r"crc|checksum"):
        c.get("/v1/hidden_states/k")


@pytest.fixture
def replaced(tmp_path, monkeypatch):
    """A function that sets what replaces the object of ``k`` before its third piece is read."""
    monkeypatch.setattr(states_file, "PIECE_BYTES", 1)
    read = states_file.StatesFile.piece
    calls = []

    def piece(self: Any, i: int) -> Any:
        if i == 2 and calls:
            (tmp_path / "k.safetensors").unlink()
            calls.pop()()
        return read(self, i)

    monkeypatch.setattr(states_file.StatesFile, "piece", piece)
    yield calls.append
    assert not calls


def test_an_object_that_is_stored_anew_while_it_streams_is_read_on(tmp_path, replaced):
    """A server changes the expiry of a key that is used again. The header's length may change."""
    identity = {"request": "a", "tokens": "b"}
    sample = store_sample(tmp_path, random_sample("k", 70), identity=identity, expires=4e9)
    replaced(lambda: store_sample(tmp_path, sample, identity=identity, expires=4e9 + 0.123456, tokens={"of": 70}))
    with client(outer_server(tmp_path)) as c:
        assert same(c.get("/v1/hidden_states/k").content, sample)


def test_an_object_that_is_stored_anew_in_other_pieces_ends_the_answer(tmp_path, replaced):
    """By a server with another block size. Rows of its second piece would be at the place of other rows."""
    about = {"identity": {"request": "a", "tokens": "b"}, "expires": 4e9}
    sample = random_sample("k", 40, chunk_tokens=24)  # pieces of 24 and 16 tokens, then of 16, 16 and 8
    store_sample(tmp_path, sample, codec="split", **about)
    replaced(lambda: store_sample(tmp_path, replace(sample, chunk_tokens=16), codec="split", **about))
    with client(outer_server(tmp_path)) as c, pytest.raises(FormatError):  # the server closes the connection
        c.get("/v1/hidden_states/k")


@pytest.mark.parametrize("other", [False, True])
def test_an_expired_sample_that_is_stored_while_another_streams_begins_no_second_answer(tmp_path, replaced, other):
    """The renewed sample, or the sample of another request with this key, has expired before the read goes on."""
    identity = {"request": "a", "tokens": "b"}
    sample = store_sample(tmp_path, random_sample("k", 70), identity=identity, expires=4e9)
    stored = random_sample("k", 50, seed=3) if other else sample
    of = {"request": "c", "tokens": "d"} if other else identity
    replaced(lambda: store_sample(tmp_path, stored, identity=of, expires=1000.5, tokens={"of": 70}))
    with client(outer_server(tmp_path)) as c:
        if other:
            with pytest.raises(FormatError):  # the server closes the connection
                c.get("/v1/hidden_states/k")
        else:
            assert same(c.get("/v1/hidden_states/k").content, sample)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("", 400),
        ("k" * 1049, 400),
        ("%ff", 400),
        ("k?tokens=1", 400),
        ("k?tokens=0:9:2", 400),
        ("k?layers=", 400),
        ("k?layers=-1", 400),
        ("k?layers=99", 400),
        ("k?points=", 400),
        ("k?wait=301", 400),
        ("k?wait=nan", 400),
        ("k?wait=-1", 400),
        ("k?identity=1", 400),
        (f"k?identity=%7B%22a%22:%22{'b' * 2000}%22%7D", 400),  # each look for the sample would show it
        ("k?identity=%7B%7D", 400),
        ("k?other=1", 400),
        ("k?layers=2&layers=15", 400),
        ("k?layers=2,15,2", 400),
        ("k?layers=2,02", 400),
        ("k?points=hidden_states,hidden_states", 400),
        ("..%2Fsecret", 404),
        ("%2E%2E/secret", 404),
        ("%2Fetc%2Fpasswd", 404),
        ("secret%00", 404),
        ("%2E%2E", 404),
        ("run.json", 404),
        ("K", 404),
    ],
)
def test_wrong_keys_and_parameters_are_refused_and_no_path_leaves_the_prefix(tmp_path, path, status):
    store_sample(tmp_path, random_sample("secret"))
    (tmp_path / "prefix").mkdir()
    store_sample(tmp_path / "prefix", random_sample("k"))
    with client(outer_server(tmp_path / "prefix")) as c:
        error(c.get(f"/v1/hidden_states/{path}"), status, "ConfigError" if status == 400 else "NotFound")
        assert c.post("/v1/hidden_states/k", json={}).status_code == 405
        assert c.delete("/v1/hidden_states/k").status_code == 405


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("layer=2", "got the unknown parameter 'layer'. Remove it"),
        ("layers=2&layers=15", "expected each parameter once, got 'layers' 2 times. Give it once"),
        ("layers=2,15,2", "expected each value once, got '2,15,2'. Remove the repeated ones"),
        ("layers=last", "got 'last'. Use numbers of stored layers"),
    ],
)
def test_an_unknown_parameter_and_a_repeated_one_have_other_messages(tmp_path, query, message):
    store_sample(tmp_path, random_sample("k"))
    with client(outer_server(tmp_path)) as c:
        assert error(c.get(f"/v1/hidden_states/k?{query}"), 400, "ConfigError").endswith(message)


def test_each_choice_of_an_answer_has_its_own_states(tmp_path):
    server = outer_server(tmp_path, delay=0.2)
    with client(server) as c:
        answer = c.post("/v1/completions", json={**INLINE, "prompt": ["One.", "Two."], "n": 2})
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) == len(answer.content)
        said = answer.json()
        assert (said["id"], said["kv_transfer_params"]) == ("cmpl-1", None)
        for i, choice in enumerate(said["choices"]):
            assert (choice["index"], choice["text"], choice["finish_reason"]) == (i, "é\u2028", "length")
            states = choice["hidden_states"]
            assert same(base64.b64decode(states["safetensors"], validate=True), server.stored[states["key"]])
            assert c.get(f"/v1/hidden_states/{states['key']}").status_code == 200
        keys = [choice["hidden_states"]["key"] for choice in said["choices"]]
        base = keys[0]
        assert keys == [base, f"{base}-n1", f"{base}-p1", f"{base}-p1-n1"]
        body = json.loads(server.seen[0])
        assert "hidden_states_inline" not in body
        assert body["kv_transfer_params"] == {"hidden_states_key": base}
        again = c.post("/v1/completions", json=INLINE).json()["choices"][0]["hidden_states"]["key"]
        assert again != base  # no request gets another request's states
        token_ids = c.post("/v1/completions", json={**INLINE, "prompt": [[1, 2], [3]]}).json()["choices"]
        assert len({choice["hidden_states"]["key"] for choice in token_ids}) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_a_chunk_for_each_choice_before_its_end(tmp_path, path):
    server = outer_server(tmp_path, delay=0.1)
    asked = {**INLINE, "stream": True, "n": 3}
    if "chat" in path:
        del asked["prompt"]
    with client(server) as c:
        plain = c.post(path, json={**asked, "hidden_states_inline": False}).text.split("\n\n")
        events = c.post(path, json=asked).text.split("\n\n")
    assert plain[-2:] == events[-2:] == ["data: [DONE]", ""]
    assert events[: len(plain) - 2] == plain[:-2]
    ours = [json.loads(event.removeprefix("data: ")) for event in events[len(plain) - 2 : -2]]
    assert len(ours) == 3
    first = json.loads(plain[0].removeprefix("data: "))
    for i, chunk in enumerate(ours):
        assert {name: chunk[name] for name in ("id", "object", "created", "model")} == {
            name: first[name] for name in ("id", "object", "created", "model")
        }
        (choice,) = chunk["choices"]
        assert (choice["index"], choice["finish_reason"]) == (i, None)
        assert ("delta" in choice) == ("chat" in path)
        states = choice["hidden_states"]
        assert same(base64.b64decode(states["safetensors"]), server.stored[states["key"]])


def test_a_stream_that_fails_has_no_states(tmp_path):
    with client(outer_server(tmp_path, fail_stream=True)) as c:
        answer = c.post("/v1/completions", json={**INLINE, "stream": True}).text
    assert "the engine died" in answer
    assert answer.endswith("data: [DONE]\n\n")
    assert "safetensors" not in answer


def test_answers_over_the_limit_are_refused_and_their_samples_can_be_fetched(tmp_path):
    server = outer_server(tmp_path, hsx={"inline_bytes": 1 << 10})
    with client(server) as c:
        told = error(c.post("/v1/completions", json=INLINE), 413, "AnswerTooLarge")
        assert "at most 1024 bytes" in told
        path = told.partition("get ")[2]
        assert same(c.get(path).content, next(iter(server.stored.values())))
        *_, refused, done, end = c.post("/v1/completions", json={**INLINE, "stream": True}).text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert json.loads(refused.removeprefix("data: "))["error"]["type"] == "AnswerTooLarge"
    # The limit applies to an answer, not to a choice. Each choice alone is smaller.
    one = 37 * 3 * 24 * 2 + 1500
    with client(outer_server(tmp_path, hsx={"inline_bytes": one})) as c:
        assert c.post("/v1/completions", json=INLINE).status_code == 200
        assert "choice 1" in error(c.post("/v1/completions", json={**INLINE, "n": 2}), 413, "AnswerTooLarge")


def test_states_that_are_not_stored_in_time_are_a_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(inline_answers, "_WAIT", 0.2)
    with client(outer_server(tmp_path, stores=False)) as c:
        error(c.post("/v1/completions", json=INLINE), 504, "Timeout")


def test_a_sample_that_fails_is_the_answers_error(tmp_path):
    with client(outer_server(tmp_path, fails="not finite")) as c:
        assert "not finite" in error(c.post("/v1/completions", json=INLINE), 424, "SampleFailed")
        events = c.post("/v1/completions", json={**INLINE, "stream": True}).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["type"] == "SampleFailed"
    assert events[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"hidden_states_inline": "yes"}, "hidden_states_inline"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"n": "2"}, "n"),
        ({"n": 2.0}, "n"),
        ({"n": True}, "n"),
        ({"prompt": ["12", 3]}, "prompt"),
        ({"prompt": [3, "12"]}, "prompt"),
        ({"prompt": [1.0, 2.0]}, "prompt"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params"),
        ({"kv_transfer_params": {"hidden_states_key": "k"}}, "kv_transfer_params.hidden_states_key"),
        ({"kv_transfer_params": {"hidden_states_path": "a/b"}}, "kv_transfer_params.hidden_states_path"),
        ({"kv_transfer_params": {"hidden_states_save": False}}, "kv_transfer_params.hidden_states_save"),
        ({"kv_transfer_params": {"hidden_states_tokens": "first"}}, "kv_transfer_params.hidden_states_tokens"),
        ({"kv_transfer_params": {"hidden_states_token": "last"}}, "kv_transfer_params.hidden_states_token"),
    ],
)
def test_parameters_that_no_answer_supports_are_refused_before_the_engine_computes(tmp_path, more, param):
    server = outer_server(tmp_path)
    with client(server) as c:
        answer = c.post("/v1/completions", json={**INLINE, **more})
        error(answer, 400, "ConfigError")
        assert answer.json()["error"]["param"] == param
        assert server.seen == []
        assert error(c.post("/v1/responses", json=INLINE), 400, "ConfigError")
        assert server.seen == []


@pytest.mark.parametrize(
    ("params", "behaviour", "param"),
    [
        ({"hidden_states_layers": [99]}, {}, "hidden_states_layers"),
        ({"hidden_states_layers": [15]}, {}, "hidden_states_layers"),
        ({"hidden_states_points": {"hidden_states": [15]}}, {}, "hidden_states_points"),
        ({"hidden_states_points": {"hidden_states": "all", "q": "all"}}, {}, "hidden_states_points"),
        ({"hidden_states_points": "most"}, {}, "hidden_states_points"),
        ({"hidden_states_loss_mask": [1, 0]}, {}, "hidden_states_loss_mask"),
        ({"hidden_states_tokens": [37, 50]}, {}, "hidden_states_tokens"),
        ({"hidden_states_tokens": "loss_mask"}, {}, "hidden_states_tokens"),
        ({"hidden_states_tokens": "last"}, {"refused": {"hidden_states_tokens": "why"}}, "hidden_states_tokens"),
    ],
)
def test_a_parameter_that_the_connector_refused_is_an_error_not_other_states(tmp_path, params, behaviour, param):
    with client(outer_server(tmp_path, **behaviour)) as c:
        answer = c.post("/v1/completions", json={**INLINE, "kv_transfer_params": params})
        error(answer, 400, "ConfigError")
        assert answer.json()["error"]["param"] == f"kv_transfer_params.{param}"


def test_a_selection_without_tokens_is_an_error_in_a_stream_too(tmp_path):
    """The connector then stores all tokens. A stream does not have what it refused."""
    asked = {**INLINE, "stream": True, "kv_transfer_params": {"hidden_states_tokens": [37, 50]}}
    with client(outer_server(tmp_path)) as c:
        events = c.post("/v1/completions", json=asked).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["param"] == "kv_transfer_params.hidden_states_tokens"


def test_an_inline_answer_has_the_requested_layers_and_tokens(tmp_path):
    params = {"hidden_states_layers": [15], "hidden_states_loss_mask": [1, 0], "hidden_states_tokens": "last"}
    server = outer_server(tmp_path, layers=(15,), tokens=1, attached={"loss_mask": np.ones(1, np.uint8)})
    with client(server) as c:
        answer = c.post("/v1/completions", json={**INLINE, "kv_transfer_params": params}).json()
    key = answer["choices"][0]["hidden_states"]["key"]
    assert json.loads(server.seen[0])["kv_transfer_params"] == {**params, "hidden_states_key": key}


@pytest.mark.parametrize(("mask", "status"), [([1, 0], 200), ([1, 0, 1], 400)])
@pytest.mark.parametrize("meta", [{"tokens": {"of": 2}}, {"tokens": {"of": 5}, "prompt_tokens": 2}])
def test_a_mean_is_stored_without_its_loss_mask(tmp_path, mask, status, meta):
    params = {"hidden_states_tokens": "mean", "hidden_states_loss_mask": mask}
    with client(outer_server(tmp_path, tokens=1, meta=meta)) as c:
        answer = c.post("/v1/completions", json={**INLINE, "kv_transfer_params": params})
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "kv_transfer_params.hidden_states_loss_mask"


def test_other_requests_and_refused_ones_pass_unchanged(tmp_path):
    server = outer_server(tmp_path)
    with client(server) as c:
        bodies = [
            b'{"model":"m" , "n":1,"prompt":"x"}',
            b'{"model":"m","prompt":"hidden_states_inline"}',
            b'{"model":"m","hidden_states_inline":false}',
            b'{"model":"m","hidden_states_inline":null}',
        ]
        for body in bodies:
            assert c.post("/v1/completions", content=body).json()["choices"]
        assert server.seen == bodies
        answer = c.post("/v1/completions", json={**INLINE, "model": "none"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such model")
        answer = c.post("/v1/completions", json={**INLINE, "model": "gone"})
        assert (answer.status_code, answer.json()) == (200, None)
    with client(server, raise_server_exceptions=False) as c:  # vLLM refuses these
        for body in (
            b"\xff hidden_states_inline",
            b'["hidden_states_inline"]',
            b"[" * 100_000 + b"hidden_states_inline",
        ):
            c.post("/v1/completions", content=body)
            assert server.seen[-1] == body


@pytest.mark.parametrize(
    ("method", "path", "body"), [("GET", "/v1/hidden_states/k", None), ("POST", "/v1/completions", INLINE)]
)
def test_a_disconnected_clients_wait_ends(tmp_path, method, path, body):
    async def run() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(0.2)
            return {"type": "http.disconnect"}

        async with asyncio.timeout(20):
            await call(outer_server(tmp_path, stores=False), method, path, body, receive, send)
        return sent

    assert asyncio.run(run()) == []


@pytest.fixture
def few_objects():
    """Hide all objects of before from the collector: ``opened`` else visits millions, of torch and vLLM."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_requests_that_wait_for_memory_hold_none(tmp_path):
    store_sample(tmp_path, random_sample("k", 64))

    async def run() -> None:
        source = sample_source.SampleSource(connector_settings(outer_server(tmp_path).app.state.vllm_config))
        taken: list[int] = []

        async def answer() -> None:
            async with source.held("k", states_file.Range(), wait=0) as file:
                taken.append(file.size)

        async with source.memory.hold(1 << 40):
            waiting = [asyncio.create_task(answer()) for _ in range(24)]
            async with asyncio.timeout(30):
                while source._waiting or not source.memory._turn.locked():
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert opened() == 0
        await asyncio.gather(*waiting)
        assert len(taken) == 24

    asyncio.run(run())


def opened() -> int:
    gc.collect()
    return sum(isinstance(one, states_file.StatesFile) for one in gc.get_objects())


@pytest.mark.usefixtures("few_objects")
def test_an_answer_opens_one_sample_at_a_time_and_none_while_it_waits_for_memory(tmp_path, monkeypatch):
    """A sample's metadata takes many times its bytes once it is decoded."""
    server, most = outer_server(tmp_path), 0
    load = inline_answers._Answer._load

    async def count(self: Any, *args: Any) -> Any:
        nonlocal most
        most = max(most, opened())
        return await load(self, *args)

    monkeypatch.setattr(inline_answers._Answer, "_load", count)

    async def never() -> Any:
        await asyncio.Event().wait()

    async def drop(_: Any) -> None:
        pass

    async def run() -> None:
        await call(server, "POST", "/v1/completions", INLINE, never, drop)
        source = next(r.app._source for r in server.app.router.routes if r.path == "/v1/completions")
        async with source.memory.hold(1 << 40):
            posts = [
                asyncio.create_task(call(server, "POST", "/v1/completions", {**INLINE, "n": n}, never, drop))
                for n in (1, 5, 5)
            ]
            async with asyncio.timeout(30):
                while len(source.memory._turn._waiters or ()) < 2:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert opened() == 0
        await asyncio.gather(posts[1])
        await asyncio.gather(*posts)

    asyncio.run(run())
    assert 1 <= most <= 3  # at most one of each of three requests


@pytest.mark.traced
@pytest.mark.parametrize("unit", ["[]", '{"":0}', "[" * 70 + "]" * 70, '{"":' * 70 + "0" + "}" * 70, '"é"', "1.5"])
def test_decoded_metadata_counts_as_memory_of_an_answer(tmp_path, unit):
    metadata = {"": json.loads(f"[{','.join([unit] * (60_000 // len(unit)))}]")}
    text = json.dumps(metadata)
    trace_memory()
    kept = json.loads(text)
    nbytes = tracemalloc.get_traced_memory()[0]
    assert kept == metadata
    store_sample(tmp_path, random_sample("k"), metadata=metadata)
    with object_sample(open_store(str(tmp_path)), "k.safetensors") as sample:
        assert states_file.StatesFile(sample, states_file.Range()).loading_bytes >= nbytes


@pytest.mark.traced
def test_decoded_headers_count_as_memory_of_an_answer(tmp_path):
    store_sample(tmp_path, random_sample("k", 4000, layer_ids=range(40), hidden_size=1, chunk_tokens=8))
    trace_memory()
    with object_sample(open_store(str(tmp_path)), "k.safetensors") as sample:
        file = states_file.StatesFile(sample, states_file.Range(tokens=(0, 1)))
        assert 10 << 10 < tracemalloc.get_traced_memory()[0] <= file.loading_bytes


def test_a_token_of_a_large_chunk_counts_the_whole_chunk_as_memory(tmp_path):
    store_sample(tmp_path, random_sample("k", 4096, hidden_size=256, chunk_tokens=4096))
    with object_sample(open_store(str(tmp_path)), "k.safetensors") as sample:
        assert states_file.StatesFile(sample, states_file.Range(tokens=(0, 1))).loading_bytes >= 4096 * 256 * 2


def test_requests_that_wait_look_for_their_samples_at_a_bounded_rate(tmp_path, monkeypatch):
    """Waiting requests share threads and process with requests that do not wait."""
    monkeypatch.setattr(sample_source, "LONGEST_PAUSE", 0.01)
    looks = []
    look = sample_source.SampleSource._look

    def count(self: Any, *args: Any) -> Any:
        looks.append(1)
        return look(self, *args)

    monkeypatch.setattr(sample_source.SampleSource, "_look", count)

    async def run() -> None:
        source = sample_source.SampleSource(connector_settings(outer_server(tmp_path).app.state.vllm_config))
        waiting = [
            asyncio.create_task(source.find(f"k{i}", states_file.Range(), wait=2, identity=None)) for i in range(50)
        ]
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, Refusal) and one.status == 404 for one in found)

    asyncio.run(run())
    # One at once, one after 20 ms, and one at the end: fifty requests share 20 looks a second from then on.
    assert len(looks) <= 50 * 3


def test_a_request_that_waits_looks_soon_after_the_others_have_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_source, "LONGEST_PAUSE", 0.05)
    source = sample_source.SampleSource(connector_settings(outer_server(tmp_path).app.state.vllm_config))

    async def run() -> None:
        source._waiting = 10_000
        mine = asyncio.create_task(source.find("k", states_file.Range(), wait=60, identity=None))
        await asyncio.sleep(0.3)
        store_sample(tmp_path, random_sample("k"))
        await asyncio.sleep(0.3)
        assert not mine.done()
        source._waiting = 1
        await asyncio.wait_for(mine, 20)

    asyncio.run(run())


def test_a_head_reads_no_more_than_it_must_to_know_the_status(tmp_path, monkeypatch):
    monkeypatch.setattr(states_file, "PIECE_BYTES", 1)
    store_sample(tmp_path, random_sample("k", 640, hidden_size=64))
    pieces: list[int] = []
    read = states_file.StatesFile.piece

    def piece(self: Any, i: int) -> Any:
        pieces.append(i)
        return read(self, i)

    monkeypatch.setattr(states_file.StatesFile, "piece", piece)
    with client(outer_server(tmp_path)) as c:
        head = c.head("/v1/hidden_states/k")
        assert pieces == [1]
        assert head.headers["content-length"] == str(len(c.get("/v1/hidden_states/k").content))
    assert len(pieces) > 3


def test_the_body_of_a_get_is_not_kept(tmp_path):
    store_sample(tmp_path, random_sample("k"))

    async def run() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(0.001)
            return {"type": "http.request", "body": b"x", "more_body": True}  # never ends

        async with asyncio.timeout(20):
            await call(outer_server(tmp_path), "GET", "/v1/hidden_states/k", None, receive, send, more=True)
        return sent

    assert asyncio.run(run())[0]["status"] == 200


def test_a_hanging_store_does_not_block_the_end_of_the_process(tmp_path):
    source = sample_source.SampleSource(connector_settings(outer_server(tmp_path).app.state.vllm_config))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("hsx-answer")]
    assert threads
    assert all(thread.daemon for thread in threads)
    del source


def test_each_route_of_vllm_that_takes_our_parameters_is_known():
    """Otherwise such a route would ignore ``hidden_states_inline``, and the client would wait for states for ever."""
    from vllm.entrypoints.generate.api_router import register_generate_api_routers
    from vllm.entrypoints.scale_out.token_in_token_out import api_router as generate

    app = FastAPI()
    register_generate_api_routers(app)
    app.include_router(generate.router)
    taking = set()
    for route in app.router.routes:
        model = getattr(getattr(getattr(route, "body_field", None), "field_info", None), "annotation", None)
        if "kv_transfer_params" in getattr(model, "model_fields", {}):
            taking.add(route.path)
    assert {"/v1/completions", "/v1/messages", "/inference/v1/generate"} <= taking
    assert {path for path in taking if not path.endswith("render")} <= middleware._WITH_STATES | middleware._WITHOUT


def test_memory_is_given_in_order_and_never_beyond_the_limit(monkeypatch):
    async def run() -> None:
        limit, held, most = MemoryLimit(4 << 20), 0, 0

        async def answer(units: int) -> None:
            nonlocal held, most
            async with limit.hold(units << 20):
                held += min(units, 4)
                most = max(most, held)
                await asyncio.sleep(0.001)
                held -= min(units, 4)

        await asyncio.gather(*(answer(1 + i % 6) for i in range(60)))
        assert most == 4
        async with limit.hold(1 << 20):
            waiting = asyncio.create_task(answer(4))  # has taken three of its four units
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            monkeypatch.setattr(sample_source, "_STORE_SECONDS", 0.05)
            with pytest.raises(Refusal, match="other answers hold them"):
                async with limit.hold(4 << 20):
                    pass
            async with limit.hold(3 << 20):
                pass

    asyncio.run(run())


def test_a_hanging_store_gives_the_status_unavailable(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_source, "_STORE_SECONDS", 0.1)
    held = threading.Event()
    monkeypatch.setattr(sample_source, "open_store", lambda *_, **__: held.wait(20))
    with client(outer_server(tmp_path)) as c:
        answer = c.get("/v1/hidden_states/k")
        held.set()
        error(answer, 503, "Unavailable")
        assert answer.headers["retry-after"]


def test_the_connectors_settings_are_found_or_the_server_does_not_start(tmp_path):
    ours = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    several = {"connectors": [{"kv_connector": "OffloadingConnector"}, ours]}

    def config(name: str, extra: Any) -> Any:
        transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)
        return SimpleNamespace(kv_transfer_config=transfer)

    assert connector_settings(config("MultiConnector", several)).output == str(tmp_path)
    for wrong in (None, SimpleNamespace(kv_transfer_config=None), config("OffloadingConnector", {})):
        with pytest.raises(ConfigError, match="HiddenStatesConnector"):
            connector_settings(wrong)
    with pytest.raises(ConfigError, match="memory"):
        connector_settings(config("HiddenStatesConnector", {"shared_storage_path": "memory://x"}))
    server = outer_server(tmp_path, extra={"shared_storage_path": "memory://x"})
    with pytest.raises(ConfigError, match="memory"), client(server):  # the lifespan's start fails
        pass
    # Without a lifespan the first request fails: the server does not answer without its routes.
    with pytest.raises(ConfigError, match="memory"):
        client(server).get("/health")


@pytest.mark.parametrize("prefix", ["/", "/v1/", "/api/"])
def test_a_path_prefix_that_disables_vllms_authentication_is_refused(tmp_path, prefix):
    store_sample(tmp_path, random_sample("k"))
    server = outer_server(tmp_path)
    server.app.root_path = prefix
    with pytest.raises(ConfigError, match="--root-path: expected a path without / at its end"):
        TestClient(server.app).get("/v1/hidden_states/k")
    server = outer_server(tmp_path)
    server.app.root_path = prefix.rstrip("/")
    assert TestClient(server.app).get(f"{server.app.root_path}/v1/hidden_states/k").status_code == 401
    server.app.root_path = None  # as vLLM sets it without --root-path
    assert TestClient(server.app).get("/v1/hidden_states/k").status_code == 401


@pytest.mark.parametrize("prefix", ["/v", "/v1/hidden_states/ab", "/v1/completion"])
def test_a_path_prefix_within_the_routes_paths_is_refused(tmp_path, prefix):
    """Without the refusal vLLM's authentication lets GET /v1/hidden_states/abc pass: it removes the prefix as text."""
    store_sample(tmp_path, random_sample("abc"))
    server = outer_server(tmp_path)
    server.app.root_path = prefix
    with pytest.raises(ConfigError, match="--root-path: expected a path without"):
        TestClient(server.app).get("/v1/hidden_states/abc")


def test_the_file_is_what_the_reader_loads(tmp_path):
    store_sample(tmp_path, random_sample("k"), codec="zstd")
    loaded = hsx_dist.load_hidden_states(str(tmp_path / "k.safetensors"), framework="torch")
    with client(outer_server(tmp_path)) as c:
        found = safetensors.torch.load(c.get("/v1/hidden_states/k").content)
    for name in ("hidden_states", "token_ids", "layer_ids"):
        assert found[name].dtype == loaded[name].dtype
        assert torch.equal(found[name].view(torch.uint8), loaded[name].contiguous().view(torch.uint8))
