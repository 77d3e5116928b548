"""Compares an engine's states with transformers, for each way in which vLLM runs. Each process runs one engine.

    python -m hsx_dist.jobs.kit.engine_states CASE.json

The model is a random Llama in bfloat16 that ``make_model`` writes; transformers computes the same tokens in float32. A
case passes only if the engine ran as the case requires.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.connector.flush import HiddenStatesWorkerExtension, flush
from hsx_dist.errors import EngineError
from hsx_dist.isa import avoid_amx
from hsx_dist.jobs.check import LayerError, PointRows, layer_errors
from hsx_dist.jobs.kit.outcomes import Check, claim, python
from hsx_dist.models.tiny import tiny_llama
from hsx_dist.new_process import begin_process
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.working_folder import require_no_settings_of

GROUP = "states against transformers"
LAYERS, HEAD_DIM, VOCAB, MAX_LEN = 4, 64, 512, 256
CAPTURED = tuple(range(LAYERS + 1))
#: vLLM's CPU attention takes no smaller blocks.
BLOCK = 32
#: Longer prompts are computed in several steps.
STEP_TOKENS = 128
#: A generated token's logit may be lower than the largest one by this many standard deviations of all logits.
GREEDY_SLACK = 0.5
#: Seconds that a case may take: on a GPU, and on a CPU, which other programs may slow down.
LIMIT_S, LIMIT_CPU_S = 240.0, 800.0
#: Cache blocks of a case with preemption: two requests fit, four do not.
FEW_BLOCKS = 17


@dataclass(frozen=True, slots=True)
class Case:
    """How an engine runs. ``v2``: vLLM's V2 model runner; ``preempt``: a cache that is too small for all requests."""

    v2: bool = False
    compiled: bool = False
    asynchronous: bool = False
    ranks: int = 1
    direct: bool = False
    preempt: bool = False

    @property
    def name(self) -> str:
        words = [
            f"runner V{1 + self.v2}",
            "compiled" if self.compiled else "eager",
            "asynchronous scheduling" if self.asynchronous else "synchronous scheduling",
            *([f"tensor parallel over {self.ranks}"] if self.ranks > 1 else []),
            *(["cache_writes: direct"] if self.direct else []),
            *(["preemption"] if self.preempt else []),
        ]
        return ", ".join(words)


def cases(gpus: int) -> list[Case]:
    """All cases of a machine with ``gpus`` GPUs."""
    found = [
        Case(v2=v2, compiled=compiled, asynchronous=asynchronous)
        for v2 in (False, True)
        for compiled in (False, True)
        for asynchronous in (False, True)
    ]
    found += [Case(direct=True), Case(preempt=True), Case(v2=True, compiled=True, asynchronous=True, preempt=True)]
    ranks = max(gpus, 2)
    found += [Case(ranks=ranks), Case(v2=True, compiled=True, asynchronous=True, ranks=ranks)]
    return found


def cannot(case: Case, gpus: int, cores: int) -> str:
    """Why a case cannot run on this machine. Empty if it can."""
    if gpus == 0 and case.asynchronous:
        return "vLLM's CPU platform switches asynchronous scheduling off"
    if gpus == 0 and case.v2:
        return "vLLM's V2 model runner needs a GPU"
    if gpus == 0 and case.ranks > cores:
        return f"needs a core for each of {case.ranks} ranks, found {cores}"
    if 0 < gpus < case.ranks:
        return f"needs {case.ranks} GPUs, found {gpus}"
    return ""


def checks(folder: Path, gpus: int, wanted: Sequence[Case] | None = None) -> list[Check]:
    """The cases as checks. Writes their model and descriptions into ``folder``."""
    cores = len(os.sched_getaffinity(0))
    planned = list(cases(gpus) if wanted is None else wanted)
    model = make_model(folder / "model", max(case.ranks for case in planned))
    found = []
    for i, case in enumerate(planned):
        file = folder / f"case-{i}.json"
        file.write_text(json.dumps({"model": str(model), "case": asdict(case)}))
        env = {"VLLM_USE_V2_MODEL_RUNNER": str(int(case.v2)), "VLLM_LOGGING_LEVEL": "ERROR"}
        if gpus == 0:
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"
            if case.ranks > 1:
                env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, sorted(os.sched_getaffinity(0))[: case.ranks]))
        argv = python("-m", "hsx_dist.jobs.kit.engine_states", str(file))
        limit = LIMIT_S if gpus else LIMIT_CPU_S
        found.append(Check(GROUP, case.name, argv, limit, env=env, cannot=cannot(case, gpus, cores)))
    return found


