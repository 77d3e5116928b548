"""The connector's settings in ``kv_connector_extra_config``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from hsx_dist.config.loading import with_environment
from hsx_dist.config.models import MAX_SECONDS
from hsx_dist.config.redaction import redact_text
from hsx_dist.config.secrets import hide_secrets, secret_paths
from hsx_dist.config.urls import check_no_credentials
from hsx_dist.errors import ConfigError
from hsx_dist.logger import get_logger

log = get_logger(__name__)

#: Keys of vLLM's own connector → keys of this connector.
VLLM_KEYS = {
    "shared_storage_path": "output",
    "allow_custom_save_path": "allow_custom_save_path",
    "num_writer_threads": "writer_threads",
    "use_synchronization_lock": "use_synchronization_lock",
}


#: Settings of earlier versions: name → value → the value of ``transport`` that replaces it.
RENAMED = {
    "writers": {"threads": "inline", "process": "spawn"},
    "via": {"process": "inline", "socket": "attach", "store": "spawn"},
}


class ConnectorConfig(BaseModel):
    """The ``hsx`` table of ``kv_connector_extra_config``. vLLM's own keys are next to the table (``VLLM_KEYS``).

    With an ``address``, pages go to a job's writers. ``inline``: to an end that ``transport.local_end.register``
    registered in this process under that name. ``attach``: to the process that listens there with the same ``authkey``.
    Without an ``address`` the connector is bare: it stores under ``output`` itself (one sample an object, no run).
    """

    model_config = ConfigDict(extra="forbid")

    transport: Literal["inline", "attach", "spawn"] = Field(
        "spawn",
        description="where pages go. inline: writers in the engine's process, for stores that exist only there. "
        "attach: a process that listens at ``address``. spawn: a process that the connector starts, which does not "
        "share the engine's interpreter lock",
    )
    address: str | None = None
    #: Hexadecimal. A ``SecretStr``: vLLM logs its configuration.
    authkey: SecretStr | None = None
    output: str = Field(min_length=1)
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="fsspec's options for ``output``; ``${env:NAME}`` is an environment variable's value",
    )
    layout: Literal["part", "sample"] = "sample"
    codec: str | dict[str, Any] = "none"
    segment_bytes: int = Field(64 << 20, gt=0)
    page_bytes: int = Field(8 << 20, gt=0)
    in_flight_bytes: int = Field(256 << 20, gt=0)
    writer_threads: int = Field(2, ge=1, le=256)
    include_output_tokens: bool = False
    aborted_outputs: Literal["store", "drop"] = Field(
        "store",
        description="for a request with include_output_tokens that was aborted, or that a stop string ended. store: "
        "the computed tokens are stored and labelled. drop: nothing is stored",
    )
    on_bad_rows: Literal["flag", "fail"] = Field(
        "flag",
        description="for a sample with non-finite rows or an all-zero layer. flag: it is stored and labelled. fail: it "
        "is not stored",
    )
    allow_custom_save_path: bool = Field(False, description="a client may choose a name under ``output``")
    use_synchronization_lock: bool = Field(
        True, description="on a local disk, PATH.lock is held until the object is stored, as in vLLM's connector"
    )
    cache_writes: Literal["vllm", "direct"] = Field(
        "vllm",
        description="how states get into the cache. vllm: by three copies of vLLM. direct: by one copy (V1 runner "
        "without data parallelism; other engines use vllm)",
    )
    owners: int | None = Field(
        None,
        ge=1,
        description="limit of the ranks that copy and ship, from rank 0; null: all ranks that can (``one_node``)",
    )
    replica: str | None = Field(None, description="name of the job's replica that runs this engine, for log lines")
    ttl_seconds: float | None = Field(
        None, gt=0, le=MAX_SECONDS, description="seconds after which hsx gc may remove objects"
    )
    inline_bytes: int = Field(
        16 << 20,
        gt=0,
        description="limit of the bytes of states in one answer (``hsx_dist.serving``); all answers of a server "
        "process together hold at most 16 times as much",
    )
    drain_seconds: float = Field(
        4.0, ge=0, le=MAX_SECONDS, description="seconds that shutdown waits for copied states to be stored"
    )

    @property
    def bare(self) -> bool:
        """Whether the connector stores itself, without a run."""
        return self.address is None

    @property
    def local(self) -> bool:
        """Whether samples are stored in a folder of this machine."""
        return "://" not in self.output or self.output.startswith(("file://", "local://"))

    # The other parts of ``in_flight_bytes``: half for the ring, ``sample_bytes`` in each of the two processes, and a
    # tenth for the store's client.

    @property
    def encoded_bytes(self) -> int:
        """Limit of the encoded bytes that a bare connector's writers hold; a larger sample is stored alone."""
        return self.in_flight_bytes * 3 // 10

    @property
    def sample_bytes(self) -> int:
        """Limit of the samples' bytes other than states: metadata, token ids, attached arrays, Python objects."""
        return self.in_flight_bytes // 20

    @property
    def one_node(self) -> bool:
        """Whether only ranks on one node can store: others have another disk, or cannot reach ``address``."""
        return not self.bare or self.local

    @property
    def one_object(self) -> bool:
        """Whether each sample is one object, so that the answer can name it."""
        return self.layout == "sample" and self.bare


