"""Codecs on real hidden states: stored size, speed, and speed with two threads.

    .venv/bin/python -m benchmarks.codec [--tokens 12000] [--rounds 21] [--keep FOLDER]

Plain zstd-1 is the baseline without this library: `compress` and `decompress` of the zstandard package, on
token-major states as in vLLM's own files. Our codecs get layer-major chunks. Their output is copied to a part's
buffer, and they decode into the reader's array.

Each round times every codec once, in rotating order. Speeds relative to plain zstd-1 are medians of the ratios within
a round, so other load on the machine slows both sides. Writes benchmarks/results/codec.{md,json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from benchmarks.provenance import provenance
from benchmarks.states import LAYERS, smollm2_states
from hsx_dist.format.codecs import Codec, Fp8TokenCodec, NoneCodec, SplitCodec, ZstdCodec
from hsx_dist.format.codecs.base import encode_into
from hsx_dist.format.loss import combine, measure
from hsx_dist.page import FLOATS
from hsx_dist.store.base import as_bytes_view

RESULTS = Path(__file__).parent / "results"
CHUNK_BYTES = 1 << 20
BASELINE = "plain zstd-1 of [T, L, H]"
CODECS: dict[str, Codec] = {
    "zstd": ZstdCodec(1),
    "none": NoneCodec(),
    "split": SplitCodec(),
    "fp8-token": Fp8TokenCodec(),
}
GOALS = {
    "ratio of split": 1.45,
    "split compresses, times zstd-1": 1.6,
    "split decompresses, times zstd-1": 3.0,
    "split compresses with two threads, times one": 1.5,
    "split decompresses with two threads, times one": 1.5,
}
Array = np.ndarray[Any, Any]
Work = Callable[[int], object]  # of the i-th chunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--keep", type=Path, help="folder that caches the model's states for the next call")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    about = provenance("numpy", "zstandard", "crc32c", "torch", "transformers")
    states = {dtype: states_of(dtype, args.tokens, args.keep) for dtype in FLOATS}
    bf16 = states["bfloat16"]
    result = {
        "about": about,
        "input": f"SmolLM2-135M-Instruct, layers {LAYERS}, {bf16.shape[1]} tokens, chunks of 1 MiB of one layer",
        "rounds": args.rounds,
        "bounds": bounds(bf16),
        "codecs": speeds(bf16, args.rounds),
        "other_dtypes": [sizes(dtype, chunks_of(states[dtype])) for dtype in ("float16", "float32")],
    }
    result["goals"] = goals(result)
    (args.results / "codec.json").write_text(json.dumps(result, indent=1) + "\n")
    page = as_markdown(result)
    (args.results / "codec.md").write_text(page)
    print(page)


def states_of(dtype: str, tokens: int, keep: Path | None) -> Array:
    file = keep / f"smollm2-{dtype}-{tokens}.npy" if keep else None
    if file is not None and file.exists():
        return np.asarray(np.load(file))
    states = smollm2_states(dtype, tokens)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, states)
    return states


def chunks_of(states: Array) -> list[Array]:
    """Contiguous chunks ``[n, H]`` of one layer each, as ``gather`` copies them."""
    rows = CHUNK_BYTES // states[0, 0].nbytes
    return [np.array(layer[a : a + rows]) for layer in states for a in range(0, len(layer) - rows + 1, rows)]


# -- sizes -----------------------------------------------------------------------------------------------------------


def bounds(states: Array) -> dict[str, float]:
    """Shannon bounds on the ratio of bf16, if the seven bits of mantissa are noise.

    The first codes sign and exponent, given layer and channel. The second codes the high byte, given the layer, which
    is the model of ``split``.
    """
    by_channel = [[_entropy(states[k, :, h] >> 7) for h in range(states.shape[2])] for k in range(len(states))]
    high_byte = [_entropy((layer >> 8).reshape(-1)) for layer in states]
    return {
        "Shannon bound, sign and exponent given the channel": 16 / (7 + float(np.mean(by_channel))),
        "Shannon bound, high byte given the layer": 16 / (8 + float(np.mean(high_byte))),
    }


def _entropy(symbols: Array) -> float:
    """Bits a symbol, with the Miller-Madow correction for the sample's size."""
    _, counts = np.unique(symbols, return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log2(p)).sum() + (len(counts) - 1) / (2 * counts.sum() * np.log(2)))


