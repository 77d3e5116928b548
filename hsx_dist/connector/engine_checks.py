"""What the connector requires of an engine's configuration, and which of its limits it warns of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger
from hsx_dist.taps.capture_config import KEY, capture_of
from hsx_dist.taps.capture_config import check_engine as check_taps

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger(__name__)

#: Devices that ``copy_stream.copy_stream_for`` copies from. vLLM calls ROCm ``cuda`` too.
DEVICES = ("cpu", "cuda")


def check_engine(vllm_config: VllmConfig) -> tuple[int, ...] | None:
    """Return the layer ids that vLLM's extraction captures, in the order of the cache's layer axis, which vLLM sorts;
    None for an engine with taps, whose workers know what they capture.

    Raises:
        ConfigError: the engine does not run the ``extract_hidden_states`` method, does not generate, has a device
            without a copy path, or asks for layers that the model does not have.
    """
    spec = vllm_config.speculative_config
    if capture_of(vllm_config) is not None:
        if spec is not None:
            raise ConfigError(
                f"speculative_config: expected none with capture by taps, got method {spec.method!r}. Remove it, or "
                f"additional_config's {KEY}"
            )
        check_taps(vllm_config)
        _check_device(vllm_config)
        return None
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
    _check_device(vllm_config)
    ids = [int(i) for i in getattr(spec.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None) or ()]
    last = model.get_total_num_hidden_layers()
    if not ids or len(ids) != len(set(ids)) or not all(0 <= i <= last for i in ids):
        # vLLM accepts any number. Its V1 runner repeats another layer's states for an id that the model lacks.
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids: expected different layer ids from 0 to {last} (the model has {last} "
            f"layers), got {ids}. Correct speculative_config's draft_model_config.hf_config"
        )
    return tuple(sorted(ids))


def _check_device(vllm_config: VllmConfig) -> None:
    device = vllm_config.device_config.device_type
    if device not in DEVICES:
        raise ConfigError(
            f"device: expected one of {', '.join(DEVICES)}, got {device!r}: there is no code to copy from it. Use a "
            "CPU or a GPU that vLLM drives through CUDA or ROCm"
        )


def warn_of_long_samples(settings: ConnectorConfig, longest: int, token_bytes: int) -> None:
    """Log a warning if the states of one request can exceed what a bare connector's writers hold encoded."""
    if settings.bare and longest * token_bytes > settings.encoded_bytes:
        log.warning(
            "a request of max_model_len=%d tokens has %d bytes of states, and in_flight_bytes=%d allows %d encoded "
            "bytes: the writers of each worker hold one such request whole, beyond in_flight_bytes. Provide memory, "
            "raise in_flight_bytes, or lower --max-model-len",
            longest,
            longest * token_bytes,
            settings.in_flight_bytes,
            settings.encoded_bytes,
        )


def warn_of_short_limits(settings: ConnectorConfig, vllm_config: VllmConfig) -> None:
    """Say which of the engine's own limits would cut off what the connector is still doing at its end.

    Raises:
        ConfigError: the drafter would skip states of long sequences.
    """
    import vllm.envs as envs

    spec = vllm_config.speculative_config
    drafter = getattr(getattr(spec, "draft_model_config", None), "max_model_len", None)
    longest = vllm_config.model_config.max_model_len
    if drafter is not None and drafter < longest:
        # vLLM then writes no states for a whole batch, whenever its longest sequence exceeds the drafter's limit.
        raise ConfigError(
            f"expected a drafter that takes sequences as long as the model's ({longest} tokens), got {drafter}: "
            "states of longer ones would be missing; do not set speculative_config's max_model_len, or lower the "
            "model's"
        )
    if not settings.bare:
        return
    if vllm_config.shutdown_timeout < settings.drain_seconds:
        log.warning(
            "shutdown_timeout is %g s, less than drain_seconds (%g): a stopped engine ends requests at once, and may "
            "end before all hidden states are stored; start a server with --shutdown-timeout %d or more, flush an LLM "
            "of your own (hsx_dist.connector.flush) before it goes",
            vllm_config.shutdown_timeout,
            settings.drain_seconds,
            int(settings.drain_seconds) + 10,
        )
    if settings.drain_seconds > envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS:
        log.warning(
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS is %g, less than drain_seconds (%g): workers may be ended before all "
            "hidden states are stored; raise it",
            envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS,
            settings.drain_seconds,
        )
