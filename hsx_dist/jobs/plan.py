"""Estimates a run before anything is started: rows, tokens, bytes, parts, requests, memory, time, network."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hsx_dist.config import ExtractConfig
from hsx_dist.errors import InputError
from hsx_dist.format.codecs import CODECS
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs.encode import Encoded, RowEncoder, RowRules, load_tokenizer
from hsx_dist.inputs.rows import Row
from hsx_dist.jobs.cache_share import CacheShare, cache_share
from hsx_dist.jobs.capture import mean_bytes, rank_bytes, token_bytes
from hsx_dist.jobs.host_share import HostShare, host_share
from hsx_dist.jobs.preflight import Model, examine_model, load_text_config, partial_note

#: Raw bytes per stored byte, measured on SmolLM2-135M's states (benchmarks/results/codec.md). With split, which stores
#: low bytes unchanged, the ratios of larger models differ by a few percent.
RATIOS: Mapping[str, Mapping[str, float]] = {
    "bfloat16": {"none": 1.0, "zstd": 1.283, "split": 1.468, "fp8-token": 2.326},
    "float16": {"none": 1.0, "zstd": 1.081, "split": 1.160, "fp8-token": 2.325},
    "float32": {"none": 1.0, "zstd": 1.081, "split": 1.190, "fp8-token": 4.650},
}
#: Bytes in a part's header for a segment, for each layer of a segment, and for each chunk of a layer.
_SEGMENT_HEADER, _LAYER_HEADER, _CHUNK_HEADER = 300, 90, 26
#: Limit of the raw bytes of one chunk of one layer.
_CHUNK_BYTES = 1 << 20
#: One put of a part, one check for a newer attempt, one put of the receipt.
_REQUESTS_A_PART = 3
#: Seconds between two heartbeats of the driver.
_HEARTBEAT_S = 5.0


@dataclass
class RunPlan:
    """An estimate. Numbers of tokens are scaled from ``sampled`` to all usable rows, and exact if all were sampled.

    ``unreadable``: rows of the input that cannot be read. ``refused``: reason → rows of the sample that would be
    refused. ``stored``: codec → bytes. ``tokens``: tokens that the engine computes (answers at their longest).
    ``stored_tokens``: tokens whose states are kept. ``margin``: relative error of ``stored_tokens`` at 95 %.
    ``point_bytes``: point → (layers, raw bytes of a token).
    """

    rows: int
    unreadable: int
    sampled: int
    refused: dict[str, int]
    tokens: int
    stored_tokens: int
    margin: float
    token_bytes: int
    point_bytes: dict[str, tuple[int, int]]
    raw_bytes: int
    codec: str
    stored: dict[str, int]
    parts: int
    requests: int
    cache: CacheShare
    host: HostShare
    seconds: float
    node_bytes_per_second: float
    replicas: int
    notes: list[str] = field(default_factory=list)

    @property
    def stored_bytes(self) -> int:
        """Stored bytes with the configured codec."""
        return self.stored[self.codec]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        found = asdict(self)
        found["cache"] = {**asdict(self.cache), "share": self.cache.share}
        return {**found, "stored_bytes": self.stored_bytes}


def make_plan(
    config: ExtractConfig,
    rows: Callable[[], Iterator[Row | RowFate]],
    *,
    sample_rows: int = 1000,
    tokens_per_second: float = 10_000.0,
    replicas_per_node: int = 1,
) -> RunPlan:
    """Read the input once, encode ``sample_rows`` of its rows, and estimate the rest. Needs no engine and no store.

    Args:
        tokens_per_second: tokens per second of one replica, measured or guessed.
        replicas_per_node: replicas that share a node's network.

    Raises:
        ConfigError: a setting is wrong, the model or the input cannot be read.
    """
    model = examine_model(config)
    measured = _measure(config, model, rows(), sample_rows)
    tokens = measured.scaled(row.computed for row in measured.lengths)
    stored_tokens = measured.scaled(row.kept for row in measured.lengths)
    point_bytes = _point_bytes(config, model)
    row_bytes = sum(size for _, size in point_bytes.values())
    raw = stored_tokens * row_bytes
    codec = str(config.codec["name"] if isinstance(config.codec, dict) else config.codec)
    beside = measured.scaled(row.beside for row in measured.lengths)
    stored, notes = _stored_bytes(config, model, codec, raw, beside)
    seconds = tokens / max(tokens_per_second * config.max_replicas, 1e-9)
    parts = _parts(config, stored[codec], measured.scaled(row.kept > 0 for row in measured.lengths), seconds)
    cache = _cache_share(config, model)
    return RunPlan(
        rows=measured.usable + measured.unreadable,
        unreadable=measured.unreadable,
        sampled=len(measured.lengths),
        refused=dict(Counter(row.refused for row in measured.lengths if row.refused).most_common()),
        tokens=tokens,
        stored_tokens=stored_tokens,
        margin=_margin([row.kept for row in measured.lengths], measured.usable),
        token_bytes=row_bytes,
        point_bytes=point_bytes,
        raw_bytes=raw,
        codec=codec,
        stored=stored,
        parts=parts,
        requests=parts * _REQUESTS_A_PART + math.ceil(seconds / _HEARTBEAT_S) + 10,
        cache=cache,
        host=host_share(config),
        seconds=seconds,
        node_bytes_per_second=tokens_per_second * replicas_per_node * stored[codec] / max(tokens, 1),
        replicas=config.max_replicas,
        notes=notes + _notes(config, cache),
    )


def _point_bytes(config: ExtractConfig, model: Model) -> dict[str, tuple[int, int]]:
    """For each point the number of its layers, and the raw bytes of a stored row of all of them."""
    mean = config.select == "mean"
    return {
        name: (len(r.layers), mean_bytes({name: r}, model.itemsize) if mean else token_bytes({name: r}))
        for name, r in model.rows.items()
    }


def _stored_bytes(
    config: ExtractConfig, model: Model, codec: str, raw: int, beside: int
) -> tuple[dict[str, int], list[str]]:
    """Return bytes by codec, for ``raw`` bytes of states and ``beside`` other bytes, and notes for the user."""
    dtype = "float32" if config.select == "mean" or model.itemsize == 4 else model.dtype
    stored = {name: round(raw / ratio) + beside for name, ratio in RATIOS[dtype].items()}
    if codec in stored:
        return stored, []
    note = f"the codec {codec} has no measured ratio: the plan assumes that it stores states unchanged"
    return {**stored, codec: raw + beside}, [note]


@dataclass(frozen=True)
class _RowLength:
    """A row's ``computed`` and ``kept`` tokens, and its bytes without states (``beside``). 0 for a ``refused`` row."""

    computed: int = 0
    kept: int = 0
    beside: float = 0.0
    refused: str = ""  # why


