"""One cell of ``benchmarks.engine``: a process with an engine and a load, which measures windows for its parent.

    python -m benchmarks.engine_cell CELL.json FD    # FD: a multiprocessing.connection to the parent

The load is a closed loop with a fixed number of concurrent requests. At the end of a window the cell waits for the last
answers, then for the last sample, then for the disk. All times are of ``time.monotonic``, as in the parent.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.engine_toggles import Toggles
from benchmarks.null_sender import NullSender
from benchmarks.processes import check_pinned, cpu_seconds, pin

#: Capacity of the connector's ring. A bare connector uses half of ``in_flight_bytes`` for it.
RING_BYTES = 128 << 20

Sink = Literal["none", "null", "null-sink", "store", "vllm"]
Source = Literal["cache", "taps", "both"]


@dataclass(frozen=True)
class CellSpec:
    """Settings of one cell's process.

    Attributes:
        seconds: Length of one window.
        sink: ``none``: no extraction. ``null``: a connector that does nothing. ``null-sink``: our connector with a
            sender that drops pages. ``store`` and ``vllm``: our connector or vLLM's, which store at ``output``.
        source: What captures. With ``both`` our connector ships the taps' points, and vLLM's extraction can be
            switched on in addition.
        capture: Setting of the taps.
        modes: Modes of the windows, if captures are switched on and off.
        engine_core: Core of the engine's thread; None leaves the choice to vLLM and the kernel.
        other_core: Core of all other threads.
        profile: File for ``torch.profiler``'s table of the engine's operators.
        made_up_weights: vLLM makes random weights for a model without a weights file.
    """

    model: str
    layers: tuple[int, ...]
    hidden: int
    vocab: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    seconds: float
    sink: Sink
    source: Source = "cache"
    capture: dict[str, Any] | None = None
    modes: tuple[str, ...] = ()
    output: str = ""
    storage_options: dict[str, Any] | None = None
    codec: str = "none"
    hsx: dict[str, Any] | None = None
    engine_core: int | None = None
    other_core: int | None = None
    profile: str = ""
    made_up_weights: bool = False
    compiled: bool = False
    step_tokens: int = 2048

    @property
    def sample_tokens(self) -> int:
        """Tokens of one sample. The last generated token is never an input, so it has no states."""
        return self.prompt_tokens + max(self.output_tokens - 1, 0)

    @property
    def sample_bytes(self) -> int:
        return self.sample_tokens * len(self.layers) * self.hidden * 2


def engine_arguments(spec: CellSpec) -> dict[str, Any]:
    """Arguments for vLLM's ``LLM``."""
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": spec.prompt_tokens + spec.output_tokens + 8,
        "max_num_batched_tokens": spec.step_tokens,
        "max_num_seqs": spec.concurrency,
        "enable_prefix_caching": False,  # cached prompts would not be computed
        "enforce_eager": not spec.compiled,
        "load_format": "dummy" if spec.made_up_weights else "auto",
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
    }
    if spec.sink == "none":
        return arguments
    if spec.source != "taps":
        arguments["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.layers)}},
        }
    if spec.source != "cache":
        from hsx_dist.taps.capture_config import additional_config

        assert spec.capture is not None
        arguments["additional_config"] = additional_config(spec.capture)
    arguments["kv_transfer_config"] = {"kv_role": "kv_producer"} | connector(spec)
    return arguments


def connector(spec: CellSpec) -> dict[str, Any]:
    """The connector and its settings, for ``kv_transfer_config``."""
    if spec.sink in ("null", "vllm"):
        return {
            "kv_connector": "NullConnector" if spec.sink == "null" else "ReferenceConnector",
            "kv_connector_module_path": "benchmarks.engine_connectors",
            "kv_connector_extra_config": {"shared_storage_path": spec.output} if spec.output else {},
        }
    hsx = {"output": spec.output or "nowhere", "codec": spec.codec, "in_flight_bytes": 2 * RING_BYTES}
    if spec.sink == "null-sink":
        hsx |= {"transport": "inline", "address": "null-sink", "layout": "part"}
    if spec.storage_options:
        hsx["storage_options"] = _by_environment(spec.storage_options)
    found: dict[str, Any] = {"kv_connector_extra_config": {"hsx": hsx | (spec.hsx or {})}}
    if spec.source == "both":
        return found | {"kv_connector": "BothConnector", "kv_connector_module_path": "benchmarks.engine_connectors"}
    return found | {"kv_connector": "HiddenStatesConnector"}


