"""What the connector reads from ``kv_connector_extra_config``."""

from __future__ import annotations

import tempfile
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hsx_dist.errors import ConfigError


class ConnectorSettings(BaseModel):
    """The ``hsx`` table of ``kv_connector_extra_config``, and vLLM's own key ``shared_storage_path``.

    ``via`` says where pages go: ``process`` to a sender registered in this process (``outlet.register``), ``socket`` to
    the process that listens at ``address``, ``store`` to writer threads of the worker's own that store under
    ``output`` (one sample an object, no run: what a bare connector does).
    """

    model_config = ConfigDict(extra="forbid")

    via: Literal["process", "socket", "store"] = "store"
    address: str | None = None
    output: str
    layout: Literal["part", "sample"] = "sample"
    codec: str | dict[str, Any] = "none"
    segment_bytes: int = 64 << 20
    page_bytes: int = 8 << 20
    in_flight_bytes: int = 256 << 20
    writer_threads: int = 2
    include_output_tokens: bool = False


def read_settings(extra: dict[str, Any]) -> ConnectorSettings:
    """Settings from ``kv_connector_extra_config``.

    Raises:
        ConfigError: an unknown key, a wrong value, or a ring that could not hold two segments.
    """
    table = dict(extra.get("hsx") or {})
    if "shared_storage_path" in extra:
        table.setdefault("output", extra["shared_storage_path"])
    if "num_writer_threads" in extra:
        table.setdefault("writer_threads", extra["num_writer_threads"])
    table.setdefault("output", tempfile.gettempdir())  # where vLLM's own connector stores by default
    try:
        settings = ConnectorSettings.model_validate(table)
    except ValidationError as e:
        lines = [
            f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in e.errors(include_input=False, include_url=False)
        ]
        raise ConfigError("kv_connector_extra_config: " + "; ".join(lines)) from None
    if settings.in_flight_bytes < 2 * settings.segment_bytes:
        raise ConfigError(
            f"in_flight_bytes must hold two segments: expected at least {2 * settings.segment_bytes}, came "
            f"{settings.in_flight_bytes}; raise in_flight_bytes or lower segment_bytes"
        )
    return settings
