"""The loads and sinks of ``benchmarks.engine``, which says what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import thin_model
from benchmarks.engine_cell import Sink

SINKS = (
    "none", "null", "null-sink", "busy", "traffic", "disk", "file", "threads", "discard", "split", "seaweedfs", "slow",
    "zstd",
    "direct-sink", "direct", "vllm",
)  # fmt: skip
FILES = ("file", "direct")
WRITTEN = ("file", "threads")
SERVED = ("discard", "split")
#: With vLLM's own writes into its cache, and with ours.
STORING = WRITTEN + SERVED
DIRECT = ("direct-sink", "direct")
#: The store, or the writers' core, is the limit.
BOUND = ("slow", "zstd")
#: Bytes that the server of ``slow`` takes in a second: a fifth of what the thin model makes.
SLOW_RATE = 60e6
#: What the connector is told beside where to store.
SETTINGS: dict[str, dict[str, Any]] = {
    "direct-sink": {"cache_writes": "direct"},
    "direct": {"cache_writes": "direct"},
    "threads": {"transport": "inline"},
    # A fifth of what the thin model makes, or less, is what a core does.
    "zstd": {"codec": {"name": "zstd", "level": 9}},
}
#: Null sinks beside a process that has nothing to do with them: what it does.
STRANGERS = {"busy": "copy", "traffic": "traffic", "disk": "disk"}
#: What of a sink ``engine_cell`` knows; the others store.
KINDS: dict[str, Sink] = {
    "none": "none", "null": "null", "vllm": "vllm",
    "null-sink": "null-sink", "direct-sink": "null-sink", **dict.fromkeys(STRANGERS, "null-sink"),
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """A model, what is captured of it, and requests."""

    model: str
    layers: tuple[int, ...]
    hidden: int
    vocab: int
    phase: str
    pinned: bool

    @property
    def name(self) -> str:
        return f"{self.model}/{len(self.layers)}/{self.phase}/{'pinned' if self.pinned else 'unpinned'}"

    @property
    def gpu_like(self) -> bool:
        """Whether its states' bytes per unit of compute are those of a model on a GPU."""
        return self.model == "thin"

    @property
    def requests(self) -> tuple[int, int, int]:
        """Prompt tokens, output tokens, and how many at once: as many as give a window many steps."""
        # Of the thin model a core computes over 20,000 tokens in a second, and under 1,000 of the other.
        return (512, 1, 8 if self.gpu_like else 2) if self.phase == "prefill" else (64, 128, 16 if self.gpu_like else 4)


LOADS = {
    load.name: load
    for pinned in (True, False)
    for phase in ("prefill", "decode")
    for load in (
        Load("thin", thin_model.CAPTURED, thin_model.HIDDEN, thin_model.VOCAB, phase, pinned),
        Load("smollm2", (2, 15, 27, 30), 576, 49152, phase, pinned),
        Load("smollm2", tuple(range(31)), 576, 49152, phase, pinned),
    )
}
