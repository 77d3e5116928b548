"""A GPU's defaults, run here: the V2 model runner with asynchronous scheduling (``hsx_dist.testing.gpu_defaults``).

One engine in a child process, every number held against what it must be. ``make matrix`` runs more, on both runners.
"""

from __future__ import annotations

from hsx_dist.testing.exact_model import FIELDS
from hsx_dist.testing.gpu_defaults import gpu_defaults, schedule_ahead
from tests.integration.exact import BLOCK, CHUNK, MAX_LEN, prompts, started

CACHE_BLOCKS = 10  # one is vLLM's null block; the others hold one of the longest requests


def test_the_v2_runner_with_asynchronous_scheduling(tmp_path, monkeypatch):
    from vllm import SamplingParams
    from vllm.platforms.cpu import CpuPlatform

    for name, value in gpu_defaults(tmp_path / "plugins").items():
        monkeypatch.setenv(name, value)
    # This process, which makes the configuration, may have loaded vLLM's plugins long ago.
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", CpuPlatform.check_and_update_config)
    schedule_ahead()
    with started(
        tmp_path, in_process=False, dtype="float32", fields=FIELDS, num_gpu_blocks_override=CACHE_BLOCKS
    ) as engine:
        config = engine.llm.llm_engine.vllm_config
        assert config.use_v2_model_runner
        assert config.scheduler_config.async_scheduling
        assert config.max_concurrent_batches == 2

        engine.run(prompts(1, 1, BLOCK - 1, CHUNK, CHUNK + 1, MAX_LEN - 1))  # whole, and in chunks
        (prompt,) = prompts(2, 2 * BLOCK + 1)
        for cached in (0, 2 * BLOCK):
            (output,) = engine.run([prompt])
            assert output.num_cached_tokens == cached

        engine.llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1), use_tqdm=False)
        assert engine.llm.reset_prefix_cache()
        (output,) = engine.run([prompt])
        assert output.num_cached_tokens == 0

        before = engine.counter("vllm:num_preemptions")
        engine.run(prompts(3, 70, 75, 80), new_tokens=40)  # three blocks each, then four
        assert engine.counter("vllm:num_preemptions") > before
