"""Reading: our data set ÷ a loop over objects, one layer ÷ all layers, reads from disk ÷ the codec alone.

    .venv/bin/python -m benchmarks.read [--rounds 3]

Parts of real SmolLM2 states are stored in SeaweedFS, behind a proxy that delays every request by 20 ms, and on local
disk. The compared ways take turns in every round. Ratios are medians of those within a round. Writes
benchmarks/results/read.{md,json}.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from benchmarks.states import smollm2_states
from hsx_dist.format.codecs import SplitCodec
from hsx_dist.format.manifest import Manifest, Receipt, SegmentProof
from hsx_dist.format.names import part_name
from hsx_dist.format.runs import take_attempt, write_complete
from hsx_dist.page import Segment
from hsx_dist.reading import Run, open_run
from hsx_dist.reading.datasets import HiddenStatesDataset
from hsx_dist.reading.token_batches import TokenBatches
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import RandomSample
from tests.harness.runs import store_run, write_v1_run
from tests.harness.servers import S3Server, seaweedfs

RESULTS = Path(__file__).parent / "results"
LATENCY_S, TOKENS, HIDDEN = 0.020, 512, 576
#: Tokens of samples with all layers: the usual length in training of draft models. One layer has 1.6 MB.
WIDE_TOKENS = 2048
EAGLE, WIDE = (2, 15, 27, 30), tuple(range(31))
PREFETCH = 128 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=96, help="samples of four layers")
    parser.add_argument("--wide", type=int, default=16, help="samples of 31 layers")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    about = provenance("torch", "s3fs", "obstore", "safetensors", "zstandard")
    states = smollm2_states("bfloat16", 2400)
    narrow, wide = samples(states, EAGLE, args.samples), samples(states, WIDE, args.wide, WIDE_TOKENS)
    with tempfile.TemporaryDirectory(prefix="hsx-read-") as folder, seaweedfs(Path(folder) / "s3") as server:
        direct = server.storage_options
        store_run(open_store(f"{server.url}/narrow", direct), narrow, per_part=64)  # parts of about 100 MB
        store_run(open_store(f"{server.url}/wide", direct), wide, per_part=4)
        short = samples(states, WIDE, args.wide)
        store_run(open_store(f"{server.url}/short", direct), short, per_part=8)
        del wide, short
        store_run(open_store(f"{folder}/narrow"), narrow, per_part=64)
        put_objects(server, narrow)
        with Proxy(server.endpoint_url) as proxy:
            slow = {**direct, "endpoint_url": proxy.url}
            measures: list[Callable[[], dict[str, Any]]] = [
                lambda: against_objects(server, slow, len(narrow), args.rounds),
                lambda: one_layer(server, slow, args.rounds, "wide", WIDE_TOKENS, ">= 8"),
                lambda: one_layer(server, slow, args.rounds, "short", TOKENS, "(no goal)"),
                lambda: against_codec(f"{folder}/narrow", narrow, args.rounds),
                lambda: token_batches(f"{folder}/narrow", narrow, args.rounds),
                lambda: memory(server, slow),
                lambda: million(args.rounds),
            ]
            rows = []
            for measure in measures:
                rows.append(measure())
                print(json.dumps(rows[-1]), flush=True)
                (args.results / "read.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
                (args.results / "read.md").write_text(table(about, rows, args))


def samples(
    states: np.ndarray[Any, Any], layers: Sequence[int], count: int, tokens: int = TOKENS
) -> list[RandomSample]:
    """Samples from windows of real states ``[4, T, H]``. Beyond four layers the states repeat."""
    found = []
    for i in range(count):
        start = (i * 397) % (states.shape[1] - tokens)
        window = states[[k % len(states) for k in range(len(layers))], start : start + tokens]
        data = np.ascontiguousarray(window.transpose(1, 0, 2))
        found.append(RandomSample(f"s{i:04d}", data, np.arange(tokens) + i, tuple(layers), "bfloat16", 896))
    return found


def put_objects(server: S3Server, narrow: Sequence[RandomSample]) -> None:
    """Store the loop's input: an object for each sample, as a user without this package would write it."""
    import torch
    from safetensors.torch import save

    store = open_store(f"{server.url}/objects", server.storage_options)
    for sample in narrow:
        tensors = {"hidden_states": torch.from_numpy(sample.states).view(torch.bfloat16)}
        store.put(f"{sample.key}.safetensors", [save({**tensors, "token_ids": torch.from_numpy(sample.token_ids)})])


