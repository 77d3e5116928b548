"""Logits and top-k of stored states, against transformers' in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hsx_dist import LogitLens, open_run
from hsx_dist.errors import ConfigError
from hsx_dist.reading import Sample
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample
from tests.harness.hooked_model import HookedModel, tiny_model
from tests.harness.points import computed_sample, run_of
from tests.harness.runs import store_run
from tests.unit.model_parts.test_model_end import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

N, H, V = 5, 64, 512
IDS = np.random.default_rng(0).integers(3, V, 70).tolist()
#: Points of a sample, by the point that the model's final logits are computed from.
STORED: dict[str, dict[str, Any]] = {
    "final_ln": {"final_ln": (0,), "hidden_states": (0,)},
    "resid_final": {"resid_final": (0,), "resid_mid": (0, 3), "resid_pre": range(N)},
    "hidden_states": {"hidden_states": range(N + 1)},
}


class Computed:
    """A tiny model, all its points for ``IDS``, and its logits ``[T, V]``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hooked = HookedModel(folder)
        self.model = hooked.model
        self.rows = hooked.rows(IDS)
        self.rows |= {("hidden_states", i): self.rows["resid_pre", i] for i in range(N)}
        self.rows["hidden_states", N] = self.rows["resid_final", 0]
        self.logits = self.lens(self.rows["resid_final", 0])

    @torch.inference_mode()
    def lens(self, states: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(self.model.model.norm(states)).clone()

    def sample(self, stored: str) -> Sample:
        made = computed_sample("a", IDS, self.rows, {name: tuple(of) for name, of in STORED[stored].items()})
        return run_of(made.segments(0))["a"]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Computed:
    return Computed(tiny_model("llama", tmp_path_factory.mktemp("model")))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stored", STORED)
def test_logits_and_top_k_equal_those_of_the_model(
    stored: str, computed: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in many blocks, which begin at the store's chunks."""
    with torch.inference_mode():
        close(computed.model(torch.tensor([IDS])).logits[0], computed.logits)
    lens, sample = LogitLens(str(computed.folder)), computed.sample(stored)
    right = torch.log_softmax(computed.logits, -1)
    for read, held in ((1 << 20, 1 << 20), (2 * 16 * H * 4, 5 * V * 4)):
        monkeypatch.setattr("hsx_dist.model_parts.logit_lens._READ_BYTES", read)
        monkeypatch.setattr("hsx_dist.model_parts.model_end._LOGITS_BYTES", held)
        ids, logprobs = lens.top_k(sample, 7)
        assert (ids.shape, ids.dtype, logprobs.dtype) == ((70, 7), torch.int64, torch.float32)
        close(logprobs, right.topk(7).values)
        close(right.gather(1, ids), logprobs)
        blocks = list(lens.blocks(sample, tokens=(3, 70)))
        assert all(logits.dtype == torch.float32 and logits.nbytes <= held for _, logits in blocks)
        assert [start for start, _ in blocks] == np.cumsum([3, *(len(x) for _, x in blocks)])[:-1].tolist()
        close(torch.cat([logits for _, logits in blocks]), computed.logits[3:])
        close(lens.logits(sample, slice(-2, None)), computed.logits[-2:])
    assert [start for start, _ in blocks] == [3, 8, 13, 18, 23, 28, 32, 37, 42, 47, 52, 57, 62, 64, 69]
    assert lens.logits(sample, (5, 5)).shape == (0, V)
    assert lens.top_k(sample, 5, tokens=(5, 5)).ids.shape == (0, 5)
    assert lens.top_k(sample, 10 * V).ids.shape == (70, V)


def test_every_place_of_the_stream_goes_through_the_norm_and_the_head(computed: Computed) -> None:
    lens = LogitLens(str(computed.folder))
    streams, states = computed.sample("resid_final"), computed.sample("hidden_states")
    layers = [5, 0, 3]
    right = torch.stack([computed.lens(computed.rows["hidden_states", k]) for k in layers], 1).log_softmax(-1)
    # By the same layer ids, for hidden states and for the stream under its other names.
    for sample in (streams, states):
        ids, logprobs = lens.top_k(sample, 3, layers=layers, tokens=(10, 30))
        assert ids.shape == (20, 3, 3)
        close(logprobs, right[10:30].topk(3).values)
        close(right[10:30].gather(2, ids), logprobs)
    made = computed_sample("a", IDS, computed.rows, {"hidden_states": (0,), "resid_pre": (3,)})
    close(lens.logits(run_of(made.segments(0))["a"], (0, 9), layer=3), computed.lens(computed.rows["resid_pre", 3])[:9])
    close(lens.logits(streams, (0, 9), point="resid_mid", layer=3), computed.lens(computed.rows["resid_mid", 3])[:9])
    close(lens.logits(streams, (0, 9), point="resid_pre", layer=2), computed.lens(computed.rows["resid_pre", 2])[:9])
    close(lens.logits(states, (0, 9), point="hidden_states"), computed.logits[:9])


def test_points_without_logits_are_refused(computed: Computed, tmp_path: Path) -> None:
    lens = LogitLens(str(computed.folder))
    made = computed_sample("a", IDS, computed.rows, {"mlp_out": (1,), "resid_mid": (1,)})
    sample = run_of(made.segments(0))["a"]
    for message, asked in (
        ("point: expected a point of the residual stream, hidden_states, .* got 'mlp_out'", {"point": "mlp_out"}),
        ("layer: expected a layer of point 'resid_mid', got none", {"point": "resid_mid"}),
        (r"layers: expected layers of point 'resid_mid' among \[1\], got \[4\]", {"point": "resid_mid", "layers": [4]}),
        ("expected one of the points mlp_out, resid_mid, got 'hidden_states'", {}),
        ("got 'resid_pre'", {"layers": [2]}),
        ("k: expected at least 1, got 0", {"k": 0}),
        ("layers: expected at least one", {"layers": []}),
        ("expected consecutive tokens", {"point": "resid_mid", "layers": [1], "tokens": slice(0, 9, 2)}),
    ):
        with pytest.raises(ConfigError, match=message):
            lens.top_k(sample, **asked)
    store = open_store(str(tmp_path / "run"))
    states = RandomSample("a", np.zeros((4, 1, H), np.uint32), np.arange(4), (8,), "float32", 16)
    info = {"meaning": {"model": str(computed.folder), "layers": [8]}}
    store_run(store, [states], info=info, about={"num_hidden_layers": 8})
    run = open_run(store.url)
    with pytest.raises(
        ConfigError, match=r"sample 'a': expected one of .*which has 5 layers, got one of a model with 8"
    ):
        lens.top_k(run["a"])
    with pytest.raises(ConfigError, match="expected an id of the Hugging Face hub as the run's model"):
        LogitLens(run)  # a run does not name the reader's model folder
    with pytest.raises(ConfigError, match="model: expected a folder or an id"):
        LogitLens("")


def test_soft_caps_and_the_familys_norm_are_applied(tmp_path: Path) -> None:
    model = tiny("gemma2")
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0].clone()))
    ids = torch.arange(3, 15)
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    assert float(logits.abs().max()) <= 2  # the cap in its configuration
    model.save_pretrained(tmp_path)
    states = RandomSample("a", last[0][:, None].numpy().view(np.uint32), ids.numpy(), (2,), "float32", 16)
    store = open_store(str(tmp_path / "run"))
    store_run(store, [states])
    sample = open_run(store.url)["a"]
    lens = LogitLens(str(tmp_path))
    close(lens.logits(sample, (0, 12)), logits)
    close(lens.top_k(sample, 4).logprobs, logits.log_softmax(-1).topk(4).values)


