"""Register the connector with vLLM under its bare name (entry point group ``vllm.general_plugins``)."""

from __future__ import annotations

from typing import Any

import hsx_dist.transport.affinity  # noqa: F401 - imported before vLLM pins threads to cores
from hsx_dist.isa import avoid_amx
from hsx_dist.observe.logs import redact_like_parent
from hsx_dist.vllm_patches import captures, model_loads

NAME = "HiddenStatesConnector"


def register() -> None:
    """Register ``HiddenStatesConnector``. vLLM calls this in every process, in some processes more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    redact_like_parent()
    avoid_amx()
    # A second registration of a name is an error in vLLM, and a plugin that raises is only logged.
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "hsx_dist.connector.connector", NAME)
    captures.install()  # before a model is built
    model_loads.install(_tap)


def _tap(model: Any, vllm_config: Any) -> None:
    from hsx_dist.taps.capture_config import capture_of

    if capture_of(vllm_config) is not None:  # otherwise the taps' modules are not imported
        from hsx_dist.taps.install import tap_model

        tap_model(model, vllm_config)
