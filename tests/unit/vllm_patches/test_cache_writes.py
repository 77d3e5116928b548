"""Captured layers are counted, and direct writes put rows in the same places as vLLM."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.extract_hidden_states import basic_cache

from hsx_dist.errors import ConfigError
from hsx_dist.vllm_patches import cache_writes
from hsx_dist.vllm_patches.cache_writes import flat_rows, watch, write_rows
from tests.unit.vllm_patches.engine_config import engine_config

BLOCKS, LAYERS, BLOCK, HIDDEN = 7, 3, 4, 8


def empty(order: str, padding: int = 0) -> torch.Tensor:
    """A cache whose unwritten rows are recognizable. ``padding``: rows between two blocks."""
    per_block = (LAYERS * BLOCK + padding) * HIDDEN
    memory = torch.full((BLOCKS * per_block,), -1.0)
    inner = (BLOCK * HIDDEN, HIDDEN) if order == "LTH" else (HIDDEN, LAYERS * HIDDEN)
    return memory.as_strided((BLOCKS, LAYERS, BLOCK, HIDDEN), (per_block, *inner, 1))


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_cache_writes_equal_those_of_vllm(order: str, padding: int, dtype: torch.dtype) -> None:
    ours, theirs = empty(order, padding), empty(order, padding)
    slots = (torch.randperm((BLOCKS - 1) * BLOCK)[:17] + BLOCK).to(dtype)
    layers = [torch.randn(len(slots), HIDDEN) for _ in range(LAYERS)]
    write_rows(ours, slots, layers)
    basic_cache(torch.stack(layers, dim=1), theirs, slots.long())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_padding_is_written_to_the_unused_block() -> None:
    cache = empty("LTH")
    slots = torch.tensor([9, -1, -1])
    write_rows(cache, slots, [torch.ones(3, HIDDEN)] * LAYERS)
    assert (cache[2, :, 1] == 1).all()
    cache[2, :, 1] = -1
    assert (cache[1:] == -1).all()


def test_rows_with_an_odd_stride_are_refused() -> None:
    odd = torch.zeros(4 * 100).as_strided((2, 2, 4, HIDDEN), (100, 48, 11, 1))
    with pytest.raises(ValueError, match="multiples of the rows' length 8"):
        flat_rows(odd)


CAPTURED = (0, 2, 4)
HIDDEN_SIZE = 64  # of the tiny model


@pytest.fixture(scope="module")
def config(tiny_model_path: Path) -> Any:
    return engine_config(tiny_model_path, CAPTURED)


@pytest.fixture
def proposer(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own proposer of a V1 engine, set up as by its runner, with a cache of seven blocks."""
    from vllm.config import CUDAGraphMode, set_current_vllm_config
    from vllm.model_executor.models.extract_hidden_states import ExtractHiddenStatesModel
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

    monkeypatch.setattr(ExtractHiddenStatesProposer, "propose", ExtractHiddenStatesProposer.propose)
    monkeypatch.setattr(config.compilation_config, "static_forward_context", {})
    with set_current_vllm_config(config):
        made = ExtractHiddenStatesProposer(config, torch.device("cpu"))
        made.model = ExtractHiddenStatesModel(vllm_config=config)
    ((name, layer),) = config.compilation_config.static_forward_context.items()
    made.attn_layer_names = [name]
    made.attn_metadata_builder = made._build_attn_metadata_builder({name: layer})
    made.initialize_cudagraph_keys(CUDAGraphMode.NONE)
    layer.kv_cache = torch.full((BLOCKS, len(CAPTURED), BLOCK, HIDDEN_SIZE), -1.0, dtype=config.model_config.dtype)
    made.layer = layer
    return made


def watched(proposer: Any, config: Any, **settings: bool) -> torch.Tensor:
    for _ in range(2):  # several engines in one process
        watch(proposer.layer, proposer.layer.kv_cache, CAPTURED, config, **settings)
    return proposer.layer.kv_cache


def step(proposer: Any, layers: int = len(CAPTURED)) -> torch.Tensor:
    """Run a step of three tokens. The states of the k-th captured layer are k + 1."""
    return proposer.propose(
        num_speculative_tokens=1,
        sampled_token_ids=torch.tensor([[5, 6], [7, 8]]),
        target_hidden_states=[torch.full((3, HIDDEN_SIZE), k + 1.0).to(proposer.dtype) for k in range(layers)],
        common_attn_metadata=SimpleNamespace(slot_mapping=torch.tensor([4, 5, 6]), causal=True),
    )


