"""One cell of ``benchmarks.engine``, in a process of its own: an engine, a load, and what both took.

    python -m benchmarks.engine_cell CELL.json FD    # of a multiprocessing.connection to who started it

The load is a closed loop: so many requests are under way at any time, for so many seconds; then the last answers are
awaited, then the last sample, then the disk. All times are of ``time.monotonic``, which the parent shares.
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

#: What the connector's ring has; a bare connector gives it half of ``in_flight_bytes``.
RING_BYTES = 128 << 20

Sink = Literal["none", "null", "null-sink", "store", "vllm"]
Source = Literal["cache", "taps", "both"]


@dataclass(frozen=True)
class CellSpec:
    """What one process measures.

    ``seconds``: of one window. ``sink``: no extraction, a connector that does nothing, ours with a sender
    that drops pages, ours storing at ``output``, or vLLM's own storing there. ``source``: what captures; with ``both``
    ours ships the taps' points, and vLLM's extraction can be switched on beside them. ``capture``: the taps' setting.
    ``modes``: of the windows of an engine that is toggled. ``engine_core``, ``other_core``: where the engine's thread
    and all others run; None leaves both to vLLM and the kernel. ``profile``: a file for ``torch.profiler``'s table of
    the engine's operators.
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
    made_up_weights: bool = False  # by vLLM, for a model that has a configuration alone
    compiled: bool = False
    step_tokens: int = 2048

    @property
    def sample_tokens(self) -> int:
        """Tokens of one sample: the last one that is generated is never an input."""
        return self.prompt_tokens + max(self.output_tokens - 1, 0)

    @property
    def sample_bytes(self) -> int:
        return self.sample_tokens * len(self.layers) * self.hidden * 2


def engine_arguments(spec: CellSpec) -> dict[str, Any]:
    """For vLLM's ``LLM``."""
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": spec.prompt_tokens + spec.output_tokens + 8,
        "max_num_batched_tokens": spec.step_tokens,
        "max_num_seqs": spec.concurrency,
        "enable_prefix_caching": False,  # or nothing would be computed
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
    """A server's connector takes credentials from the environment alone."""
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
        self._due: dict[str, float] = {}  # when each request that has no answer yet was sent
        self.first: list[tuple[float, float]] = []  # (when, seconds) of first tokens
        self.held: list[tuple[float, int]] = []  # (when, requests whose blocks are held), by steps of a window
        self.ended: list[float] = []  # when each request of a window ended
        self._files = 0  # of earlier windows
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
        """One more request, of random tokens."""
        request_id = str(self._sent)
        self._sent += 1
        self._asked += self.asks
        ids = self._rng.integers(3, self.spec.vocab, self.spec.prompt_tokens).tolist()
        self._due[request_id] = time.monotonic()
        self.engine.add_request(request_id, {"prompt_token_ids": ids}, self._params[self.asks])

    def step(self) -> int:
        """One step of the engine; how many answers it ended."""
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
        """Of an engine that is toggled."""
        if self.toggles is not None:
            self.asks = self.toggles.switch(mode)

    def load(self, seconds: float) -> None:
        """The closed loop, and the answers to what it sent."""
        under_way = 0
        end = time.monotonic() + seconds
        while under_way or time.monotonic() < end:
            while under_way < self.spec.concurrency and time.monotonic() < end:
                self.send()
                under_way += 1
            under_way -= self.step()

    def batch(self, size: int) -> None:
        """So many requests at once, until all have their answers."""
        for _ in range(size):
            self.send()
        while size:
            size -= self.step()

    def flush(self) -> None:
        """Until everything that was computed is stored."""
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
        """Files that were written make room for those of other cells' windows.

        Raises:
            RuntimeError: one is smaller than a sample's states: what is not stored would be fast.
        """
        for file in Path(self.spec.output).glob("*.safetensors") if self.spec.output.startswith("/") else ():
            if (size := file.stat().st_size) < self.spec.sample_bytes:
                raise RuntimeError(f"{file.name}: expected at least {self.spec.sample_bytes} bytes, found {size}")
            file.unlink()
            self._files += 1

    def check(self) -> None:
        """Every request that was sent is stored: what is lost would be fast.

        Raises:
            RuntimeError: it is not.
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
            raise RuntimeError(
                f"expected {self._asked} samples, found {stored}: what was measured is not what it claims"
            )

    def blocks_per_request(self) -> int:
        group = self.scheduler.kv_cache_config.kv_cache_groups[-1]
        return -(-self.spec.sample_tokens // group.kv_cache_spec.block_size)


def run(spec: CellSpec, parent: Connection) -> None:
    """Build, warm up, and measure windows of so many seconds, each in its mode, as they are asked for, until None is;
    the cell then checks what it stored."""
    # As many as the machine has: a parent that keeps to one core has given us that one alone.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if spec.engine_core is not None:
        os.environ["OMP_NUM_THREADS"] = "1"
    from hsx_dist.isa import avoid_broken_amx

    avoid_broken_amx()
    import torch

    if spec.engine_core is not None:
        torch.set_num_threads(1)
    cell = Cell(spec)
    python = {t.native_id for t in threading.enumerate() if t is not threading.main_thread()}
    name = Path("/proc/self/comm").read_text()
    compute = {  # the engine's thread and, where it has several cores, OpenMP's
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
    """Times, and what was done and spent, from the first request until all is on the disk."""
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
        # Requests sent at once wait for one another: the first round of them is not what a request sees, unless the
        # window is too short for others.
        "waits": [s for _, s in cell.first[cell.spec.concurrency :] or cell.first],
        "held_requests_peak": most,
        "held_blocks_peak": most * cell.blocks_per_request(),
        "cpu_s": {name: s - before.get(name, 0.0) for name, s in after.items()},
    }


def full_since(held: Sequence[tuple[float, int]], start: float) -> float:
    """When vLLM's cache was, for the first time, as full (to a tenth) as it became: what (when, requests that are held)
    say; ``start`` where they say nothing."""
    most = max((count for _, count in held), default=0)
    return next((when for when, count in held if count >= 0.9 * most > 0), start)


def together(spec: CellSpec, windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all windows of a cell say, and what each does.

    Raises:
        ValueError: a window was too short for any answer.
    """
    waits = sorted(wait for w in windows for wait in w["waits"])
    if not all(w["waits"] for w in windows):
        raise ValueError(f"expected answers in each window of {spec.seconds:g} s: take longer ones")
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
        # vLLM's own leaves to the kernel when what it wrote goes to the disk.
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
    """The figures that are compared, of one window."""
    tokens = window["requests"] * spec.sample_tokens
    return {
        "tokens_per_s": tokens / (window["answered"] - window["start"]),
        "tokens_per_cpu_s": tokens / window["cpu_s"]["engine"],
        "durable_tokens_per_s": tokens / (window["durable"] - window["start"]),
        "synced_tokens_per_s": tokens / (window["synced"] - window["start"]),
        "ttft_median": statistics.median(window["waits"]),
    }


def profiler(path: str) -> Callable[[], None]:
    """Profile the engine's thread from now on; what is returned writes its operators by their own time to ``path``."""
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
    # vLLM's threads have nothing to say any more, and some take seconds to end.
    os._exit(0)


def as_json(spec: CellSpec) -> str:
    return json.dumps(asdict(spec))


if __name__ == "__main__":
    main()