def ratio(codec: Codec, chunks: Sequence[Array], dtype: str) -> float:
    stored = sum(as_bytes_view(b).nbytes for x in chunks for b in codec.encode(x, dtype))
    return sum(x.nbytes for x in chunks) / stored


def loss(codec: Codec, chunks: Sequence[Array], dtype: str) -> list[float] | None:
    if not codec.lossy:
        return None
    squares = []
    for x in chunks:
        out = np.empty_like(x)
        codec.decode(memoryview(b"".join(map(as_bytes_view, codec.encode(x, dtype)))), out, dtype)
        squares.append(measure(x, out, dtype))
    total = combine(squares)
    return [total.rms, total.worst_token]


def sizes(dtype: str, chunks: Sequence[Array]) -> dict[str, Any]:
    return {"dtype": dtype, "ratio": {name: ratio(codec, chunks, dtype) for name, codec in CODECS.items()}}


# -- speeds ----------------------------------------------------------------------------------------------------------


def speeds(states: Array, rounds: int) -> dict[str, Any]:
    """Quartiles of each codec on bf16 ``states``, in MB/s (10**6) of input. ``memcpy`` copies into reused memory."""
    chunks = chunks_of(states)
    nbytes = sum(x.nbytes for x in chunks)
    token_major = chunks_of(np.ascontiguousarray(states.transpose(1, 0, 2)).reshape(1, -1, states.shape[2]))
    inputs: dict[str, tuple[Codec, list[Array]]] = {BASELINE: (ZstdCodec(1), token_major[: len(chunks)])}
    inputs |= {name: (codec, chunks) for name, codec in CODECS.items()}
    works: dict[str, tuple[Work, Work]] = {"memcpy": (lambda i: np.copyto(_out(chunks[i]), chunks[i]),) * 2}
    works |= {name: _works(codec, of) for name, (codec, of) in inputs.items()}
    works[BASELINE] = _plain_zstd(inputs[BASELINE][1])
    jobs = [(name, step, n) for name in works for step in (0, 1) for n in (1, 2)]
    times: dict[tuple[str, int, int], list[float]] = {job: [] for job in jobs}
    for name, step, _ in jobs[::2]:
        timed(works[name][step], len(chunks), 1)  # warms caches, contexts and scratch memory
    for r in range(rounds):
        for name, step, n in (*jobs[r % len(jobs) :], *jobs[: r % len(jobs)]):
            times[name, step, n].append(timed(works[name][step], len(chunks), n))
    found = {}
    for name in works:
        row: dict[str, Any] = {}
        for step, word in enumerate(("compress", "decompress")):
            one, two = times[name, step, 1], times[name, step, 2]
            row[word] = quartiles([nbytes / t / 1e6 for t in one])
            row[f"{word}_times_zstd"] = quartiles([z / t for z, t in zip(times[BASELINE, step, 1], one, strict=True)])
            row[f"{word}_two_threads"] = quartiles([a / b for a, b in zip(one, two, strict=True)])
        if name in inputs:
            row |= {"ratio": ratio(*inputs[name], "bfloat16"), "loss": loss(*inputs[name], "bfloat16")}
        found[name] = row
    return found


_own = threading.local()