def test_a_head_of_another_dtype_is_converted_in_pieces(
    computed: Computed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(computed.folder / "model.safetensors")
    save_file({name: x.bfloat16() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    copyfile(computed.folder / "config.json", tmp_path / "config.json")
    monkeypatch.setattr("hsx_dist.model_parts.model_end._HEAD_BYTES", 100 * H * 4)
    model = computed.model
    norm = computed.rows["resid_final", 0]
    norm = norm * torch.rsqrt(norm.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
    right = (norm * model.model.norm.weight.bfloat16().float()) @ model.lm_head.weight.bfloat16().float().T
    got = LogitLens(str(tmp_path)).logits(computed.sample("hidden_states"), (0, 70))
    close(got, right.detach())


def test_only_files_of_the_norm_and_the_head_are_downloaded_from_the_hub(
    computed: Computed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, here = tmp_path / "hub", tmp_path / "here"
    hub.mkdir()
    here.mkdir()
    weights = {}
    for name, tensor in load_file(computed.folder / "model.safetensors").items():
        weights[name] = f"{'end' if name in ('lm_head.weight', 'model.norm.weight') else 'rest'}.safetensors"
        if weights[name] == "end.safetensors":
            before = load_file(hub / weights[name]) if (hub / weights[name]).exists() else {}
            save_file({**before, name: tensor}, hub / weights[name])
    (hub / "rest.safetensors").write_bytes(b"not to be downloaded")
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    copyfile(computed.folder / "config.json", hub / "config.json")

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        for path in hub.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                copyfile(path, here / path.name)
        return str(here)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    lens = LogitLens("org/name")
    assert sorted(p.name for p in here.iterdir()) == ["config.json", "model.safetensors.index.json"]
    close(lens.logits(computed.sample("hidden_states"), (0, 70)), computed.logits)
    assert not (here / "rest.safetensors").exists()


PEAK = """
import resource, sys, torch
from hsx_dist import LogitLens, open_run
sample, lens = open_run(sys.argv[1])["a"], LogitLens(sys.argv[2])
lens.top_k(sample, 5, tokens=(0, 8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ids, _ = lens.top_k(sample, 5)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, *ids.shape)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tokens_times_the_vocabulary(tmp_path: Path) -> None:
    vocabulary, tokens, width = 60_000, 2500, 16
    save_file(
        {"model.norm.weight": torch.ones(width), "lm_head.weight": torch.randn(vocabulary, width)},
        tmp_path / "model.safetensors",
    )
    config = {"model_type": "llama", "rms_norm_eps": 1e-6, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    states = np.random.default_rng(0).standard_normal((tokens, 1, width), np.float32).view(np.uint32)
    store = open_store(str(tmp_path / "run"))
    store_run(store, [RandomSample("a", states, np.arange(tokens), (2,), "float32", 512)])
    done = subprocess.run(
        [sys.executable, "-c", PEAK, store.url, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    grown, *shape = map(int, done.stdout.split())
    assert shape == [tokens, 5]
    assert grown < 256 << 20 < tokens * vocabulary * 4 // 2
