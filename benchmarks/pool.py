"""Cost of the writer pool: pages of real states from Ray's object store to an S3 server that discards them.

    .venv/bin/python -m benchmarks.pool                  # all goals; writes benchmarks/results/pool.{md,json}
    .venv/bin/python -m benchmarks.pool --gib 1 --dry    # short, and writes nothing

All compared processes are bound to one core, the server to another. The sides take turns within one run. The report has
wall clock and CPU time; CPU time is more reliable on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import psutil
import ray

from hsx_dist.connector.point_copier import CopyPlan
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.codecs.base import encode_into
from hsx_dist.format.manifest import Receipt
from hsx_dist.memory.blocks import BlockPool
from hsx_dist.models.builtin import smollm2
from hsx_dist.page import Page, Segment
from hsx_dist.store import open_store
from hsx_dist.transport.shipping import COALESCE_BYTES
from hsx_dist.writers.events import Lost
from hsx_dist.writers.ray_pool import PoolWriterSpec, RaySender, start_writer
from hsx_dist.writers.sink import SinkOptions

HERE = Path(__file__).parent
LAYERS, HIDDEN = (2, 15, 27), 576
PAGE_TOKENS = 2048  # 7 MB of bf16 with three layers
#: Waiting pages go in one call of this size, as from a replica whose writers just keep up.
CALL_BYTES = 27 << 20
PAGE_BYTES = PAGE_TOKENS * len(LAYERS) * HIDDEN * 2
#: Models whose pages and calls are cut as by the connector and its shipping thread: (name, layers, hidden size).
SHAPES = (("SmolLM2-135M, 3 layers", 3, 576), ("Llama-8B, 4 layers", 4, 4096), ("Qwen3-4B, all 37 states", 37, 2560))
GIB = 1 << 30
PART = 256 << 20
OBJECT_STORE = 1 << 30
CREDIT = 256 << 20
#: Bytes through a writer before it is measured: the first pass over Ray's object store has page faults, and the first
#: put makes connections.
WARM = OBJECT_STORE + (OBJECT_STORE >> 2)
SIZES = [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28]


def real_states(pages: int) -> np.ndarray[Any, Any]:
    """uint16 ``[pages, L, PAGE_TOKENS, H]``: SmolLM2's states of this repository's text, rounded to bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = smollm2()
    root = HERE.parent
    text = "\n".join(p.read_text() for p in sorted([*root.glob("*.md"), *root.glob("hsx_dist/**/*.py")]))
    ids = AutoTokenizer.from_pretrained(path)(text, verbose=False)["input_ids"][: pages * PAGE_TOKENS]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = []
    with torch.inference_mode():
        for i in range(pages):
            batch = torch.tensor([ids[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]])
            states = model.model(batch, output_hidden_states=True).hidden_states
            found.append(
                torch.stack([states[k][0] for k in LAYERS]).to(torch.bfloat16).view(torch.uint16).numpy().copy()
            )
    return np.stack(found)


def page_of(states: np.ndarray[Any, Any], i: int) -> Page:
    """The ``i``-th page of an endless supply: the pages of ``states`` in turn, each a separate sample."""
    data = states[i % len(states)]
    layers, tokens, _ = data.shape
    segment = Segment(f"k{i}", 0, 0, tokens, tokens)
    ids = np.arange(tokens, dtype=np.int64) + i
    return Page(segment, 0, tokens, tokens, tuple(range(layers)), "bfloat16", data.shape, "LTH", ids, data)


def as_pages(states: np.ndarray[Any, Any], layers: int, hidden: int) -> np.ndarray[Any, Any]:
    """The same numbers as pages ``[n, layers, T, hidden]``; T is the connector's number of tokens in a page."""
    plan = CopyPlan.of(
        block_size=16,
        layers=layers,
        hidden_size=hidden,
        itemsize=2,
        page_bytes=8 << 20,
        segment_bytes=64 << 20,
    )
    shape = (layers, plan.page_tokens, hidden)
    count = states.size // math.prod(shape)
    return states.reshape(-1)[: count * math.prod(shape)].reshape(count, *shape)


