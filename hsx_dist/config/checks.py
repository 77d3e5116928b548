"""Checks of settings against each other. Each error names the expected value, the given value, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Set
from datetime import datetime
from importlib.metadata import entry_points
from math import inf
from typing import TYPE_CHECKING, Any

from hsx_dist.config.secrets import hide_secrets

if TYPE_CHECKING:
    from hsx_dist.config.models import ExtractConfig, InputConfig

#: Names of the known codecs. ``hsx_dist.format.codecs`` defines them, and adds registered ones.
CODEC_NAMES = {"fp8-token", "none", "split", "zstd"}
#: The group of entry points by which installed packages offer codecs.
CODEC_ENTRY_POINTS = "hsx_dist.codecs"

_REFUSED_ENGINE_KWARGS = {
    "speculative_config": "the extraction sets it: vLLM computes hidden states through its extract_hidden_states "
    "method; choose layers with the setting layers",
    "kv_transfer_config": "the extraction sets it: states leave the engine through its own connector",
    "model": "it is a separate setting; use model",
    "revision": "it is a separate setting; use revision",
}
_REFUSED_SAMPLING_PARAMS = {
    "kv_transfer_params": "the extraction fills it with each row's key",
}
_REFUSED_CHAT_KWARGS = frozenset(
    {"conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length"}
    | {"tokenizer_kwargs"}
)


#: Texts that YAML's authors write for false, for example in quotes or by ``${env:NAME}``. Python reads them as true.
_FALSE_TEXTS = frozenset({"false", "no", "off"})


def texts_for_false(setting: str, values: Mapping[str, Any], texts: Set[str] = _FALSE_TEXTS) -> list[str]:
    """Return a line for each value of a mapping that is a text for false. Libraries would read it as true."""
    return [
        f"{setting}.{hide_secrets(str(name))}: expected a boolean, got a text, which counts as true. Write it without "
        "quotes and without ${env:NAME}"
        for name, value in values.items()
        if isinstance(value, str) and value.strip().lower() in texts
    ]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)``, or an empty text if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return f" (did you mean {near[0]}?)" if near else ""


def check_codec(value: object) -> None:
    """Raise ValueError unless ``value`` names a codec, alone or in a mapping with parameters."""
    name = value.get("name") if isinstance(value, Mapping) else value
    if isinstance(name, str) and name in CODEC_NAMES:
        return  # reading the entry points of all installed packages takes tens of milliseconds
    known = sorted(CODEC_NAMES | entry_points(group=CODEC_ENTRY_POINTS).names)
    choices = ", ".join(known)
    if not isinstance(name, str):
        came = "a mapping without name" if isinstance(value, Mapping) else repr(value)
        raise ValueError(f"expected a codec's name ({choices}) or a mapping with name, got {came}. Set one")
    if name not in known:
        raise ValueError(
            f"expected one of the codecs {choices}, got {name!r}{nearest(name, known)}. Choose one of them"
        )


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the extraction sets, and arguments that it does not support."""
    lines = [
        f"engine_kwargs.{name}: expected it to be absent, got a value; {why}. Remove it"
        for name, why in _REFUSED_ENGINE_KWARGS.items()
        if name in kwargs
    ]
    if str(kwargs.get("pipeline_parallel_size", 1)) != "1":
        lines.append(
            f"engine_kwargs.pipeline_parallel_size: expected 1, got {kwargs['pipeline_parallel_size']!r}; vLLM's "
            "extract_hidden_states has no pipeline parallelism. Use tensor_parallel_size"
        )
    for name, accepted in (("runner", ("auto", "generate")), ("convert", ("auto", "none"))):
        if str(kwargs.get(name, accepted[0])) not in accepted:
            lines.append(
                f"engine_kwargs.{name}: expected {' or '.join(accepted)}, got {kwargs[name]!r}: a pooling engine "
                "caches no hidden states. Remove it"
            )
    trust = kwargs.get("trust_remote_code")
    if trust is not None and not isinstance(trust, bool):
        lines.append(
            f"engine_kwargs.trust_remote_code: expected a boolean or null, got a {type(trust).__name__}. Write it "
            "without quotes and without ${env:NAME}"
        )
    lines += texts_for_false("engine_kwargs", {n: v for n, v in kwargs.items() if n != "trust_remote_code"})
    additional = kwargs.get("additional_config")
    if isinstance(additional, Mapping) and "hsx_capture" in additional:
        lines.append(
            "engine_kwargs.additional_config.hsx_capture: expected it to be absent, got a value; the extraction sets "
            "it. Use the settings source and capture"
        )
    if lines:
        raise ValueError("\n".join(lines))


def check_sampling_params(params: Mapping[str, Any]) -> None:
    """Refuse parameters that the extraction sets, and parameters that give one row several samples."""
    lines = [
        f"sampling_params.{name}: expected it to be absent, got a value; {why}. Remove it"
        for name, why in _REFUSED_SAMPLING_PARAMS.items()
        if name in params
    ]
    extra = params.get("extra_args")
    if isinstance(extra, Mapping) and "kv_transfer_params" in extra:
        why = _REFUSED_SAMPLING_PARAMS["kv_transfer_params"]
        lines.append(
            f"sampling_params.extra_args.kv_transfer_params: expected it to be absent, got a value; {why}. Remove it"
        )
    lines += [
        f"sampling_params.{name}: expected 1, got {params[name]!r}; one row makes one sample. Repeat the row under "
        "other ids to get several answers"
        for name in ("n", "best_of")
        if str(params.get(name) or 1) != "1"
    ]
    lines += texts_for_false("sampling_params", {n: v for n, v in params.items() if n != "stop"})  # it is a text
    if lines:
        raise ValueError("\n".join(lines))


