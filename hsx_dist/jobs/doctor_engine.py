"""Check of an engine: final norm and head, applied to the stored states, must give vLLM's prompt log-probabilities.

This checks states, rows and order at once, on the configured model with the configured arguments. It needs no second
copy of the model: the norm and the head are those in the engine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import ConfigError, EngineError, HsxError, NotFound
from hsx_dist.fleet.replica import engine_arguments, engine_environment
from hsx_dist.inputs.encode import load_tokenizer
from hsx_dist.jobs import preflight
from hsx_dist.jobs.connect import connect_ray
from hsx_dist.jobs.diagnosis import Diagnosis
from hsx_dist.jobs.extract import engine_spec
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.ray_arguments import sendable
from hsx_dist.text import text_of
from hsx_dist.working_folder import require_no_settings_of

if TYPE_CHECKING:
    import torch

#: Number of prompts: enough for one batch of different lengths.
PROMPTS = 8
#: Longest prompt, in tokens: several cache blocks, and several chunks if the engine takes few tokens at once.
LONGEST = 400
#: Limit of the mean difference of log-probabilities between two correct computations. Both do the same operations on
#: the same states, but one adds the residual within the fused norm.
LIMITS = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.05}
#: States in the wrong order must differ at least this many times more. Otherwise the check proves nothing.
CONTRAST = 5.0
_TEXT = (
    "The states of a language model are read by another model, which learns to guess what the first one will say next. "
    "Each row belongs to one token, and each token to one row; a row that is shifted by one teaches nothing. "
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Mean absolute differences of log-probabilities, over all tokens of all prompts.

    ``right``: for the stored states. ``wrong``: for each prompt's states in reversed order. ``worst``: the largest
    difference of a single token."""

    tokens: int
    right: float
    worst: float
    wrong: float


def check_engine(config: ExtractConfig) -> Iterator[Diagnosis]:
    """Start the engine, here or on a node that can hold a replica, and check its states of eight prompts."""
    try:
        found = _on_cluster(config) if config.pool == "ray" else diagnose(config)
    except HsxError as e:
        found = [Diagnosis("engine", "fail", str(e))]
    yield from found


def diagnose(config: ExtractConfig) -> list[Diagnosis]:
    """Start the engine in this process, and judge its hidden states, or each of the chosen points.

    Raises:
        EngineError: it did not start, or stored nothing. ConfigError: a setting is wrong.
    """
    model = preflight.examine_model(config)
    tokenizer = load_tokenizer(model.path, revision=config.revision, engine_kwargs=config.engine_kwargs)
    prompts = make_prompts(tokenizer, min(LONGEST, model.max_tokens))
    if model.rows.keys() == {HIDDEN_STATES}:
        return [judge(measure(config, model, prompts), model.dtype, model.num_layers)]
    from hsx_dist.jobs.doctor_points import measure_points

    return measure_points(config, model, prompts)


def judge(found: Agreement, dtype: str, num_layers: int) -> Diagnosis:
    """Whether the states are those that the model computed."""
    limit = LIMITS[dtype]
    said = (
        f"final norm and head on layer {num_layers} against vLLM's prompt log-probabilities, {PROMPTS} prompts of "
        f"{found.tokens} tokens in {dtype}: mean difference {found.right:.2g}, worst token {found.worst:.2g}; rows in "
        f"the wrong order: {found.wrong:.2g}"
    )
    if not found.right <= limit:  # NaN too
        return Diagnosis(
            "engine",
            "fail",
            f"{said}: expected at most {limit:g} on average. The states are not this model's: do not use them. Try "
            "another vLLM version (docs/connector.md), enforce_eager, or without prefix caching, and report it",
        )
    if found.wrong < CONTRAST * max(found.right, 1e-9):
        return Diagnosis(
            "engine", "warn", f"{said}: the wrong order is hardly worse for this model, so this check proves little"
        )
    return Diagnosis("engine", "ok", said)


def _on_cluster(config: ExtractConfig) -> list[Diagnosis]:
    """``diagnose`` in a task with a replica's resources."""
    import ray
    from ray.exceptions import RayError

    from hsx_dist.fleet.ray_errors import reason_of
    from hsx_dist.ray_calls import remote

    connect_ray()
    ranks = int(config.engine_kwargs.get("tensor_parallel_size", 1))
    gpus = config.replica.num_gpus
    if gpus is None:
        gpus = float(ranks) if ray.cluster_resources().get("GPU", 0) else 0.0
    task = remote(_diagnose_there).options(
        num_cpus=config.replica.num_cpus, num_gpus=gpus, resources=config.replica.resources or None, max_retries=0
    )
    try:
        return ray.get(task.remote(sendable(config), dict(config.replica.env)))  # type: ignore[no-any-return]
    except RayError as e:
        raise EngineError(f"expected an engine that runs in a Ray task, got: {reason_of(e)}") from e


def _diagnose_there(config: ExtractConfig, environment: dict[str, str]) -> list[Diagnosis]:
    from hsx_dist.fleet.cpu_binding import prepare_cpu

    os.environ.update(environment)
    claim = prepare_cpu(int(config.engine_kwargs.get("tensor_parallel_size", 1)), config.replica.num_cpus)
    found = diagnose(config)
    del claim
    return found


