"""Two tensor-parallel ranks in child processes, with a model whose states contain the rank that computed them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from tests.harness.exact_model import FIELDS, UNREDUCED
from tests.integration.exact import prompts, started

OTHER = {
    "kv_connector": "OtherConnector",
    "kv_connector_module_path": "tests.integration.other_connector",
    "kv_role": "kv_producer",
}


def test_two_ranks_in_child_processes_ship_different_rows(tmp_path, monkeypatch, capfd):
    """States are replicated over ranks, so a sample put together from two ranks would not show. Here states differ.

    Another connector runs in the same engine, and vLLM expects its reports from every rank: no block stays held. At the
    end the ranks differ as partial sums do, and the engine raises an error.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # otherwise two ranks on one NUMA node do not start
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # the children know the model only by its plugin
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()), prepend=":")  # for the other connector's module
    fields = [f for f in FIELDS if f != "context"]  # the sums are not exact in bfloat16
    arguments = {"dtype": "bfloat16", "fields": fields, "tensor_parallel_size": 2, "beside": [OTHER]}
    with started(tmp_path, in_process=False, **arguments) as engine:
        outputs = engine.run(prompts(9, 1, 31, 32, 64, 65, 100, 200, 255, top=256))
        ranks = [engine.rank_of(engine.load(o)["hidden_states"].float().numpy()) for o in outputs]
        assert sorted(set(ranks)) == [0, 1]
        assert abs(ranks.count(0) - ranks.count(1)) <= 1  # the ranks take turns
        assert all(o.kv_transfer_params["other"] == "was here" for o in outputs)

        # Not flushed: the reset must copy the states first.
        more = [{"prompt_token_ids": prompt} for prompt in prompts(10, 40, 200, top=256)]
        engine.llm.generate(more, SamplingParams(max_tokens=1), use_tqdm=False)
        end = time.monotonic() + 60
        while not engine.llm.reset_prefix_cache():  # refused while a block is held
            assert time.monotonic() < end, "expected the finished requests' blocks to be freed within 60 s"
            time.sleep(0.1)

        # Enough requests that one is compared between ranks: the 16th.
        unreduced = [{"prompt_token_ids": [UNREDUCED, *prompt]} for prompt in prompts(9, *[20] * 16, top=256)]
        with pytest.raises(EngineDeadError):
            engine.llm.generate(unreduced, SamplingParams(max_tokens=1), use_tqdm=False)
        said = capfd.readouterr()
        assert f"{tmp_path / 'model'}: expected the same hidden states on all 2 tensor-parallel ranks" in (
            said.out + said.err
        )