@pytest.mark.parametrize("direct", [False, True])
def test_each_layer_gets_its_own_states(proposer, config, direct, monkeypatch):
    cache = watched(proposer, config, direct=direct)
    written = []
    monkeypatch.setattr(cache_writes, "write_rows", lambda *a: (written.append(a), write_rows(*a)))
    assert step(proposer).tolist() == [[5], [7]]
    assert len(written) == direct
    for k in range(len(CAPTURED)):
        assert (cache[1, k, :3] == k + 1).all()
    assert (cache[1, :, 3] == -1).all()
    assert (cache[2:] == -1).all()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_another_number_of_captured_layers_is_an_error_and_nothing_is_written(proposer, config, layers, direct):
    cache = watched(proposer, config, direct=direct)
    with pytest.raises(ConfigError, match=rf"expected 3 captured layers \(\[0, 2, 4\]\), got {layers}"):
        step(proposer, layers)
    assert (cache == -1).all()


def test_vllm_alone_repeats_one_layers_states(proposer):
    """The reason for counting layers. If this test fails, vLLM counts them itself."""
    step(proposer, 1)
    assert (proposer.layer.kv_cache[1, :, :3] == 1).all()


def test_the_v2_runner_counts_the_layers_itself():
    from vllm.v1.worker.gpu.spec_decode.extract_hidden_states import ExtractHiddenStatesSpeculator

    bare = object.__new__(ExtractHiddenStatesSpeculator)
    bare.num_hidden_states = 3
    batch = SimpleNamespace(idx_mapping=torch.tensor([0]))
    arguments = dict.fromkeys(inspect.signature(ExtractHiddenStatesSpeculator.propose).parameters)
    del arguments["self"]
    arguments |= {"input_batch": batch, "last_sampled": torch.zeros(1, 1), "aux_hidden_states": [torch.zeros(3, 4)]}
    with pytest.raises(ValueError, match="Expected 3 auxiliary hidden states, got 1"):
        bare.propose(**arguments)


def test_an_engine_with_another_connector_is_left_alone(proposer, config):
    watch(SimpleNamespace(), proposer.layer.kv_cache, CAPTURED, config, direct=True)  # ours, in this process
    step(proposer, 1)


def changed(config: Any, **attributes: Any) -> Any:
    """The fields of ``config`` that ``watch`` reads, some with other values."""
    return SimpleNamespace(
        **{"model_config": config.model_config, "parallel_config": config.parallel_config, **attributes}
    )


def test_direct_says_why_it_is_ignored(proposer, config, monkeypatch, caplog):
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

    cache = proposer.layer.kv_cache
    odd = torch.zeros(4 * 100).as_strided((2, 2, 4, HIDDEN), (100, 48, 11, 1))
    parallel = SimpleNamespace(data_parallel_size=2)
    for given, settings, others, why in (
        (cache, changed(config, use_v2_model_runner=True), [], "V2 model runner"),
        (cache, changed(config, parallel_config=parallel), [], "data parallel"),
        (odd, config, [], "multiples of the rows' length"),
        (cache, config, ["Example", "Other"], "Example, Other may save the cache layer by layer"),
    ):
        caplog.clear()
        watch(proposer.layer, given, CAPTURED, settings, direct=True, others=others)
        assert "cache_writes='direct' is ignored" in caplog.text
        assert why in caplog.text
        assert "not counted" not in caplog.text
        assert proposer.layer.hsx_watch.cache is None
    for change in (step, None):  # a method with other arguments, and none at all
        caplog.clear()
        if change is None:
            monkeypatch.delitem(sys.modules, ExtractHiddenStatesProposer.__module__)
        else:
            monkeypatch.setattr(ExtractHiddenStatesProposer, "propose", change)
        watch(proposer.layer, cache, CAPTURED, config, direct=True)
        assert "captured layers are not counted" in caplog.text
        assert "no proposer that hsx_dist knows" in caplog.text
        assert proposer.layer.hsx_watch.cache is None
