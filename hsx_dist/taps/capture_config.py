"""The choice of points in an engine's configuration, and the checks of engines that taps do not support."""

from __future__ import annotations

from typing import Any

from hsx_dist.errors import ConfigError

#: Key of ``additional_config``. vLLM hashes that table into the key of its compile cache, so another choice of points
#: causes a new compilation.
KEY = "hsx_capture"
#: Part of the same hash. Change it when the traced code of this package changes its meaning.
TRACE = 1


def additional_config(capture: dict[str, Any]) -> dict[str, Any]:
    """Return the ``LLM(additional_config=...)`` of an engine that captures ``capture``.

    Args:
        capture: ``{"points": {NAME: layer ids or "all"}}``.

    Example:
        >>> from hsx_dist.taps.capture_config import additional_config
        >>> additional_config({"points": {"q": [15], "mlp_out": "all"}})
        {'hsx_capture': {'capture': {'points': {'q': [15], 'mlp_out': 'all'}}, 'trace': 1}}
    """
    return {KEY: {"capture": capture, "trace": TRACE}}


def capture_of(vllm_config: Any) -> dict[str, Any] | None:
    """Return the captured points of an engine with taps; None for an engine without taps.

    A table without ``trace`` gets the current one, which vLLM then hashes: the compile cache may hold the graphs of
    another version of this package.

    Raises:
        ConfigError: the table was written for another version of this package.
    """
    table = vllm_config.additional_config
    found = table.get(KEY) if isinstance(table, dict) else None
    if found is None:
        return None
    if isinstance(found, dict):
        found.setdefault("trace", TRACE)  # in place: vLLM's shallow copies of its configuration share this table
    if not isinstance(found, dict) or found.get("trace") != TRACE or not isinstance(found.get("capture"), dict):
        raise ConfigError(
            f"additional_config.{KEY}: expected a mapping with capture, and trace {TRACE} or none, got {found!r}. Use "
            "the same version of hsx_dist on all nodes"
        )
    return found["capture"]


def check_engine(vllm_config: Any) -> None:
    """Refuse engines in which a tap does not get the rows of all tokens, or in which cache groups waste blocks.

    Raises:
        ConfigError: with the setting that was expected.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        _expect(name, 1, getattr(parallel, name, 1))
    _expect("enable_hc_sp", False, bool(getattr(parallel, "enable_hc_sp", False)))
    passes = vllm_config.compilation_config.pass_config  # 0.32 has no such pass
    _expect("compilation_config.pass_config.enable_sp", False, bool(getattr(passes, "enable_sp", False)))
    _expect("enable_dbo", False, bool(getattr(parallel, "enable_dbo", False)))
    _expect("enable_eplb", False, bool(getattr(parallel, "enable_eplb", False)))
    _expect("enable_lora", False, vllm_config.lora_config is not None)
    _expect("runner", "generate", model.runner_type)
    if model.use_mla:
        raise ConfigError(f"{model.model}: expected attention with keys and values, got MLA. Use source: cache")
    if getattr(model, "is_hybrid", False):
        raise ConfigError(f"{model.model}: expected one group of cache blocks, got a hybrid model. Use source: cache")
    if getattr(model, "is_moe", False):
        _expect("data_parallel_size", 1, parallel.data_parallel_size)
    spec = vllm_config.speculative_config
    if spec is not None and spec.method != "extract_hidden_states":
        raise ConfigError(f"speculative_config: expected none, got method {spec.method!r}. Remove it, or the taps")


def embeds_first(model_config: Any) -> bool:
    """Whether vLLM computes embeddings before the model's forward pass: with prompt embeddings, or with images.

    No forward context is set then, so a tap would end the engine.
    """
    images = model_config.is_multimodal_model  # a release without the second name also has text-only engines here
    return model_config.enable_prompt_embeds or bool(getattr(model_config, "supports_multimodal_inputs", images))


def _expect(name: str, wanted: object, got: object) -> None:
    if got != wanted:
        raise ConfigError(
            f"{name}: expected {wanted!r} with capture by taps, got {got!r}. Change it, or use source: cache"
        )
