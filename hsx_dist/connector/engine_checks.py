"""What the connector requires of an engine's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx_dist.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Devices that ``side.copy_stream_for`` copies from. vLLM calls ROCm ``cuda`` too.
DEVICES = ("cpu", "cuda")


def check_engine(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return the captured layer ids in the order of the cache's layer axis, which vLLM sorts.

    Raises:
        ConfigError: the engine does not run the ``extract_hidden_states`` method, does not generate, has a device
            without a copy path, or asks for layers that the model does not have.
    """
    spec = vllm_config.speculative_config
    if spec is None or spec.method != "extract_hidden_states":
        raise ConfigError(
            "speculative_config: expected {'method': 'extract_hidden_states', ...}, got "
            f"{f'method {spec.method!r}' if spec else 'none'}. HiddenStatesConnector needs this method; set it"
        )
    model = vllm_config.model_config
    if model.runner_type != "generate":
        # A pooling engine never runs the drafter, so the cache holds zeros or old bytes.
        raise ConfigError(
            f"runner: expected 'generate', got {model.runner_type!r}, which caches no hidden states. Set runner="
            "'generate', and use a model that vLLM can generate with"
        )
    device = vllm_config.device_config.device_type
    if device not in DEVICES:
        raise ConfigError(
            f"device: expected one of {', '.join(DEVICES)}, got {device!r}: there is no code to copy from it. Use a "
            "CPU or a GPU that vLLM drives through CUDA or ROCm"
        )
    ids = [int(i) for i in getattr(spec.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None) or ()]
    last = model.get_total_num_hidden_layers()
    if not ids or len(ids) != len(set(ids)) or not all(0 <= i <= last for i in ids):
        # vLLM accepts any number. Its V1 runner repeats another layer's states for an id that the model lacks.
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids: expected different layer ids from 0 to {last} (the model has {last} "
            f"layers), got {ids}. Correct speculative_config's draft_model_config.hf_config"
        )
    return tuple(sorted(ids))