def _without_secrets(options: Mapping[str, Any]) -> Any:
    """Return the options with ``${env:NAME}`` replaced. ``ConfigError`` if they contain a credential as text."""
    for secret in secret_paths(options, ("hsx", "storage_options")):
        raise ConfigError(
            f"{'.'.join(secret)}: expected no credential, got one. vLLM logs its configuration, and other users "
            "can read command lines. Set it in the environment and write ${env:NAME}, or use a profile or role"
        )
    return with_environment(options)


def read_connector_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Settings from ``kv_connector_extra_config``.

    Raises:
        ConfigError: an unknown key, a wrong value, parts without a run, or a ring that could not hold two segments.
    """
    given = extra.get("hsx") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"kv_connector_extra_config.hsx: expected an object, got a {type(given).__name__}. Write names and values"
        )
    table = dict(given)
    for theirs, ours in VLLM_KEYS.items():
        if extra.get(theirs) is not None:
            table.setdefault(ours, extra[theirs])
    for name in extra:
        if name != "hsx" and name not in VLLM_KEYS:
            log.warning(
                "kv_connector_extra_config[%r] is unknown and ignored. Settings of this connector belong under 'hsx'",
                hide_secrets(name),
            )
    for old, values in RENAMED.items():
        if old in table:
            new = values.get(str(table[old]), "inline, attach or spawn")
            raise ConfigError(f"expected hsx.transport, got hsx.{old}. Set hsx.transport to {new}")
    table.setdefault("output", tempfile.gettempdir())  # where vLLM's own connector stores by default
    if isinstance(options := table.get("storage_options"), Mapping):
        table["storage_options"] = _without_secrets(options)
    try:
        settings = ConnectorConfig.model_validate(table)
    except ValidationError as e:
        lines = [
            f"{'.'.join(map(str, d['loc']))}: {d['msg']}" for d in e.errors(include_input=False, include_url=False)
        ]
        raise ConfigError(redact_text("kv_connector_extra_config: " + "; ".join(lines))) from None
    check_no_credentials(settings.output)  # answers to clients name it
    if (settings.transport == "attach" and settings.bare) or (settings.transport == "spawn" and not settings.bare):
        raise ConfigError(
            "hsx.address: expected the address of a process for transport 'attach', or none for 'spawn', got "
            f"{'none' if settings.bare else 'one'} for {settings.transport!r}. Set hsx.address for attach, or omit it "
            "for spawn"
        )
    if settings.bare and settings.layout == "part":
        raise ConfigError(
            "hsx.layout: expected 'sample' without hsx.address, got 'part'. Parts need a run, whose driver checks "
            "them. Omit hsx.layout, or run a job"
        )
    # With one object per sample, samples are not cut into segments.
    if settings.layout == "part" and settings.in_flight_bytes < 2 * settings.segment_bytes:
        raise ConfigError(
            f"in_flight_bytes: expected at least {2 * settings.segment_bytes} (two segments), got "
            f"{settings.in_flight_bytes}. Raise in_flight_bytes or lower segment_bytes"
        )
    return settings