def check_chat_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments with which the chat template would not return one list of token ids."""
    lines = [
        f"chat_template_kwargs.{name}: expected it to be absent, got a value; the extraction asks "
        "for plain token ids. Remove it"
        for name in sorted(_REFUSED_CHAT_KWARGS.intersection(kwargs))
    ]
    lines += texts_for_false("chat_template_kwargs", kwargs, {"false"})  # a template may define "off" and "no"
    if lines:
        raise ValueError("\n".join(lines))


def check_select(value: str) -> None:
    """Raise ``ValueError`` if ``value`` does not name a selection of tokens."""
    if value in ("all", "last", "loss_mask", "mean") or re.fullmatch(r"stride:[1-9]\d{0,8}", value):
        return
    raise ValueError(f"expected all, last, loss_mask, mean or stride:N, got {value!r}. Choose one of them")


def check_input(config: InputConfig) -> None:
    """Refuse an input that contradicts itself."""
    lines = []
    if config.shard_index >= config.num_shards:
        lines.append(
            f"shard_index: expected a number below num_shards ({config.num_shards}), got {config.shard_index}; the "
            "first shard is 0"
        )
    fields = {n: getattr(config, n) for n in ("text", "messages", "tools", "token_ids", "loss_mask", "id")}
    given = [value for value in fields.values() if value is not None]
    if twice := sorted({v for v in given if given.count(v) > 1}):
        lines.append(f"expected a different field for each purpose, got {', '.join(twice)} for several. Name others")
    if own := sorted(set(config.metadata) & set(given) - {config.tools}):
        lines.append(f"metadata: expected further fields, got {', '.join(own)}, which is stored anyway. Remove it")
    if lines:
        raise ValueError("\n".join(lines))


def check_deadline(value: object) -> object:
    """Return a deadline as seconds, or as a time with its zone.

    Only text is parsed as a time, because pydantic would convert a number of seconds to a time in 1970.
    """
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf):
        return value
    try:
        when = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise ValueError(
            f"expected seconds from the start (more than 0), or an ISO 8601 time with its zone such as "
            f"2026-01-31T18:00:00+00:00, got {value!r}. Correct it"
        )
    return when


def check_capture(config: ExtractConfig) -> None:
    """Refuse a capture that its source does not support, or that contradicts other settings."""
    if config.capture is None:
        return
    lines = []
    if config.source != "taps":
        lines.append(
            f"capture: expected source taps, got source {config.source}; vLLM's extraction captures only hidden "
            "states. Remove source, or use layers"
        )
    if set(config.capture) not in ({"points"}, {"preset"}):
        came = ", ".join(sorted(map(str, config.capture))) or "nothing"
        lines.append(f"capture: expected either points or preset, got {came}. Set one of them")
    if "layers" in config.model_fields_set:
        lines.append(
            "layers: expected it to be absent with capture, got a value. Name hidden_states among capture.points. "
            "Remove one of them"
        )
    if lines:
        raise ValueError("\n".join(lines))


def check_resources(resources: Mapping[str, float]) -> None:
    """Refuse what Ray would refuse when a replica starts."""
    for name, amount in resources.items():
        if name in ("CPU", "GPU"):
            raise ValueError(f"expected custom resources, got {name}. Use replica.num_{name.lower()}s")
        if name in ("memory", "object_store_memory"):
            raise ValueError(f"expected custom resources, got {name}. Remove it: no memory is reserved for replicas")
        if amount < 0 or 0 < amount < 0.0001:
            raise ValueError(f"expected amounts of 0, or of 0.0001 and more, got {amount:g}. Correct it")


def check_sizes(config: ExtractConfig) -> None:
    """Refuse byte budgets that could deadlock, and replica counts that contradict one another."""
    page, segment, credit = config.page_bytes, config.segment_bytes, config.writers.credit_bytes
    rules = (
        ("segment_bytes", segment, page, "page_bytes", 1, "a segment consists of whole pages"),
        ("part_bytes", config.part_bytes, segment, "segment_bytes", 1, "a part holds at least one segment"),
        ("in_flight_bytes", config.in_flight_bytes, segment, "segment_bytes", 2, "one fills while another is sent"),
        ("writers.credit_bytes", credit, page, "page_bytes", 2, "one page arrives while another is encoded"),
    )  # fmt: skip
    lines = [
        f"{name}: expected at least {'twice ' if times == 2 else ''}{other} ({_size(least * times)}), "
        f"got {_size(value)}; {why}. Raise {name} or lower {other}"
        for name, value, least, other, times, why in rules
        if value < least * times
    ]
    if config.max_replicas < config.min_replicas:
        lines.append(
            f"max_replicas: expected at least min_replicas ({config.min_replicas}), got {config.max_replicas}. Raise "
            "max_replicas or lower min_replicas"
        )
    if config.check_samples and config.select != "all":
        lines.append(
            f"check_samples: expected 0 with select={config.select}, got {config.check_samples}; transformers needs "
            "the whole row to compute the same. Use select=all for a few rows, or hsx doctor --engine"
        )
    if lines:
        raise ValueError("\n".join(lines))


def _size(n: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= scale and n % scale == 0:
            return f"{n // scale}{unit}"
    return f"{n} bytes"
