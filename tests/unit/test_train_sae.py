"""The example on sparse autoencoders at a small size, and the hooks' names."""

from __future__ import annotations

import numpy as np
import pytest

from examples.train_sae import train_sae
from hsx_dist.errors import ConfigError
from hsx_dist.layers import hook_of_layer, layer_of_hook
from hsx_dist.saelens import data_provider
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample
from tests.harness.runs import store_run


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """States that are sums of two of twelve directions: channels depend on one another."""
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
    assert layer_of_hook("blocks.14.hook_resid_post") == layer_of_hook("blocks.15.hook_resid_pre") == 15
    assert [layer_of_hook(hook_of_layer(k)) for k in (0, 1, 15)] == [0, 1, 15]
    for wrong in ("blocks.3.hook_mlp_out", "blocks.03.hook_resid_post", "blocks.3.hook_resid_post\n"):
        with pytest.raises(ConfigError, match="hook_name: expected"):
            layer_of_hook(wrong)


def test_a_provider_gives_a_hook_or_hooks(url: str) -> None:
    hook = "blocks.14.hook_resid_post"
    assert next(data_provider(url, hook, 8)).shape == (8, 32)
    assert {name: x.shape for name, x in next(data_provider(url, [hook], 8)).items()} == {hook: (8, 32)}
    with pytest.raises(ConfigError, match=r"\[4\] are not in"):
        data_provider(url, "blocks.3.hook_resid_post", 8)
