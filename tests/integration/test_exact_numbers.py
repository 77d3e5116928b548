"""A model whose states contain layer, position, token and context: every number through the connector is exact."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.harness.exact_model import FIELDS
from tests.integration.exact import BLOCK, CAPTURED, CHUNK, MAX_LEN, Engine, prompts, started

CACHE_BLOCKS = 17  # one is vLLM's null block; the others hold two of the longest requests

#: Model dtype, fields and settings of this process's engines. One runs at a time: vLLM has one connector per process.
IN_PROCESS = {
    "exact": ("float32", FIELDS, {}),
    "constant": ("bfloat16", ("layer",), {}),
    "direct": ("float32", FIELDS, {"cache_writes": "direct"}),
}


@pytest.fixture(scope="module", params=["exact"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine in this process. Its cache holds two of the longest requests."""
    dtype, fields, hsx = IN_PROCESS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    with started(
        folder, in_process=True, dtype=dtype, fields=fields, hsx=hsx, num_gpu_blocks_override=CACHE_BLOCKS
    ) as running:
        yield running


def test_one_token_and_the_longest_prompt_alone(engine):
    for length in (1, MAX_LEN - 1):
        engine.run(prompts(1, length))


def test_chunked_prefill_in_batches_with_other_requests(engine):
    lengths = (1, 31, 32, 33, 63, 64, 65, 100, 129, 200, 255)
    config = engine.llm.llm_engine.vllm_config.scheduler_config
    assert config.max_num_batched_tokens == CHUNK < max(lengths)  # no step can take a long prompt whole
    engine.run(prompts(2, *lengths))


@pytest.mark.parametrize(("length", "cached"), [(2 * BLOCK + 1, 2 * BLOCK), (3 * BLOCK, 2 * BLOCK), (255, 7 * BLOCK)])
def test_a_prefix_hit_that_leaves_a_block_or_a_single_token(engine, length, cached):
    (prompt,) = prompts(3, length)
    (first,) = engine.run([prompt])
    assert first.num_cached_tokens == 0
    (again,) = engine.run([prompt])
    assert again.num_cached_tokens == cached  # (2 * BLOCK + 1): all but one token
    (other,) = engine.run([[*prompt[:BLOCK], *prompts(4, 40)[0]]])
    assert other.num_cached_tokens == BLOCK


def test_generated_tokens_have_states_too(engine):
    engine.run(prompts(5, 1, 30, 31, 32, 33), new_tokens=40)


def test_preempted_and_resumed_requests(engine):
    before = engine.counter("vllm:num_preemptions")
    # Each needs three blocks at first and five or six in the end, and the cache has sixteen.
    engine.run(prompts(6, 70, 75, 80, 85), new_tokens=80)
    assert engine.counter("vllm:num_preemptions") > before


def test_no_block_is_held_once_everything_is_stored(engine):
    engine.run(prompts(7, 100, 200))
    for _ in range(100):
        if engine.free_blocks() == CACHE_BLOCKS - 1:
            break
        engine.llm.llm_engine.step()
        time.sleep(0.005)
    assert engine.free_blocks() == CACHE_BLOCKS - 1


@pytest.mark.parametrize("engine", ["constant"], indirect=True)
def test_layer_k_is_the_constant_k_in_bfloat16(engine):
    for output in engine.run(prompts(8, 1, 100, 255, top=256)):
        states = engine.load(output)["hidden_states"].float()
        for i, layer in enumerate(CAPTURED):
            assert (states[:, i] == layer).all()


@pytest.mark.parametrize("engine", ["direct"], indirect=True)
def test_states_written_straight_into_the_cache_are_the_same(engine, monkeypatch):
    from hsx_dist.vllm_patches import cache_writes

    real, written = cache_writes.write_rows, []
    monkeypatch.setattr(cache_writes, "write_rows", lambda *a: (written.append(len(a[1])), real(*a)))
    engine.run(prompts(9, 1, 31, 33, 64, 100, 255))
    engine.run(prompts(10, 33, 40), new_tokens=40)
    assert sum(written) >= 484 + 73 + 2 * 39  # every token passed through this path only
