"""The sparse autoencoder example at a small size, and the hooks' names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.train_sae import train_sae
from hsx_dist.errors import ConfigError
from hsx_dist.layers import hook_of_layer, point_of_hook
from hsx_dist.saelens import DataProvider, data_provider, sae_config
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample
from tests.harness.points import computed_sample, point_sample, run_of
from tests.harness.runs import store_run


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """States that are sums of two of twelve directions: channels are correlated."""
    path = str(tmp_path_factory.mktemp("run") / "run")
    directions = np.random.default_rng(0).standard_normal((12, 32))
    samples = []
    for i in range(16):
        rng = np.random.default_rng(i + 1)
        picks = rng.integers(12, size=(120, 2))
        states = (directions[picks] * rng.uniform(1, 3, (120, 2, 1))).sum(1).astype(np.float32)
        samples.append(RandomSample(f"s{i}", states[:, None].view(np.uint32), np.arange(120), (15,), "float32", 64))
    store_run(open_store(path), samples)
    return path


def test_the_loss_falls_and_below_that_of_shuffled_channels(url: str) -> None:
    whole, shuffled = (train_sae(url, 15, steps=150, batch=64, features=96, k=4, shuffled=s) for s in (False, True))
    assert np.mean(whole[-10:]) < 0.5 * np.mean(whole[:5])
    assert np.mean(whole[-10:]) < 0.7 * np.mean(shuffled[-10:])


def test_hooks_are_layers() -> None:
    states = ("hidden_states", 15)
    assert point_of_hook("blocks.14.hook_resid_post") == point_of_hook("blocks.15.hook_resid_pre") == states
    assert [point_of_hook(hook_of_layer(k))[1] for k in (0, 1, 15)] == [0, 1, 15]
    assert point_of_hook("blocks.3.hook_mlp_out") == ("mlp_out", 3)
    assert point_of_hook("blocks.3.attn.hook_z") == ("z", 3)
    for wrong in ("blocks.3.hook_mlp_in", "blocks.03.hook_resid_post", "blocks.3.hook_resid_post\n"):
        with pytest.raises(ConfigError, match="hook_name: expected"):
            point_of_hook(wrong)


def test_a_provider_gives_a_hook_or_hooks(url: str) -> None:
    hook = "blocks.14.hook_resid_post"
    assert next(data_provider(url, hook, 8)).shape == (8, 32)
    assert sae_config(url, hook)["d_in"] == 32
    assert {name: x.shape for name, x in next(data_provider(url, [hook], 8)).items()} == {hook: (8, 32)}
    two = ["blocks.15.hook_resid_pre", hook]  # two names of one layer
    same = next(data_provider(url, two, 8))
    assert list(same) == two
    assert np.array_equal(same[hook], same[two[0]])
    with pytest.raises(
        ConfigError, match=r"expected layer 4 of hidden_states \(blocks.3.hook_resid_post\), got \[15\]"
    ):
        data_provider(url, "blocks.3.hook_resid_post", 8)


@pytest.mark.parametrize("hooks", ["blocks.14.hook_resid_post", ["blocks.14.hook_resid_post"]])
def test_a_provider_resumes_at_the_next_batch(url: str, hooks: str | list[str]) -> None:
    def provider() -> DataProvider:
        return data_provider(url, hooks, 8, buffer_tokens=64)

    def batch(of: DataProvider) -> torch.Tensor:
        found = next(of)
        return found if isinstance(hooks, str) else found[hooks[0]]

    made = provider()
    for _ in range(300):  # more than an epoch of 240 batches
        batch(made)
    state = json.loads(json.dumps(made.state_dict()))
    expected = [batch(made) for _ in range(20)]
    resumed = provider()
    resumed.load_state_dict(state)
    assert all(torch.equal(batch(resumed), x) for x in expected)
    made.load_state_dict(state)  # also after iteration has begun
    assert torch.equal(batch(made), expected[0])
    fresh = provider()
    fresh.load_state_dict(provider().state_dict())  # before the first batch
    assert torch.equal(batch(fresh), batch(provider()))
    assert iter(fresh) is fresh


def test_hooks_of_points_give_whole_rows(tmp_path: Path) -> None:
    """``q`` has two shards of heads and the layers 3 and 7. ``mlp_out`` has layer 7 only."""
    made = point_sample("a", odd=False)
    run = run_of(made.segments(0), store=open_store(str(tmp_path)))
    rows = {(p, i): run["a"].point(p, i).flatten(1).float() for p, i in (("q", 3), ("q", 7), ("mlp_out", 7))}
    names = {
        "blocks.3.attn.hook_q": ("q", 3),
        "blocks.7.attn.hook_q": ("q", 7),
        "blocks.7.hook_mlp_out": ("mlp_out", 7),
    }
    for hook, place in names.items():
        batch = next(data_provider(run, hook, 37, data={"repeat": False}))
        order = [next(t for t, row in enumerate(rows[place]) if row.equal(own)) for own in batch]
        assert sorted(order) == list(range(37))
        assert sae_config(run, hook)["d_in"] == batch.shape[1] == (48 if place[0] == "q" else 24)
    for hooks in (list(names)[:2], list(names)[1:], list(names)):
        batch = next(data_provider(run, hooks, 37, data={"repeat": False}))
        order = [next(t for t, row in enumerate(rows[names[hooks[0]]]) if row.equal(own)) for own in batch[hooks[0]]]
        for hook in hooks[1:]:
            assert batch[hook].equal(rows[names[hook]][order])
    for asked in (lambda hook: data_provider(run, hook, 8), lambda hook: sae_config(run, hook)):
        with pytest.raises(ConfigError, match=r"expected layer 3 of mlp_out .* got \[7\]"):
            asked("blocks.3.hook_mlp_out")
        with pytest.raises(ConfigError, match=r"expected layer 3 of z .* got none of this point; the run has q, "):
            asked("blocks.3.attn.hook_z")


#: Layers of a model of 5, by the point that stores each: as the preset ``residual``, and mixed with hidden states.
STREAMS = {
    "resid": ({"resid_pre": (0, 2, 4), "resid_final": (0,)}, (0, 2, 4, 5)),
    "mixed": ({"resid_pre": (0, 4), "hidden_states": (2, 5)}, (0, 2, 4, 5)),
}


@pytest.mark.parametrize("stored", STREAMS)
def test_hooks_of_the_stream_are_found_under_its_other_names(stored: str, tmp_path: Path) -> None:
    points, layers = STREAMS[stored]
    rng = np.random.default_rng(0)
    stream = {k: rng.standard_normal((37, 24)).astype(np.float32) for k in range(6)}
    rows = {(p, k): stream[5 if p == "resid_final" else k] for p, of in points.items() for k in of}
    made = computed_sample("a", range(37), rows, points)
    run = run_of(made.segments(0), store=open_store(str(tmp_path)), about={"num_hidden_layers": 5})
    hooks = [hook_of_layer(k) for k in layers]
    batch = next(data_provider(run, hooks, 37, data={"repeat": False}))
    order = [next(t for t, row in enumerate(stream[0]) if np.array_equal(row, own)) for own in batch[hooks[0]]]
    assert sorted(order) == list(range(37))
    for hook, layer in zip(hooks, layers, strict=True):
        assert np.array_equal(batch[hook], stream[layer][order])
        assert sae_config(run, hook)["d_in"] == 24
        alone = next(data_provider(str(tmp_path), hook, 37, data={"repeat": False, "shuffle": False}))
        assert np.array_equal(np.sort(alone, 0), np.sort(stream[layer], 0))
    for asked in (lambda hook: data_provider(run, hook, 8), lambda hook: sae_config(run, hook)):
        with pytest.raises(ConfigError, match=r"expected layer 3 of (resid_pre|hidden_states) \(.*\), got \["):
            asked("blocks.3.hook_resid_pre")