def against_objects(server: S3Server, slow: dict[str, Any], count: int, rounds: int) -> dict[str, Any]:
    import s3fs
    from safetensors.torch import load

    fs = s3fs.S3FileSystem(**slow, use_listings_cache=False)
    names = [f"{server.url}/objects/s{i:04d}.safetensors" for i in range(count)]

    def opened() -> None:
        for name in names:
            with fs.open(name, "rb", cache_type="none") as f:
                assert load(f.read())["hidden_states"].shape == (TOKENS, 4, HIDDEN)

    def fetched() -> None:
        for name in names:
            assert load(fs.cat_file(name))["hidden_states"].shape == (TOKENS, 4, HIDDEN)

    run = open_run(f"{server.url}/narrow", storage_options=slow)  # opened once, as the loop's file system

    def dataset() -> None:
        assert read_all(run, loss_mask="off") == count

    seconds = in_turns({"dataset": dataset, "open": opened, "cat": fetched}, rounds)
    return {
        "what": "samples/s: data set / loop of s3fs open, read and safetensors.torch.load",
        "goal": ">= 4",
        "ratio": ratio(seconds, "open", "dataset"),
        "detail": {
            "data set, samples/s": count / statistics.median(seconds["dataset"]),
            "loop with open, samples/s": count / statistics.median(seconds["open"]),
            "loop with cat_file (one request), samples/s": count / statistics.median(seconds["cat"]),
            "data set / loop with cat_file": ratio(seconds, "cat", "dataset"),
        },
    }


def one_layer(server: S3Server, slow: dict[str, Any], rounds: int, name: str, tokens: int, goal: str) -> dict[str, Any]:
    url = f"{server.url}/{name}"
    counted: dict[str, int] = {}

    opened = open_run(url, storage_options=slow)

    def read(name: str, layers: Sequence[int] | None) -> Callable[[], None]:
        def work() -> None:
            counter = Counting(opened.store)
            run = opened.with_store(lambda _: counter)
            # Enough for all threads to read a sample of all layers at once.
            read_all(run, layers=layers, loss_mask="off", prefetch_bytes=2 << 30)
            counted[name] = counter.bytes

        return work

    seconds = in_turns({"one": read("one", [15]), "all": read("all", None)}, rounds)
    return {
        "what": f"seconds: all 31 layers / one of them, samples of {tokens} tokens",
        "goal": goal,
        "ratio": ratio(seconds, "all", "one"),
        "detail": {
            "bytes of one / bytes of all (goal <= 1/31 + 0.05 = 0.082)": counted["one"] / counted["all"],
            "one layer, s": statistics.median(seconds["one"]),
            "all layers, s": statistics.median(seconds["all"]),
        },
    }


def against_codec(path: str, narrow: Sequence[RandomSample], rounds: int) -> dict[str, Any]:
    """Reads from disk (the page cache) with one thread ÷ the codec alone on the same chunks in memory."""
    codec = SplitCodec()
    chunks = []
    for sample in narrow:
        for k in range(4):
            x = np.ascontiguousarray(sample.states[:, k])
            chunks.append((memoryview(b"".join(bytes(b) for b in codec.encode(x, "bfloat16"))), np.empty_like(x)))
    raw = sum(out.nbytes for _, out in chunks)

    def decode() -> None:
        for data, out in chunks:
            codec.decode(data, out, "bfloat16")

    run = open_run(path)

    def dataset() -> None:
        assert read_all(run, threads=1, loss_mask="off") == len(narrow)

    seconds = in_turns({"dataset": dataset, "codec": decode}, rounds)
    return {
        "what": "bytes/s from disk, one thread / the codec's decompression alone",
        "goal": ">= 0.5",
        "ratio": ratio(seconds, "codec", "dataset"),
        "detail": {
            "data set, GB/s": raw / statistics.median(seconds["dataset"]) / 1e9,
            "codec, GB/s": raw / statistics.median(seconds["codec"]) / 1e9,
        },
    }


