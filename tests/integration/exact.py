"""An engine of the model with exact numbers that checks everything it stores. Shared by the exact-number tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.connector.flush import flush
from hsx_dist.reading import load_hidden_states
from tests.harness.exact_model import RANK_STEP, exact_model, expected_states, next_tokens, registered
from tests.harness.gpu_defaults import check_defaults

LAYERS = 4
CAPTURED = tuple(range(LAYERS + 1))
BLOCK = 32  # the smallest block size of vLLM's CPU attention
CHUNK = 64  # tokens per step: longer prompts are prefilled in chunks
MAX_LEN = 256


class Engine:
    """An engine with a bare connector that stores one object per request under ``output``."""

    def __init__(
        self,
        model: Path,
        output: Path,
        *,
        fields: Sequence[str],
        hsx: Mapping[str, Any] | None = None,
        beside: Sequence[Mapping[str, Any]] = (),
        **arguments: Any,
    ):
        """``beside``: other connectors, in vLLM's ``MultiConnector`` with this one."""
        from vllm import LLM

        self.fields = tuple(fields)
        self._names = count()
        ours = {
            "kv_connector": "HiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(output), "hsx": dict(hsx or {})},
        }
        several = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"connectors": [*beside, ours]},
        }
        self.llm = LLM(
            str(model),
            max_model_len=MAX_LEN,
            enforce_eager=True,
            max_num_batched_tokens=CHUNK,
            block_size=BLOCK,
            disable_log_stats=False,  # tests read vLLM's counters
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(CAPTURED)}},
            },
            kv_transfer_config=several if beside else ours,
            worker_extension_cls="hsx_dist.connector.flush.HiddenStatesWorkerExtension",
            **arguments,
        )
        check_defaults(self.llm.llm_engine.vllm_config)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int = 1) -> list[Any]:
        """Generate after all prompts in one batch, and check every stored number.

        With more than one new token, the states of generated tokens are stored and checked, too. The last token has
        none: it was never an input.
        """
        from vllm import SamplingParams

        keys = [f"r{next(self._names)}" for _ in prompts]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts],
            [
                SamplingParams(
                    max_tokens=new_tokens,
                    ignore_eos=True,
                    temperature=0.0,
                    extra_args={
                        "kv_transfer_params": {"hidden_states_key": key, "include_output_tokens": new_tokens > 1}
                    },
                )
                for key in keys
            ],
            use_tqdm=False,
        )
        flush(self.llm)  # in this process it steps the engine; in a child process it calls the workers
        for prompt, output in zip(prompts, outputs, strict=True):
            generated = list(output.outputs[0].token_ids)
            assert generated == next_tokens(prompt[-1], new_tokens)
            self.check([*prompt, *generated[:-1]], self.load(output))
        return outputs

    def load(self, output: Any) -> dict[str, Any]:
        """The stored sample. ``run`` has flushed the engine before."""
        return load_hidden_states(output.kv_transfer_params["hidden_states_path"], framework="torch")

    def check(self, token_ids: Sequence[int], sample: dict[str, Any]) -> None:
        assert sample["token_ids"].tolist() == list(token_ids)
        assert sample["layer_ids"].tolist() == list(CAPTURED)
        states = sample["hidden_states"].float().numpy()
        expected = expected_states(token_ids, CAPTURED, states.shape[-1], fields=self.fields, rank=self.rank_of(states))
        np.testing.assert_array_equal(states, expected)

    def rank_of(self, states: np.ndarray[Any, Any]) -> int:
        """The rank in the first row. All other rows must have the same rank."""
        return int(states[0, 0, self.fields.index("rank")] / RANK_STEP) if "rank" in self.fields else 0

    def counter(self, name: str) -> int:
        """A counter of vLLM's."""
        (metric,) = (m for m in self.llm.get_metrics() if m.name == name)
        return int(metric.value)

    def free_blocks(self) -> int:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def started(folder: Path, *, in_process: bool, dtype: str, fields: Sequence[str], **arguments: Any) -> Iterator[Engine]:
    model = exact_model(folder / "model", layers=LAYERS, fields=fields, max_positions=MAX_LEN, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch, registered(folder / "plugin"):
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1")
        engine = Engine(model, folder / "states", dtype=dtype, fields=fields, **arguments)
        try:
            yield engine
        finally:
            engine.close()


def prompts(seed: int, *lengths: int, top: int = 400) -> list[list[int]]:
    """Random tokens from 3 to ``top``. Requests share no prefix."""
    rng = np.random.default_rng([seed, *lengths])
    return [rng.integers(3, top, n).tolist() for n in lengths]
