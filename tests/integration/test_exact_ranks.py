"""Two tensor-parallel ranks in child processes, with a model whose states say which rank computed them."""

from __future__ import annotations

from hsx_dist.testing.exact_model import FIELDS
from tests.integration.exact import prompts, started


def test_two_ranks_in_child_processes_each_ship_rows_of_their_own(tmp_path, monkeypatch):
    """Where states are replicated, a sample put together from two ranks would go unseen; here the rank is a number."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # else two ranks on one NUMA node do not start
    monkeypatch.setenv(
        "VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn"
    )  # children that know the model by its plugin alone
    fields = [f for f in FIELDS if f != "context"]  # its sums are not exact in bfloat16
    with started(tmp_path, in_process=False, dtype="bfloat16", fields=fields, tensor_parallel_size=2) as engine:
        outputs = engine.run(prompts(9, 1, 31, 32, 64, 65, 100, 200, 255, top=256))
        ranks = [engine.rank_of(engine.load(o)["hidden_states"].float().numpy()) for o in outputs]
        assert sorted(set(ranks)) == [0, 1]
        assert abs(ranks.count(0) - ranks.count(1)) <= 1  # in turn