def make_model(path: Path, ranks: int) -> Path:
    """A random model whose heads ``ranks`` ranks can share."""
    heads = ranks * math.ceil(4 / ranks)
    hidden = heads * HEAD_DIM
    return tiny_llama(
        path, layers=LAYERS, hidden=hidden, heads=heads, kv_heads=heads, vocab=VOCAB, max_positions=MAX_LEN,
        dtype="bfloat16", spread=1.6 / math.sqrt(hidden),  # more would let rounding grow from layer to layer
    )  # fmt: skip


class KitExtension(HiddenStatesWorkerExtension):
    """Methods for every worker of a case's engine."""

    def hidden_states_facts(self) -> dict[str, Any]:
        """How this worker runs."""
        runner = self.model_runner  # type: ignore[attr-defined]
        modules = {c.__module__ for c in type(runner).__mro__}
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        watched = [layer.hsx_watch for layer in layers if hasattr(layer, "hsx_watch")]
        return {
            "v2": "vllm.v1.worker.gpu.model_runner" in modules,
            "direct": any(w.cache is not None for w in watched),
        }


def start(model: str, case: Case, output: str) -> Any:
    require_no_settings_of("numba", ".numba_config.yaml")
    from vllm import LLM

    return LLM(
        model,
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=16,
        block_size=BLOCK,
        enforce_eager=not case.compiled,
        async_scheduling=case.asynchronous,
        tensor_parallel_size=case.ranks,
        num_gpu_blocks_override=FEW_BLOCKS if case.preempt else None,
        gpu_memory_utilization=0.5,
        disable_log_stats=False,  # ``facts`` reads vLLM's counters
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(CAPTURED)}},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": output,
                "hsx": {"cache_writes": "direct" if case.direct else "vllm"},
            },
        },
        worker_extension_cls="hsx_dist.jobs.kit.engine_states.KitExtension",  # __name__ may be __main__
    )


def facts(llm: Any) -> Case:
    """How the engine ran."""
    config = llm.llm_engine.vllm_config
    workers = llm.collective_rpc("hidden_states_facts")
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    return Case(
        v2=all(w["v2"] for w in workers),
        compiled=int(config.compilation_config.mode or 0) > 0,
        asynchronous=bool(config.scheduler_config.async_scheduling),
        ranks=config.parallel_config.tensor_parallel_size,
        direct=all(w["direct"] for w in workers),
        preempt=preempted > 0,
    )


def prompts(case: Case) -> list[tuple[list[int], int]]:
    """(token ids, tokens to generate) of each request. Some share a prefix, some are longer than a step."""
    rng = np.random.default_rng(5)

    def ids(n: int) -> list[int]:
        return [int(t) for t in rng.integers(3, 400, n)]

    if case.preempt:
        return [(ids(n), 160) for n in (70, 75, 80, 85)]
    shared = ids(3 * BLOCK)
    return [
        *((ids(n), 1) for n in (1, 31, 33, 64, 129, 250)),
        *(([*shared, *ids(n)], 1) for n in (1, 40)),
        *((ids(n), 40) for n in (1, 30, 32, 100)),
    ]