def _out(x: Array) -> Array:
    """Thread-local output array, as a reader has for its batch."""
    found: Array | None = getattr(_own, "out", None)
    if found is None:
        found = _own.out = np.empty((CHUNK_BYTES // x[0].nbytes, x.shape[1]), x.dtype)
    return found[: len(x)]


def _own_room(nbytes: int) -> Array:
    """Thread-local uint8 buffer with room for ``nbytes`` and the codec's overhead."""
    found: Array | None = getattr(_own, "room", None)
    if found is None:
        found = _own.room = np.empty(2 * nbytes, np.uint8)
    return found


def _works(codec: Codec, chunks: Sequence[Array]) -> tuple[Work, Work]:
    dtype = "bfloat16"
    stored = [memoryview(b"".join(map(as_bytes_view, codec.encode(x, dtype)))) for x in chunks]

    def encode(i: int) -> None:
        """Encode into reused memory, as the segment encoder does."""
        room = _own_room(chunks[i].nbytes)
        encode_into(codec, chunks[i], dtype, lambda n: room[:n])

    return (
        encode,
        lambda i: codec.decode(stored[i], _out(chunks[i]), dtype),
    )


def _plain_zstd(chunks: Sequence[Array]) -> tuple[Work, Work]:
    def own(make: type[Any], **how: int) -> Any:  # a context serves one thread at a time
        if not hasattr(_own, make.__name__):
            setattr(_own, make.__name__, make(**how))
        return getattr(_own, make.__name__)

    stored = [zstandard.ZstdCompressor(level=1).compress(x.data) for x in chunks]
    return (
        lambda i: own(zstandard.ZstdCompressor, level=1).compress(chunks[i].data),
        lambda i: own(zstandard.ZstdDecompressor).decompress(stored[i]),
    )


def timed(work: Work, count: int, threads: int) -> float:
    """Seconds for all chunks, shared among ``threads``."""

    def run(first: int) -> None:
        for i in range(first, count, threads):
            work(i)

    others = [threading.Thread(target=run, args=(k,)) for k in range(1, threads)]
    begin = time.perf_counter()
    for t in others:
        t.start()
    run(0)
    for t in others:
        t.join()
    return time.perf_counter() - begin


def quartiles(values: Sequence[float]) -> list[float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(v, 3) for v in (low, middle, high)]


# -- the page --------------------------------------------------------------------------------------------------------


def goals(result: dict[str, Any]) -> dict[str, Any]:
    split = result["codecs"]["split"]
    got = [
        split["ratio"],
        split["compress_times_zstd"][1],
        split["decompress_times_zstd"][1],
        split["compress_two_threads"][1],
        split["decompress_two_threads"][1],
    ]
    return {
        name: {"goal": goal, "got": round(value, 3), "met": value >= goal}
        for (name, goal), value in zip(GOALS.items(), got, strict=True)
    }


def as_markdown(result: dict[str, Any]) -> str:
    about = result["about"]
    lines = [
        "# Codecs on real hidden states",
        "",
        f"{result['input']}; {result['rounds']} interleaved rounds; MB/s of input, median (quartiles).",
        f"{about['cpu']}, {about['cores']} cores (load average {about['load_average']} at the start), "
        f"{about['system']}, "
        f"Python {about['python']}, {', '.join(f'{k} {v}' for k, v in about['versions'].items())}; "
        f"commit {about['commit']}.",
        "",
        "| codec | ratio | compress | × plain zstd-1 | 2 threads × 1 | decompress | × plain zstd-1 | 2 threads × 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["codecs"].items():
        cells = [name, f"{row['ratio']:.3f}" if "ratio" in row else "1"]
        for word in ("compress", "decompress"):
            low, middle, high = row[word]
            cells.append(f"{middle:.0f} ({low:.0f}–{high:.0f})")
            cells += ["{1:.2f} ({0:.2f}–{2:.2f})".format(*row[f"{word}{s}"]) for s in ("_times_zstd", "_two_threads")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"{name}: ratio {value:.3f}." for name, value in result["bounds"].items())]
    rms, worst = result["codecs"]["fp8-token"]["loss"]
    lines += ["", f"Loss of fp8-token: {rms:.4f} of all tokens together, {worst:.4f} of the worst token."]
    lines += [
        f"Ratios of {o['dtype']}: {', '.join(f'{k} {v:.3f}' for k, v in o['ratio'].items())}."
        for o in result["other_dtypes"]
    ]
    lines += ["", "| goal | at least | got | |", "|---|---|---|---|"]
    for name, goal in result["goals"].items():
        lines.append(f"| {name} | {goal['goal']} | {goal['got']:.2f} | {'met' if goal['met'] else 'not met'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