def token_batches(path: str, narrow: Sequence[RandomSample], rounds: int) -> dict[str, Any]:
    """Mixed tokens of one layer from disk with one thread ÷ the codec alone; and the longest wait for a batch.

    Measures CPU time of all threads on one core, which other processes and waits between threads affect less.
    """
    codec, batch_tokens = SplitCodec(), 1024
    columns = [np.ascontiguousarray(sample.states[:, 0]) for sample in narrow]
    chunks = [(memoryview(b"".join(bytes(b) for b in codec.encode(x, "bfloat16"))), np.empty_like(x)) for x in columns]
    tokens = sum(len(x) for x in columns)
    pauses: list[float] = []
    used: list[float] = []
    run = open_run(path)

    def decode() -> None:
        for data, out in chunks:
            codec.decode(data, out, "bfloat16")

    def batches() -> None:
        """Measure an epoch after the buffer is full: in a training run of many epochs, filling it is a small part."""
        data = HiddenStatesDataset(
            run, layers=[EAGLE[0]], loss_mask="off", threads=1, shuffle=True, rank=0, world_size=1, repeat=True
        )
        source = iter(TokenBatches(data, batch_tokens, buffer_tokens=16 * batch_tokens))
        for _ in range(32):
            next(source)
        waits, at, cpu = [], time.perf_counter(), time.process_time()
        for _ in range(tokens // batch_tokens):
            assert len(next(source)["input_ids"]) == batch_tokens
            now = time.perf_counter()
            waits.append(now - at)
            at = now
        pauses.append(max(waits) / statistics.fmean(waits))
        used.append(time.process_time() - cpu)

    def dataset() -> None:
        assert read_all(run, layers=[EAGLE[0]], threads=1, loss_mask="off") == len(narrow)

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # new threads inherit it
    try:
        seconds = in_turns({"batches": batches, "dataset": dataset, "codec": decode}, 3 * rounds, time.process_time)
    finally:
        os.sched_setaffinity(0, cores)
    seconds["batches"] = used[1:]  # after the buffer is full; the first round warms up
    return {
        "what": "tokens/s on one core (CPU time), one layer in mixed batches from disk / the codec alone",
        "goal": ">= 0.8",
        "ratio": ratio(seconds, "codec", "batches"),
        "detail": {
            "token batches, tokens/s": tokens / statistics.median(seconds["batches"]),
            "token batches / data set alone": ratio(seconds, "dataset", "batches"),
            "data set / codec": ratio(seconds, "codec", "dataset"),
            "longest wait for a batch / mean time of a batch (goal <= 1)": statistics.median(pauses[1:]),
        },
    }


def memory(server: S3Server, slow: dict[str, Any]) -> dict[str, Any]:
    """Growth of the resident size while a slow consumer reads ÷ ``prefetch_bytes``."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        grown = pool.apply(_growth, (f"{server.url}/narrow", slow))
    return {
        "what": "resident memory's growth while reading / prefetch_bytes (128 MiB)",
        "goal": "<= 1",
        "ratio": grown / PREFETCH,
        "detail": {"growth, MiB": grown / 2**20},
    }


def _growth(url: str, options: dict[str, Any]) -> int:
    dataset = HiddenStatesDataset(url, prefetch_bytes=PREFETCH, storage_options=options, loss_mask="off")
    next(iter(HiddenStatesDataset(dataset.run, layers=[15], tokens=(0, 1), loss_mask="off")))  # loads libraries
    gc.collect()
    before, most = _resident(), 0
    for item in dataset:
        time.sleep(0.05)
        most = max(most, _resident())
        del item
    return max(0, most - before)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def million(rounds: int) -> dict[str, Any]:
    """Seconds to open a run of a million samples with its manifest on disk."""
    with tempfile.TemporaryDirectory(prefix="hsx-read-") as folder:
        store = open_store(folder)
        write_v1_run(store, {"meaning": {"layers": list(EAGLE)}})
        attempt = take_attempt(store, {})
        manifest = Manifest()
        per_part = 2000
        for p in range(1_000_000 // per_part):
            proofs = tuple(
                SegmentProof(
                    segment=Segment(f"row:{p * per_part + i:08d}", 0, 0, 800, 800),
                    slot=i,
                    token_hash=f"{p * per_part + i:016x}",
                    raw_bytes=3_686_400,
                    stored_bytes=2_400_000,
                    row=p * per_part + i,
                    sample_hash=f"{p * per_part + i:016x}",
                )
                for i in range(per_part)
            )
            name = part_name(attempt, "w", p + 1)
            sizes = (2_400_000 * per_part, "00000000", 4_000_000, 3_686_400 * per_part)
            manifest.add(Receipt(attempt, "w", p + 1, name, *sizes, proofs, (), "2026-01-01T00:00:00+00:00"))
        write_complete(store, attempt, manifest, {})
        del manifest
        gc.collect()
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            run = Run(store)
            seconds.append(time.perf_counter() - start)
            assert len(run) == 1_000_000
            del run
            gc.collect()
    return {
        "what": "seconds to open a run of a million samples",
        "goal": "seconds",
        "ratio": statistics.median(seconds),
        "detail": {},
    }


# -- the means ---------------------------------------------------------------------------------------------------------


def read_all(run: Run, **settings: Any) -> int:
    return sum(1 for _ in HiddenStatesDataset(run, rank=0, world_size=1, **settings))


def in_turns(
    work: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()  # otherwise the next way pays for this way's garbage
            start = clock()
            work[name]()
            if turn:  # the first round warms connections and caches
                seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], above: str, below: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[above], seconds[below], strict=True))


class Counting:
    """A store that counts the bytes of requested ranges."""

    def __init__(self, inner: Store):
        self._inner = inner
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        self.bytes += sum(b - a for a, b in ranges)
        return self._inner.get_ranges(name, ranges)


class Proxy:
    """A TCP proxy on loopback, in a separate process. It delays each received buffer of a client by 20 ms.

    So requests must arrive in one piece, as those of readers do.
    """

    def __init__(self, target: str):
        host, _, port = target.removeprefix("http://").partition(":")
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(host, int(port), there), daemon=True)

    def __enter__(self) -> Proxy:
        self._process.start()
        self.url = f"http://127.0.0.1:{self._here.recv()}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _serve(host: str, port: int, pipe: Any) -> None:
    def pump(source: socket.socket, sink: socket.socket, pause: float) -> None:
        buffer = memoryview(bytearray(1 << 20))
        try:
            while n := source.recv_into(buffer):
                if pause:
                    time.sleep(pause)
                sink.sendall(buffer[:n])
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side has closed the connection

    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        pipe.send(server.getsockname()[1])
        while True:
            client, _ = server.accept()
            far = socket.create_connection((host, port))
            for end in (client, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((client, far, LATENCY_S), (far, client, 0.0)):
                threading.Thread(target=pump, args=ends, daemon=True).start()


def table(about: dict[str, Any], rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
    lines = [
        "# Reading",
        "",
        f"{about['cpu']}, {about['cores']} cores, load {about['load_average']}; {about['system']}, "
        f"Python {about['python']}, {versions}; commit {about['commit']}. Made by `python -m benchmarks.read`.",
        "",
        f"{args.samples} samples of {TOKENS} tokens and 4 layers, and {args.wide} each of {WIDE_TOKENS} and {TOKENS} "
        "tokens and 31 layers, of SmolLM2's states in bf16 with codec `split`. They are in SeaweedFS behind a proxy "
        "that delays every request by 20 ms, and on local disk (in the page cache). "
        f"One process reads; server, proxy and reader share the cores. Medians of {args.rounds} rounds in which the "
        "ways take turns.",
        "",
        "| ratio | goal | measured |",
        "|---|---|---:|",
    ]
    for row in rows:
        lines.append(f"| {row['what']} | {row['goal']} | {row['ratio']:.2f} |")
        lines += [f"| … {name} | | {value:.3g} |" for name, value in row["detail"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