def measure(config: ExtractConfig, model: preflight.Model, prompts: Sequence[list[int]]) -> Agreement:
    """Start the engine in this process (with several ranks: in its children), run the prompts, compare.

    Raises:
        EngineError: it did not start, or stored nothing.
    """
    from hsx_dist.reading import load_hidden_states

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    ranks = int(config.engine_kwargs.get("tensor_parallel_size", 1))
    in_process = ranks == 1 and config.engine_kwargs.get("distributed_executor_backend", "uni") == "uni"
    layers = sorted({*model.layers, model.num_layers})
    with tempfile.TemporaryDirectory(prefix="hsx-doctor-") as folder, engine_environment(in_process):
        # vLLM pickles the function that runs in its workers. This engine takes no other requests.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        llm = _start(config, model, layers, folder, in_process)
        try:
            outputs = _generate(llm, prompts)
            states = []
            for output in outputs:
                path = output.kv_transfer_params["hidden_states_path"]
                sample = _load(llm, path, load_hidden_states, model.num_layers, in_process)
                states.append(sample)
            theirs = [_prompt_logprobs(output) for output in outputs]
            return compare(llm, prompts, states, theirs)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"]


def _start(config: ExtractConfig, model: preflight.Model, layers: list[int], folder: str, in_process: bool) -> Any:
    """Start the engine as a replica does, but with a connector that stores each sample in ``folder``."""
    require_no_settings_of("numba", ".numba_config.yaml")
    from vllm import LLM

    spec = engine_spec(config, model)
    capture = None if spec.capture is None else {"points": {"hidden_states": layers}}
    spec = replace(spec, layers=tuple(layers), capture=capture)
    arguments = engine_arguments(spec, "inline" if in_process else "attach", "")
    arguments["kv_transfer_config"]["kv_connector_extra_config"] = {"shared_storage_path": folder}
    try:
        return LLM(**arguments)
    except Exception as e:
        raise EngineError(f"vLLM did not start: {text_of(e)}") from e


def make_prompts(tokenizer: Any, longest: int) -> list[list[int]]:
    """Eight prompts of 2 to ``longest`` tokens, no two with the same beginning."""
    found = []
    for i in range(PROMPTS):
        wanted = max(2, longest * (i + 1) // PROMPTS)
        text = f"{i + 1}. " + _TEXT
        ids: list[int] = []
        while len(ids) < wanted:
            ids = list(tokenizer(text)["input_ids"])
            text += _TEXT
        found.append(ids[:wanted])
    return found


def _generate(llm: Any, prompts: Sequence[Sequence[int]]) -> list[Any]:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            extra_args={"kv_transfer_params": {"hidden_states_key": f"doctor-{i}"}},
        )
        for i in range(len(prompts))
    ]
    return list(llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False))


def _load(llm: Any, path: str, load: Any, layer: int, in_process: bool, seconds: float = 120.0) -> torch.Tensor:
    """Wait for layer N of a stored sample, ``[T, H]``. Steps an engine in this process, which no other code steps."""
    end = time.monotonic() + seconds
    while True:
        try:
            states: torch.Tensor = load(path, layers=[layer], framework="torch")["hidden_states"][:, 0]
            return states
        except NotFound as e:
            if time.monotonic() > end:
                raise EngineError(f"expected the states within {seconds:.0f} s, got none. Look at vLLM's log") from e
            if in_process:
                llm.llm_engine.step()
            time.sleep(0.01)


def _prompt_logprobs(output: Any) -> list[float]:
    """vLLM's log-probability of each token of the prompt except the first."""
    ids = output.prompt_token_ids
    return [float(at[token].logprob) for token, at in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]


def compare(llm: Any, prompts: Sequence[list[int]], states: Sequence[torch.Tensor], theirs: Any) -> Agreement:
    """Apply the engine's own norm and head, in its workers, to the states as they are and in the wrong order."""
    right = [s[:-1] for s in states]
    wrong = [s[:-1].flip(0) for s in states]
    tokens = [p[1:] for p in prompts]
    try:
        ours = llm.apply_model(partial(logprobs_of, states=right + wrong, tokens=[*tokens, *tokens]))[0]
    except Exception as e:
        raise EngineError(f"expected to apply the model's final norm and head to its states, got: {text_of(e)}") from e
    both = [t for _ in range(2) for t in theirs]
    differences = [[abs(a - b) for a, b in zip(o, t, strict=True)] for o, t in zip(ours, both, strict=True)]
    good = [d for row in differences[: len(prompts)] for d in row]
    bad = [d for row in differences[len(prompts) :] for d in row]
    worst = max(good) if all(d == d for d in good) else float("nan")
    return Agreement(len(good), sum(good) / len(good), worst, sum(bad) / len(bad))


def logprobs_of(model: Any, *, states: list[torch.Tensor], tokens: list[list[int]]) -> list[list[float]]:
    """Return each token's log-probability, computed from the states of the row before it. Runs in a worker.

    ``states``: ``[n, H]`` each, before the final norm; ``tokens``: n ids each.
    """
    import torch

    norm = vllm_final_norm(model)
    weight = next(model.parameters())
    found: list[list[float]] = []
    with torch.inference_mode():
        for rows, ids in zip(states, tokens, strict=True):
            logits = model.compute_logits(norm(rows.to(device=weight.device)))
            if logits is None:  # a rank that does not gather them
                found.append([])
                continue
            logprobs = logits.float().log_softmax(dim=-1)
            found.append(logprobs[torch.arange(len(ids)), torch.tensor(ids)].tolist())
    return found


def vllm_final_norm(model: Any) -> Any:
    """The norm after the last layer, by the names that vLLM's models give it.

    Raises:
        ConfigError: it has another name.
    """
    for path in ("model", "language_model.model", "transformer", "model.decoder", "gpt_neox", "model.language_model"):
        inner = model
        for part in path.split("."):
            inner = getattr(inner, part, None)
        for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm"):
            if (module := getattr(inner, name, None)) is not None:
                return module
    raise ConfigError(f"expected a final norm under a known name in {type(model).__name__}, got none")