def calls(pages: int, page_bytes: int, call_bytes: int) -> Iterator[range]:
    """Ranges of pages that are sent in one call, of at least ``call_bytes`` each."""
    step = -(-call_bytes // page_bytes)
    return (range(i, min(i + step, pages)) for i in range(0, pages, step))


def bind(core: int) -> None:
    """Bind every thread of this process to ``core``. New threads inherit this."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def cpu_seconds() -> float:
    t = os.times()
    return t.user + t.system


def busy_seconds() -> float:
    """CPU seconds of all cores, used by any process."""
    t = psutil.cpu_times()
    return float(sum(t) - t.idle - t.iowait)


class Bench:
    """A process on one core that runs the baselines of a writer. ``states`` are in shared memory."""

    def __init__(self, core: int):
        bind(core)

    def _timed(self, nbytes: int, work: Callable[[], object]) -> tuple[float, float]:
        cpu, wall = cpu_seconds(), time.perf_counter()
        work()
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
        return nbytes / GIB / wall, cpu / (nbytes / GIB)

    def codec(self, states: np.ndarray[Any, Any], name: str, pages: int) -> tuple[float, float]:
        codec = resolve_codec(name)
        # Blocks are kept as long as a part, as in a writer. Blocks freed at once would stay in the CPU's cache.
        pool, kept = BlockPool(2 * PART), deque[np.ndarray[Any, Any]]()

        def work() -> None:
            for i in range(pages):
                for layer in states[i % len(states)]:
                    kept.append(encode_into(codec, layer, "bfloat16", pool.take))
                    if sum(data.nbytes for data in kept) > PART:
                        kept.popleft()

        return self._timed(pages * states[0].nbytes, work)

    def straightforward(self, states: np.ndarray[Any, Any], pages: int, options: dict[str, Any]) -> tuple[float, float]:
        """safetensors.torch.save → zstd-1 → s3fs pipe, an object for each sample: the pipeline without this library."""
        import s3fs
        import torch
        import zstandard
        from safetensors.torch import save

        fs = s3fs.S3FileSystem(**options)
        compressor = zstandard.ZstdCompressor(level=1)

        def work() -> None:
            for i in range(pages):
                tensor = torch.from_numpy(states[i % len(states)].copy()).view(torch.bfloat16)
                sample = {"hidden_states": tensor.transpose(0, 1).contiguous(), "token_ids": torch.arange(PAGE_TOKENS)}
                fs.pipe(f"bench/straight/k{i}", compressor.compress(save(sample)))

        return self._timed(pages * PAGE_BYTES, work)

    def puts(self, backend: str, size: int, count: int, at_once: int, options: dict[str, Any]) -> tuple[float, float]:
        """Put ``count`` objects of ``size`` bytes through our store."""
        from concurrent.futures import ThreadPoolExecutor

        store = open_store("s3://bench/puts", options, backend=backend)  # type: ignore[arg-type]
        data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        store.put("warm", [data[:1]])
        with ThreadPoolExecutor(at_once) as pool:
            return self._timed(
                size * count, lambda: list(pool.map(lambda i: store.put(f"{size}/{i}", [data]), range(count)))
            )

    def own_puts(self, size: int, count: int, at_once: int, endpoint: str) -> tuple[float, float]:
        """Put with obstore alone: its defaults, but an unsigned payload."""
        from concurrent.futures import ThreadPoolExecutor

        import obstore
        from obstore.store import S3Store

        store = S3Store(
            "bench",
            endpoint=endpoint,
            region="us-east-1",
            access_key_id="a",
            secret_access_key="b",
            unsigned_payload=True,
            client_options={"allow_http": True},
        )
        data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        with ThreadPoolExecutor(at_once) as pool:
            return self._timed(
                size * count,
                lambda: list(pool.map(lambda i: obstore.put(store, f"o/{i}", data), range(count))) and None,
            )


@contextmanager
def server(core: int) -> Iterator[str]:
    """Start the discarding server as a process on ``core``; yields its endpoint."""
    argv = [sys.executable, "-m", "tests.harness.discard"]
    # Not in the working folder: starting Ray may have changed it.
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        os.sched_setaffinity(process.pid, {core})
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Memory:
    """Samples, on a thread, another process's resident memory: private, and shared (Ray's object store)."""

    def __init__(self, pid: int):
        self.samples: list[tuple[float, int, int]] = []
        self._status = Path(f"/proc/{pid}/status")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while not self._end.wait(0.25):
            fields = dict(line.split(":", 1) for line in self._status.read_text().splitlines() if ":" in line)
            kib = [int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")]
            self.samples.append((time.perf_counter(), (kib[0] + kib[1]) << 10, kib[2] << 10))

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


def run_writers(
    states: np.ndarray[Any, Any],
    codec: str,
    pages: int,
    options: dict[str, Any],
    cores: Sequence[int],
    call_bytes: int = CALL_BYTES,
) -> dict[str, Any]:
    """Run one writer for each core, with a real sender in this process, until all samples have receipts."""
    page_bytes = states[0].nbytes
    node = ray.get_runtime_context().get_node_id()
    actors = []
    for i, core in enumerate(cores):
        sink = SinkOptions(resolve_codec(codec), {}, f"w{i}", 1, part_bytes=PART, max_bytes=CREDIT + PART)
        spec = PoolWriterSpec("s3://bench/run", options, "auto", 60.0, {}, sink, CREDIT)
        actor = start_writer(spec, node_id=node, num_cpus=0, threads=2, name=f"w{i}-{time.monotonic_ns()}")
        ray.get(actor.__ray_call__.remote(lambda _, core=core: bind(core)))
        actors.append(actor)
    pids = ray.get([a.__ray_call__.remote(lambda _: os.getpid()) for a in actors])
    lost: list[Any] = []
    sender = RaySender([(node, a) for a in actors], lost.append)
    for some in calls(WARM // page_bytes, page_bytes, call_bytes):
        sender.send([page_of(states, -1 - i) for i in some], lambda _: None)
    sender.flush()
    ray.get([a.flush.remote() for a in actors])
    memory = Memory(pids[0])
    cpu = sum(ray.get([a.__ray_call__.remote(lambda _: cpu_seconds()) for a in actors]))
    busy, start = busy_seconds(), time.perf_counter()
    for some in calls(pages, page_bytes, call_bytes):
        sender.send([page_of(states, i) for i in some], lambda _: None)
    sender.flush()
    ray.get([a.flush.remote() for a in actors])
    wall, busy = time.perf_counter() - start, busy_seconds() - busy
    cpu = sum(ray.get([a.__ray_call__.remote(lambda _: cpu_seconds()) for a in actors])) - cpu
    memory.stop()
    events = [e for a in actors for e in ray.get(a.events.remote(0.1))]
    for actor in actors:
        ray.kill(actor)
    receipts = [e for e in events if isinstance(e, Receipt)]
    proven = {p.segment.key for r in receipts for p in r.segments}
    assert not lost, lost
    assert not [e for e in events if isinstance(e, Lost)]
    assert proven >= {f"k{i}" for i in range(pages)}, f"expected {pages} samples with receipts, got {len(proven)}"
    gib = pages * page_bytes / GIB
    return {
        "gib_per_s": gib / wall,
        "cpu_s_per_gib": cpu / gib,
        "cores_of_others": (busy - cpu) / wall,
        "parts": len(receipts),
        "stored_ratio": sum(r.size for r in receipts) / sum(r.raw_bytes for r in receipts),
        "resident_peak": max(a + s for _, a, s in memory.samples),
        "shared_peak": max(s for _, _, s in memory.samples),
        "resident": [a + s for _, a, s in memory.samples],
    }


def rates(found: dict[str, Any]) -> tuple[float, float]:
    return found["gib_per_s"], found["cpu_s_per_gib"]


def median(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(r for r, _ in rows), statistics.median(c for _, c in rows)


def measure(gib: float, rounds: int, long_gib: float) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    pages = int(gib * GIB / PAGE_BYTES)
    states = real_states(4)
    result: dict[str, Any] = {}
    work, rest = cores[0], cores[-1]
    os.sched_setaffinity(0, {rest})
    ray.init(
        address="local", num_cpus=4, object_store_memory=OBJECT_STORE, include_dashboard=False, log_to_driver=False
    )
    shared = ray.put(states)
    states = ray.get(shared)
    bench = ray.remote(num_cpus=0)(Bench).remote(work)
    with server(rest) as endpoint:
        base: dict[str, Any] = {"key": "a", "secret": "b", "endpoint_url": endpoint}
        base["client_kwargs"] = {"region_name": "us-east-1"}
        # As clients do over TLS; over plain HTTP they would hash the payload once more.
        tls = {**base, "config_kwargs": {"s3": {"payload_signing_enabled": False}}}
        rows: dict[str, list[tuple[float, float]]] = {}

        def take(name: str, found: tuple[float, float]) -> None:
            rows.setdefault(name, []).append(found)
            print(f"{name}: {found[0]:.3f} GiB/s, {found[1]:.3f} CPU s/GiB", flush=True)

        last: dict[str, Any] = {}
        others: list[float] = []
        for _ in range(rounds):
            take("codec split alone", ray.get(bench.codec.remote(shared, "split", pages)))
            last["split"] = run_writers(states, "split", pages, tls, [work])
            take("writer, split", rates(last["split"]))
            take("straightforward", ray.get(bench.straightforward.remote(shared, max(pages // 8, 8), base)))
            last["none"] = run_writers(states, "none", pages, tls, [work])
            take("writer, none", rates(last["none"]))
            count = max(int(gib * GIB) // PART, 2)
            take("obstore's own puts", ray.get(bench.own_puts.remote(PART, count, 4, endpoint)))
            last["two"] = run_writers(states, "split", pages, tls, [work, rest])
            take("two writers, split", rates(last["two"]))
            others.append(last["two"]["cores_of_others"])
        take("writer, split, signed payload", rates(run_writers(states, "split", pages, base, [work])))
        result["rows"] = {
            name: dict(zip(("gib_per_s", "cpu_s_per_gib"), median(r), strict=True)) for name, r in rows.items()
        }
        result["rounds"] = {name: [r[0] for r in found] for name, found in rows.items()}
        result["cores_of_others"] = statistics.median(others)
        result["stored_ratio"] = last["split"]["stored_ratio"]
        result["sizes"] = []
        for size in SIZES:
            count = int(min(max(gib * GIB // 4 // size, 2), 1000))
            row: dict[str, Any] = {"size": size, "count": count}
            for backend, options in (("fsspec", base), ("obstore", tls)):
                row[backend] = ray.get(bench.puts.remote(backend, size, count, 8, options))
            print(row, flush=True)
            result["sizes"].append(row)
        result["shapes"] = []
        for name, layers, hidden in SHAPES:
            cut = as_pages(states, layers, hidden)
            count = int(gib * GIB / cut[0].nbytes)
            both: dict[str, list[tuple[float, float]]] = {"codec": [], "writer": []}
            for _ in range(rounds):
                both["codec"].append(ray.get(bench.codec.remote(cut, "split", count)))
                found = run_writers(cut, "split", count, tls, [work], COALESCE_BYTES)
                both["writer"].append(rates(found))
            row = {"shape": name, "layers": layers, "tokens": cut.shape[2], "page_bytes": cut[0].nbytes}
            row |= {who: median(r) for who, r in both.items()}
            print(row, flush=True)
            result["shapes"].append(row)
        long = run_writers(states, "split", int(long_gib * GIB / PAGE_BYTES), tls, [work])
        resident = long.pop("resident")
        third = len(resident) // 3
        result["long"] = {
            **long,
            "gib": long_gib,
            "bound": CREDIT + PART + 200_000_000,
            "early_mean": statistics.mean(resident[third : 2 * third]),
            "late_mean": statistics.mean(resident[2 * third :]),
        }
    ray.shutdown()
    return result


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    row = {name: r["gib_per_s"] for name, r in found["rows"].items()}
    cpu = {name: r["cpu_s_per_gib"] for name, r in found["rows"].items()}
    long = found["long"]
    return [
        {"goal": "(a) one writer core, split ÷ the codec alone", "wanted": 0.6,
         "wall": row["writer, split"] / row["codec split alone"],
         "cpu": cpu["codec split alone"] / cpu["writer, split"]},
        {"goal": "(b) one writer core, split ÷ the straightforward pipeline", "wanted": 4,
         "wall": row["writer, split"] / row["straightforward"], "cpu": cpu["straightforward"] / cpu["writer, split"]},
        {"goal": "(c) one writer core, none ÷ obstore's own puts", "wanted": 0.5,
         "wall": row["writer, none"] / row["obstore's own puts"],
         "cpu": cpu["obstore's own puts"] / cpu["writer, none"]},
        {"goal": "(d) two writers ÷ one", "wanted": 1.6,
         "wall": row["two writers, split"] / row["writer, split"],
         "cpu": 2 * cpu["writer, split"] / cpu["two writers, split"]},
        {"goal": "(e) credits + one part + 200 MB ÷ a writer's resident memory", "wanted": 1,
         "wall": long["bound"] / long["resident_peak"], "cpu": None},
    ]  # fmt: skip


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True)
    packages = ["ray", "obstore", "s3fs", "zstandard", "safetensors", "numpy", "torch"]
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "versions": {name: version(name) for name in packages},
    }


def report(found: dict[str, Any]) -> str:
    m, long = found["machine"], found["long"]
    lines = [
        "# The writer pool", "",
        f"`python -m benchmarks.pool` at commit {m['commit'][:12]}, on {m['cores']} cores ({m['cpu']}), "
        f"{m['memory_gib']} GiB, load before the start {m['load_before']:.1f}; "
        + ", ".join(f"{k} {v}" for k, v in m["versions"].items()) + f", Python {m['python']}.",
        f"Pages of {PAGE_BYTES} bytes: SmolLM2-135M's layers {list(LAYERS)}, bf16, tiled. Server, sender and Ray on "
        f"one core, the measured process on the other; writers are warm after {WARM / GIB:g} GiB; medians of "
        f"{max(len(r) for r in found['rounds'].values())} rounds in which the sides take turns.", "",
        "| | GiB/s of raw states | CPU s/GiB of its process |", "|---|---|---|",
        *(f"| {n} | {r['gib_per_s']:.3f} | {r['cpu_s_per_gib']:.3f} |" for n, r in found["rows"].items()), "",
        "| ratio | goal | wall clock | by CPU time |", "|---|---|---|---|",
        *(f"| {g['goal']} | ≥ {g['wanted']} | {g['wall']:.2f} | {'' if g['cpu'] is None else format(g['cpu'], '.2f')} |"
          for g in found["goals"]), "",
        f"(d) needs two free cores. Here server, sender and Ray used {found['cores_of_others']:.2f} of "
        f"{m['cores']} cores, which limits the ratio by wall clock to {m['cores'] - found['cores_of_others']:.2f}. "
        "By CPU time, the ratio compares the CPU seconds for the same bytes.",
        "",
        f"(e) over {long['gib']:g} GiB: resident at most {long['resident_peak'] >> 20} MiB, of it shared with Ray's "
        f"object store at most {long['shared_peak'] >> 20} MiB; bound {long['bound'] >> 20} MiB; mean of the second "
        f"third {long['early_mean'] / (1 << 20):.0f} MiB, of the last {long['late_mean'] / (1 << 20):.0f} MiB.", "",
        "Pages as the connector cuts them, in calls as its shipping thread makes them (at least 8 MiB while pages "
        "wait), `split`:", "",
        "| pages | tokens | MB a page | codec alone, GiB/s | writer, GiB/s | by wall clock | by CPU time |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(f"| {s['shape']} | {s['tokens']} | {s['page_bytes'] / 1e6:.1f} | {s['codec'][0]:.3f} | {s['writer'][0]:.3f} "
          f"| {s['writer'][0] / s['codec'][0]:.2f} | {s['codec'][1] / s['writer'][1]:.2f} |" for s in found["shapes"]),
        "",
        "Puts by object size, 8 at once, one core; fsspec with its defaults, obstore with an unsigned payload:", "",
        "| object | fsspec GiB/s | CPU s/GiB | obstore GiB/s | CPU s/GiB |", "|---|---|---|---|---|",
        *(f"| {r['size'] >> 10} KiB | {r['fsspec'][0]:.3f} | {r['fsspec'][1]:.2f} | {r['obstore'][0]:.3f} | "
          f"{r['obstore'][1]:.2f} |" for r in found["sizes"]), "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0, help="raw GiB of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-gib", type=float, default=20.0, help="raw GiB of the memory measurement")
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder to write to")
    args = parser.parse_args()
    args.results = args.results.resolve()  # the working folder changes below
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="hsx-bench-") as folder:
        os.chdir(folder)
        found.update(measure(args.gib, args.rounds, args.long_gib))
    found["goals"] = goals(found)
    print(report(found))
    if not args.dry:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "pool.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.results / "pool.md").write_text(report(found))


if __name__ == "__main__":
    main()