@dataclass(frozen=True)
class _Measured:
    """Rows of an input, and the ``lengths`` of some of the usable ones."""

    usable: int
    unreadable: int
    lengths: list[_RowLength]

    def scaled(self, values: Iterable[float]) -> int:
        """Return the sum over the measured rows, scaled to all usable rows."""
        return round(self.usable / max(len(self.lengths), 1) * sum(values))


def _measure(config: ExtractConfig, model: Model, rows: Iterator[Row | RowFate], sample_rows: int) -> _Measured:
    tokenizer = load_tokenizer(model.path, revision=config.revision, engine_kwargs=config.engine_kwargs)
    encoder = RowEncoder(
        tokenizer,
        model.max_tokens,
        config.chat_template_kwargs,
        vocab_size=model.vocab_size,
        rules=RowRules.of(config),
    )

    def length(row: Row) -> _RowLength:
        try:
            encoded = encoder.encode(row)
        except InputError as e:
            return _RowLength(refused=str(e).split(", got", 1)[0])
        computed = min(len(encoded.token_ids) + _longest_answer(config) - 1, model.max_tokens)
        kept = kept_tokens(encoded, computed, config)
        return _RowLength(computed, kept, _overhead_bytes(row, encoded, kept, model, config))

    return _Measured(*_sample(rows, sample_rows, length))


def _longest_answer(config: ExtractConfig) -> int:
    return int(config.sampling_params.get("max_tokens") or 1) if config.include_output_tokens else 1