def run(model: str, case: Case) -> None:
    """Run the case, and write its result with ``claim``."""
    import torch
    from transformers import LlamaForCausalLM

    with tempfile.TemporaryDirectory(prefix="hsx-kit-states-") as output:
        llm = start(model, case, output)
        try:
            stored, generated = generate(llm, prompts(case))
            ran = facts(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
    if other := [k for k, v in asdict(case).items() if getattr(ran, k) != v]:
        claim("not run", f"vLLM did not run as the case requires: {ran.name}; it differs in {', '.join(other)}")
        return
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        right = layer_errors(stored, reference.base_model, LAYERS)
        shifted = [
            (ids, {name: PointRows(of.layers, of.rows.roll(1, 0)) for name, of in points.items()})
            for ids, points in stored
        ]
        wrong = layer_errors(shifted, reference.base_model, LAYERS)
        slack = max(greedy_slack(reference, ids) for ids in generated)
    claim(*judge(right, wrong, slack), figures(stored, right, wrong, slack))


def generate(llm: Any, wanted: Sequence[tuple[list[int], int]]) -> tuple[list[Any], list[tuple[list[int], list[int]]]]:
    """(stored samples, (prompt, generated tokens) of each request with more than one new token).

    Raises:
        EngineError: a sample has other tokens than its request.
    """
    from vllm import SamplingParams

    from hsx_dist.reading import load_hidden_states

    parameters = [
        SamplingParams(
            max_tokens=new,
            temperature=0.0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"hidden_states_key": f"kit-{i}", "include_output_tokens": new > 1}},
        )
        for i, (_, new) in enumerate(wanted)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in wanted], parameters, use_tqdm=False)
    flush(llm, 120)
    stored, generated = [], []
    for (ids, new), output in zip(wanted, outputs, strict=True):
        sample = load_hidden_states(output.kv_transfer_params["hidden_states_path"], framework="torch")
        answer = list(output.outputs[0].token_ids)
        expected = [*ids, *answer[:-1]]
        if sample["token_ids"].tolist() != expected:
            raise EngineError(f"expected {len(expected)} tokens of {output.request_id} in its sample, got others")
        states = PointRows(sample["layer_ids"].tolist(), sample["hidden_states"])
        stored.append((sample["token_ids"], {HIDDEN_STATES: states}))
        if new > 1:
            generated.append((ids, answer))
    return stored, generated


def greedy_slack(reference: Any, sequence: tuple[list[int], list[int]]) -> float:
    """The largest distance of a generated token's logit below the largest logit at its position, in standard deviations
    of that position's logits. A token that the engine repeats or skips is far below."""
    import torch

    ids, answer = sequence
    logits = reference(torch.tensor([[*ids, *answer]]), use_cache=False).logits[0, len(ids) - 1 : -1].float()
    taken = logits[torch.arange(len(answer)), torch.tensor(answer)]
    return float(((logits.max(dim=1).values - taken) / logits.std(dim=1)).max())


def judge(right: list[LayerError], wrong: list[LayerError], slack: float) -> tuple[Any, str]:
    """State and message."""
    worst = max(right, key=lambda e: e.norm if e.norm == e.norm else math.inf)
    said = (
        f"relative error at most {worst.norm:.2g} (layer {worst.layer_id}), worst row "
        f"{max(e.worst_row for e in right):.2g}; rows shifted by one: at least {min(e.norm for e in wrong):.2g}; "
        f"generated tokens: {slack:.2g} standard deviations below the largest logit"
    )
    if {e.layer_id for e in right} != set(CAPTURED) or not all(e.passed("bfloat16") for e in right):
        return "failed", f"the states are not the model's: {said}"
    if any(e.passed("bfloat16") for e in wrong):
        return "failed", f"the comparison proves nothing, as shifted rows pass it too: {said}"
    if not slack <= GREEDY_SLACK:
        return "failed", f"a generated token is not the model's: {said}"
    return "passed", said


def figures(stored: Sequence[Any], right: list[LayerError], wrong: list[LayerError], slack: float) -> dict[str, Any]:
    return {
        "samples": len(stored),
        "tokens": sum(len(ids) for ids, *_ in stored),
        "errors": {str(e.layer_id): e.norm for e in right},
        "shifted": {str(e.layer_id): e.norm for e in wrong},
        "greedy_slack": slack,
    }


def visible_gpus() -> list[str]:
    """Names of the GPUs that torch sees. Asked in another process, so that this one holds none of their memory.

    Raises:
        EngineError: torch cannot be imported or cannot list them.
    """
    code = "import torch; print(*[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())], sep='\\n')"
    done = subprocess.run(python("-c", code), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EngineError(f"torch could not list this machine's GPUs: {last}. Check the installation of torch")
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def main() -> None:
    begin_process()
    avoid_amx()
    given = json.loads(Path(sys.argv[1]).read_text())
    run(given["model"], Case(**given["case"]))


if __name__ == "__main__":
    main()