def _by_environment(options: dict[str, Any]) -> dict[str, Any]:
    """Options with credentials moved to the environment: a server's connector accepts them from nowhere else."""
    found = dict(options)
    for name in ("key", "secret"):
        if name in found:
            variable = f"HSX_BENCHMARK_{name.upper()}"
            os.environ[variable] = found[name]
            found[name] = f"${{env:{variable}}}"
    return found


class Cell:
    """The engine of a cell, and the load on it."""

    def __init__(self, spec: CellSpec):
        self.spec = spec
        self._rng = np.random.default_rng(7)
        self._sent = self._asked = 0
        self._due: dict[str, float] = {}  # send time of each request without a first token
        self.first: list[tuple[float, float]] = []  # (time, seconds) of first tokens
        self.held: list[tuple[float, int]] = []  # (time, requests whose blocks are held) after each step of a window
        self.ended: list[float] = []  # end time of each request of a window
        self._files = 0  # number of files of earlier windows
        if spec.sink == "null-sink":
            from hsx_dist.transport.local_end import LocalEnd, register

            register("null-sink", LocalEnd(NullSender(), RING_BYTES))
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform

        norms: dict[str, Any] = {}
        if current_platform.is_cpu():
            from benchmarks.cpu_norms import use_cpu_norms

            norms["ir_op_priority"] = use_cpu_norms()
        self.llm = LLM(**engine_arguments(spec), **norms)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.toggles = Toggles(self.engine) if spec.modes else None
        self.asks = True
        wish: dict[str, Any] = {"include_output_tokens": True} if spec.output_tokens > 1 else {}
        if spec.source != "cache":
            wish["hidden_states_points"] = "all"
        self._params = {
            asks: SamplingParams(
                max_tokens=spec.output_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            for asks, params in ((True, wish), (False, {"hidden_states_save": False}))
        }

    def send(self) -> None:
        """Add a request of random tokens."""
        request_id = str(self._sent)
        self._sent += 1
        self._asked += self.asks
        ids = self._rng.integers(3, self.spec.vocab, self.spec.prompt_tokens).tolist()
        self._due[request_id] = time.monotonic()
        self.engine.add_request(request_id, {"prompt_token_ids": ids}, self._params[self.asks])

    def step(self) -> int:
        """Run one step of the engine. Returns the number of requests that it ended."""
        done = 0
        outputs = self.engine.step()
        now = time.monotonic()
        for output in outputs:
            sent = self._due.pop(output.request_id, None)
            if sent is not None:
                self.first.append((now, now - sent))
            done += output.finished
        s = self.scheduler
        held = len(s.requests) - len(s.running) - len(s.waiting)
        self.held.append((now, held))
        self.ended += [now] * done
        return done

    def switch(self, mode: str) -> None:
        """Switch the captures of a toggled engine to ``mode``."""
        if self.toggles is not None:
            self.asks = self.toggles.switch(mode)

    def load(self, seconds: float) -> None:
        """Run the closed loop for ``seconds``, then wait for the last answers."""
        under_way = 0
        end = time.monotonic() + seconds
        while under_way or time.monotonic() < end:
            while under_way < self.spec.concurrency and time.monotonic() < end:
                self.send()
                under_way += 1
            under_way -= self.step()

    def batch(self, size: int) -> None:
        """Send ``size`` requests at once, and wait for all answers."""
        for _ in range(size):
            self.send()
        while size:
            size -= self.step()

    def flush(self) -> None:
        """Block until all computed samples are stored."""
        if self.spec.sink in ("null-sink", "store"):
            from hsx_dist.connector.flush import flush

            flush(self.llm, 600)
        elif self.spec.sink == "vllm":
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            while self.scheduler.connector.pending or self.scheduler.requests:
                self.engine.step()
            while get_kv_transfer_group().pending:
                time.sleep(0.001)

    def clear(self) -> None:
        """Check and remove the window's files, so that other cells have the space.

        Raises:
            RuntimeError: a file is smaller than a sample's states. A cell that stores too little would look fast.
        """
        for file in Path(self.spec.output).glob("*.safetensors") if self.spec.output.startswith("/") else ():
            if (size := file.stat().st_size) < self.spec.sample_bytes:
                raise RuntimeError(f"{file.name}: expected at least {self.spec.sample_bytes} bytes, got {size}")
            file.unlink()
            self._files += 1

    def check(self) -> None:
        """Check that the sample of every request is stored. A cell that loses samples would look fast.

        Raises:
            RuntimeError: samples are missing.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.clear()
        if self.spec.output.startswith("/"):
            stored = self._files
        elif self.spec.sink in ("store", "null-sink"):
            counted = get_kv_transfer_group()._outlet.meter.sums()
            stored = int(counted.get(("stored" if self.spec.sink == "store" else "samples", ""), 0))
        else:
            return
        if stored != self._asked:
            raise RuntimeError(f"expected {self._asked} stored samples, got {stored}. The cell's figures are invalid.")

    def blocks_per_request(self) -> int:
        group = self.scheduler.kv_cache_config.kv_cache_groups[-1]
        return -(-self.spec.sample_tokens // group.kv_cache_spec.block_size)


def run(spec: CellSpec, parent: Connection) -> None:
    """Build and warm up the cell, and measure windows for the parent.

    ``parent`` sends (seconds, mode) for each window, then None. After None the cell checks its stored samples.
    """
    # All cores: this process inherited the affinity of its parent, which may be one core.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if spec.engine_core is not None:
        os.environ["OMP_NUM_THREADS"] = "1"
    from hsx_dist.isa import avoid_amx

    avoid_amx()
    import torch

    if spec.engine_core is not None:
        torch.set_num_threads(1)
    cell = Cell(spec)
    python = {t.native_id for t in threading.enumerate() if t is not threading.main_thread()}
    name = Path("/proc/self/comm").read_text()
    compute = {  # the engine's thread and, if it has several cores, those of OpenMP
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if int(task.name) not in python and (task / "comm").read_text() == name
    }
    if spec.engine_core is not None and spec.other_core is not None:
        pins = threading.Thread(target=pin, args=(spec.engine_core, spec.other_core), daemon=True)
        pins.start()
        compute = {os.getpid()}
    for mode in spec.modes or ("",):
        cell.switch(mode)
        cell.load(2.0)
        cell.flush()
    cell.clear()
    profiled = profiler(spec.profile) if spec.profile else None
    parent.send("ready")
    while (asked := parent.recv()) is not None:
        seconds, mode = asked
        cell.switch(mode)
        found = window(cell, seconds, compute)
        if spec.engine_core is not None and spec.other_core is not None:
            check_pinned(spec.engine_core, spec.other_core)
        cell.clear()
        parent.send(found)
    if profiled is not None:
        profiled()
    cell.check()
    cell.engine.engine_core.shutdown()
    parent.send("checked")


def window(cell: Cell, seconds: float, compute: set[int]) -> dict[str, Any]:
    """Measure one window, from the first request until all samples are on the disk: times, requests and CPU time."""
    cell.held.clear()
    cell.first.clear()
    cell.ended.clear()
    captured = cell.toggles.captured() if cell.toggles is not None else (0, 0)
    before = cpu_seconds(compute)
    start = time.monotonic()
    cell.load(seconds)
    answered = time.monotonic()
    cell.flush()
    durable = time.monotonic()
    after = cpu_seconds(compute)
    os.sync()
    if cell.toggles is not None:
        cell.toggles.check(captured, len(cell.ended) * cell.spec.sample_tokens)
    most = max(held for _, held in cell.held)
    full = full_since([(when, held) for when, held in cell.held if when <= start + seconds], start)
    return {
        "start": start,
        "answered": answered,
        "durable": durable,
        "synced": time.monotonic(),
        "requests": len(cell.ended),
        "asked": cell.asks,
        "full": full,
        "ended_since_full": sum(full < when <= start + seconds for when in cell.ended),
        # The first requests are sent at once and wait for each other, so they do not count, unless the window is too
        # short for others.
        "waits": [s for _, s in cell.first[cell.spec.concurrency :] or cell.first],
        "held_requests_peak": most,
        "held_blocks_peak": most * cell.blocks_per_request(),
        "cpu_s": {name: s - before.get(name, 0.0) for name, s in after.items()},
    }


def full_since(held: Sequence[tuple[float, int]], start: float) -> float:
    """First time at which vLLM's cache held 90 % of its highest number of requests; ``start`` if it held none.

    Args:
        held: (time, requests whose blocks are held).
        start: Start of the window.
    """
    most = max((count for _, count in held), default=0)
    return next((when for when, count in held if count >= 0.9 * most > 0), start)


def together(spec: CellSpec, windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of all windows of a cell together, and of each.

    Raises:
        ValueError: a window has no answer.
    """
    waits = sorted(wait for w in windows for wait in w["waits"])
    if not all(w["waits"] for w in windows):
        raise ValueError(f"expected answers in each window, got one of {spec.seconds:g} s without. Raise --seconds.")
    took = {name: sum(w[name] - w["start"] for w in windows) for name in ("answered", "durable", "synced")}
    names = dict.fromkeys(name for w in windows for name in w["cpu_s"])
    spent = {name: sum(w["cpu_s"].get(name, 0.0) for w in windows) for name in names}
    requests = sum(w["requests"] for w in windows)
    tokens = requests * spec.sample_tokens
    stored = requests * spec.sample_bytes if spec.sink in ("store", "vllm") and windows[0].get("asked", True) else 0
    return {
        "window_s": spec.seconds,
        "windows": len(windows),
        "requests": requests,
        "tokens": tokens,
        "tokens_per_s": tokens / took["answered"],
        "tokens_per_cpu_s": tokens / spent["engine"],
        "durable_s": took["durable"],
        "durable_tokens_per_s": tokens / took["durable"],
        "synced_tokens_per_s": tokens / took["synced"],
        # vLLM's own connector does not sync its files: the kernel writes them to the disk later.
        "durable_bytes_per_s": stored / took["synced" if spec.sink == "vllm" else "durable"],
        "seconds_after_last_answer": took["durable"] - took["answered"],
        "ttft_median": statistics.median(waits),
        "ttft_p90": waits[int(len(waits) * 0.9)],
        "each": [each(spec, w) for w in windows],
        "held_requests_peak": max(w["held_requests_peak"] for w in windows),
        "held_blocks_peak": max(w["held_blocks_peak"] for w in windows),
        "cpu_s": {name: round(s, 2) for name, s in spent.items() if s > 0.02},
    }


def each(spec: CellSpec, window: Mapping[str, Any]) -> dict[str, float]:
    """Figures of one window that ratios compare."""
    tokens = window["requests"] * spec.sample_tokens
    return {
        "tokens_per_s": tokens / (window["answered"] - window["start"]),
        "tokens_per_cpu_s": tokens / window["cpu_s"]["engine"],
        "durable_tokens_per_s": tokens / (window["durable"] - window["start"]),
        "synced_tokens_per_s": tokens / (window["synced"] - window["start"]),
        "ttft_median": statistics.median(window["waits"]),
    }


def profiler(path: str) -> Callable[[], None]:
    """Start to profile the engine's thread. The returned function writes its operators, by self time, to ``path``."""
    from torch.profiler import ProfilerActivity, profile

    running = profile(activities=[ProfilerActivity.CPU])
    running.start()

    def end() -> None:
        running.stop()
        averages = running.key_averages()
        Path(path).write_text(averages.table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=80))

    return end


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    spec |= {name: tuple(spec[name]) for name in ("layers", "modes")}
    run(CellSpec(**spec), Connection(int(sys.argv[2])))
    sys.stdout.flush()
    # Some threads of vLLM take seconds to end, and have no more output.
    os._exit(0)


def as_json(spec: CellSpec) -> str:
    return json.dumps(asdict(spec))


if __name__ == "__main__":
    main()