def _cache_share(config: ExtractConfig, model: Model) -> CacheShare:
    fp8 = str(config.engine_kwargs.get("kv_cache_dtype", "")).startswith("fp8")
    text, ranks = load_text_config(config, model.path), int(config.engine_kwargs.get("tensor_parallel_size", 1))
    kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    return cache_share(
        text,
        states=rank_bytes(model.rows, ranks, kv_heads),
        tensor_parallel=ranks,
        itemsize=1 if fp8 else model.itemsize,
    )


def _notes(config: ExtractConfig, cache: CacheShare) -> list[str]:
    notes = [cache.warning] if cache.warning else []
    if config.select != "all":
        notes.append(partial_note(config.select))
    if config.include_output_tokens:
        notes.append(f"answers are counted at their longest, {_longest_answer(config)} tokens each")
    return notes


def kept_tokens(encoded: Encoded, computed: int, config: ExtractConfig) -> int:
    """Return the number of stored tokens of a row with ``computed`` tokens."""
    select = config.select
    if select in ("last", "mean"):
        return 1
    if select.startswith("stride:"):
        return -(-computed // int(select.partition(":")[2]))
    if select == "loss_mask":
        return sum(encoded.loss_mask or ()) + computed - len(encoded.token_ids)
    return computed


def _sample(
    rows: Iterator[Row | RowFate], size: int, length: Callable[[Row], _RowLength]
) -> tuple[int, int, list[_RowLength]]:
    """Return the number of usable rows, the number of others, and ``length`` of ``size`` random usable rows.

    Each row is equally likely. The same input gives the same rows. Keeps no rows, because a thousand may fill the
    memory. So it measures ``size * (1 + log(usable / size))`` rows: 8,000 for a thousand of a million.
    Algorithm R: Vitter, Random Sampling with a Reservoir, 1985."""
    chance = random.Random(0)  # noqa: S311 (a sample, not a secret)
    usable = unreadable = 0
    some: list[_RowLength] = []
    for row in rows:
        if not isinstance(row, Row):
            unreadable += 1
            continue
        usable += 1
        if len(some) < size:
            some.append(length(row))
        elif (place := chance.randrange(usable)) < size:
            some[place] = length(row)
    return usable, unreadable, some


def _overhead_bytes(row: Row, encoded: Encoded, kept: int, model: Model, config: ExtractConfig) -> float:
    """Bytes of a sample without its states: token ids, attached arrays, and its share of headers."""
    ids = 8 * kept * len(model.rows) + (kept if encoded.loss_mask is not None else 0)  # each point has the ids
    if config.select == "mean":
        ids += 4 * len(encoded.token_ids)
    elif config.select == "loss_mask":
        ids += 4 * kept
    layers = sum(len(r.layers) for r in model.rows.values())
    layer_bytes = kept * model.token_bytes / layers
    chunk = min(_CHUNK_BYTES, int(config.page_bytes) / layers)
    chunks = max(math.ceil(layer_bytes / chunk), 1)
    segments = max(math.ceil(kept * model.token_bytes / int(config.segment_bytes)), 1)
    header = segments * (_SEGMENT_HEADER + layers * _LAYER_HEADER) + layers * chunks * _CHUNK_HEADER
    return ids + header + (1.2 * len(json.dumps(row.metadata)) if row.metadata else 0)


def _parts(config: ExtractConfig, stored: int, samples: int, seconds: float) -> int:
    if config.layout == "sample":
        return samples
    by_size = math.ceil(stored / int(config.part_bytes))
    # Each writer stores its part after part_seconds, and at the end.
    writers = config.writers.per_node
    by_age = writers * math.ceil(seconds / config.part_seconds)
    return max(by_size, min(by_age, samples), min(writers, samples))


def _margin(lengths: list[int], usable: int) -> float:
    n = len(lengths)
    if n < 2 or n >= usable:
        return 0.0
    mean = sum(lengths) / n
    deviation = math.sqrt(sum((x - mean) ** 2 for x in lengths) / (n - 1))
    return 1.96 * deviation / math.sqrt(n) / mean if mean else 0.0


assert set(RATIOS["bfloat16"]) == set(CODECS)
