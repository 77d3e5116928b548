"""Loads and sinks of ``benchmarks.engine``, whose docstring describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import thin_model
from benchmarks.engine_cell import Sink, Source

SINKS = (
    "none", "null", "null-sink", "busy", "traffic", "disk", "file", "threads", "discard", "split", "seaweedfs", "slow",
    "zstd",
    "direct-cache", "direct-sink", "direct", "taps-cache", "taps-sink", "taps", "vllm",
)  # fmt: skip
FILES = ("file", "direct")
WRITTEN = ("file", "threads")
SERVED = ("discard", "split")
#: Sinks that store, with vLLM's own writes into its cache.
STORING = WRITTEN + SERVED
DIRECT = ("direct-sink", "direct")
TAPS = ("taps-cache", "taps-sink", "taps")
#: Sinks whose store or writers' core is the limit.
BOUND = ("slow", "zstd")
#: Bytes a second that the server of ``slow`` accepts: a fifth of the thin model's rate.
SLOW_RATE = 60e6
#: Settings of the connector for a sink, in addition to the output.
SETTINGS: dict[str, dict[str, Any]] = {
    "direct-sink": {"cache_writes": "direct"},
    "direct": {"cache_writes": "direct"},
    "threads": {"transport": "inline"},
    # At this level a core encodes at most a fifth of the thin model's bytes.
    "zstd": {"codec": {"name": "zstd", "level": 9}},
}
#: Null sinks next to a competing process, and its argument (``benchmarks.busy``).
STRANGERS = {"busy": "copy", "traffic": "traffic", "disk": "disk"}
#: A sink's kind for ``engine_cell``. All others are ``store``.
KINDS: dict[str, Sink] = {
    "none": "none", "null": "null", "vllm": "vllm", **dict.fromkeys(("direct-cache", "taps-cache"), "null"),
    **dict.fromkeys(("null-sink", "direct-sink", "taps-sink", *STRANGERS), "null-sink"),
}  # fmt: skip


@dataclass(frozen=True)
class Toggled:
    """An engine whose captures are switched on and off between windows: source, sink, and the windows' modes."""

    source: Source
    sink: Sink
    modes: tuple[str, ...]


#: Toggled engines, by the last part of a load's name.
TOGGLED = {
    "host": Toggled("both", "null-sink", ("none", "null", "direct-cache", "taps-cache", "taps-sink")),
    "files": Toggled("taps", "store", ("none", "taps")),
    "cache-files": Toggled("cache", "store", ("none", "file")),
}
#: Points that vLLM's extraction cannot capture, so these loads compare with no extraction only.
POINTS: dict[str, dict[str, Any]] = {
    "qkvz": {"points": {name: [15] for name in ("q", "k", "v", "z")}},
    "attention": {"preset": "attention"},
    "full": {"preset": "full"},
}


@dataclass(frozen=True)
class Load:
    """A model, its captured points (hidden states of ``layers``, or ``points``), requests, and cores."""

    model: str
    layers: tuple[int, ...]
    hidden: int
    vocab: int
    phase: str
    place: str
    points: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}/{self.points or len(self.layers)}/{self.phase}/{self.place}"

    @property
    def pinned(self) -> bool:
        return self.place != "unpinned"

    @property
    def toggled(self) -> Toggled | None:
        if self.points:
            return Toggled("taps", "null-sink", ("none", "taps-cache", "taps-sink"))
        return TOGGLED.get(self.place)

    @property
    def capture(self) -> dict[str, Any]:
        """The taps' setting."""
        return POINTS[self.points] if self.points else {"points": {"hidden_states": list(self.layers)}}

    @property
    def gpu_like(self) -> bool:
        """Whether the model's states have as many bytes for each second of compute as those of a model on a GPU."""
        return self.model == "thin"

    @property
    def requests(self) -> tuple[int, int, int]:
        """Prompt tokens, output tokens, and concurrency, chosen so that a window has many steps."""
        # A core computes over 20,000 tokens/s of the thin model, and under 1,000 of SmolLM2.
        return (512, 1, 8 if self.gpu_like else 2) if self.phase == "prefill" else (64, 128, 16 if self.gpu_like else 4)


LOADS = {
    load.name: load
    for place in ("pinned", "unpinned", "compiled", *TOGGLED)
    for phase in ("prefill", "decode")
    for load in (
        Load("thin", thin_model.CAPTURED, thin_model.HIDDEN, thin_model.VOCAB, phase, place),
        Load("smollm2", (2, 15, 27, 30), 576, 49152, phase, place),
        Load("smollm2", tuple(range(31)), 576, 49152, phase, place),
        *(Load("smollm2", (), 576, 49152, phase, place, points) for points in (POINTS if place == "host" else ())),
    )
}
