"""Rows put straight into the cache lie where vLLM's own writing puts them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.extract_hidden_states import basic_cache

from hsx_dist.connector.cache_writes import flat_rows, take_over, write_rows

BLOCKS, LAYERS, BLOCK, HIDDEN = 7, 3, 4, 8


def empty(order: str, padding: int = 0) -> torch.Tensor:
    """A cache in which rows that nobody wrote can be told; ``padding``: rows between two blocks."""
    per_block = (LAYERS * BLOCK + padding) * HIDDEN
    memory = torch.full((BLOCKS * per_block,), -1.0)
    inner = (BLOCK * HIDDEN, HIDDEN) if order == "LTH" else (HIDDEN, LAYERS * HIDDEN)
    return memory.as_strided((BLOCKS, LAYERS, BLOCK, HIDDEN), (per_block, *inner, 1))


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("order", ["LTH", "TLH"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_as_vllm_does(order: str, padding: int, dtype: torch.dtype) -> None:
    ours, theirs = empty(order, padding), empty(order, padding)
    slots = (torch.randperm((BLOCKS - 1) * BLOCK)[:17] + BLOCK).to(dtype)
    layers = [torch.randn(len(slots), HIDDEN) for _ in range(LAYERS)]
    write_rows(ours, slots, layers)
    basic_cache(torch.stack(layers, dim=1), theirs, slots.long())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_padding_goes_to_the_block_that_is_nobodys() -> None:
    cache = empty("LTH")
    slots = torch.tensor([9, -1, -1])
    write_rows(cache, slots, [torch.ones(3, HIDDEN)] * LAYERS)
    assert (cache[2, :, 1] == 1).all()
    cache[2, :, 1] = -1
    assert (cache[1:] == -1).all()


def test_rows_between_which_something_else_lies() -> None:
    odd = torch.zeros(4 * 100).as_strided((2, 2, 4, HIDDEN), (100, 48, 11, 1))
    with pytest.raises(ValueError, match="multiples of the rows' length 8"):
        flat_rows(odd)


class Proposer:
    """What ``take_over`` sees of vLLM's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, direct: bool, cache: torch.Tensor, data_parallel: int = 1):
        from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

        self.asked = []

        def theirs(
            self,
            num_speculative_tokens,
            sampled_token_ids,
            target_hidden_states,
            common_attn_metadata,
            slot_mappings=None,
        ):
            self.asked.append(num_speculative_tokens)
            return sampled_token_ids[:, :1]

        monkeypatch.setattr(ExtractHiddenStatesProposer, "propose", theirs)
        layer = SimpleNamespace(kv_cache=cache)
        for _ in range(2):
            take_over(layer if direct else SimpleNamespace())
        self.propose = ExtractHiddenStatesProposer.propose.__get__(self)
        self.attn_layer_names = ["layer"]
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=data_parallel),
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        )

    def step(self) -> torch.Tensor:
        return self.propose(
            num_speculative_tokens=1,
            sampled_token_ids=torch.tensor([[5, 6], [7, 8]]),
            target_hidden_states=[torch.ones(3, HIDDEN)] * LAYERS,
            common_attn_metadata=SimpleNamespace(slot_mapping=torch.tensor([4, 5, 6, -1])),
        )


def test_an_engine_that_asks_for_it_is_written_to_directly(monkeypatch):
    cache = empty("LTH")
    proposer = Proposer(monkeypatch, True, cache)
    assert proposer.step().tolist() == [[5], [7]]
    assert proposer.asked == []
    assert (cache[1, :, :3] == 1).all()
    assert (cache[0] == -1).all()  # what pads the slots is not written


@pytest.mark.parametrize(("direct", "data_parallel"), [(False, 1), (True, 2)])
def test_every_other_engine_is_left_alone(monkeypatch, direct, data_parallel):
    cache = empty("LTH")
    proposer = Proposer(monkeypatch, direct, cache, data_parallel)
    assert proposer.step().tolist() == [[5], [7]]
    assert proposer.asked == [1]
    assert (cache == -1).all()
