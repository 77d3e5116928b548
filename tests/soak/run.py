"""Two hundred thousand mutated parts. Each must end in a typed error that names it, or in the stored numbers.
Small objects with large claims are read in little memory (``claims``).

    .venv/bin/python -m tests.soak.run [--objects 200000] [--seed 0]

Two processes, each with a limited address space. The tally is written to benchmarks/results/soak-format.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.provenance import provenance
from tests.soak import claims
from tests.soak.mutations import FILES, KINDS, PLAIN, mutate, outcome

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "soak-format.md"
PROCESSES = 2
MEMORY = 1 << 30  # of address space, in addition to the process's size after its imports
SLOWEST = 5.0  # seconds of CPU for one object of a few KiB

Tally = Counter[tuple[str, str]]


def work(job: tuple[int, int]) -> tuple[Tally, float, int]:
    """Run ``(seed, count)``: kind and outcome → count, slowest object's CPU seconds, peak memory gained in bytes."""
    seed, count = job
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tally: Tally = Counter()
    slowest = 0.0
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        name = rng.choice(FILES)
        kind, (data, forged) = mutate(name, rng)
        begin = time.thread_time()
        try:
            result = outcome(name, data, forged, rng.random() < 0.5)
        except BaseException as e:
            raise RuntimeError(f"{name}, {kind}, seed {seed}/{number}: {traceback.format_exc()[-3000:]}") from e
        took = time.thread_time() - begin
        if took > SLOWEST:
            raise RuntimeError(f"{name}, {kind}, seed {seed}/{number}: took {took:.1f} s")
        slowest = max(slowest, took)
        tally[kind, result] += 1
    gained = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return tally, slowest, gained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=200_000)
    parser.add_argument("--claims", type=int, default=300, help="small objects with large claims, of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    about = provenance("numpy", "zstandard", "safetensors")
    begin = time.monotonic()
    jobs = [(args.seed * PROCESSES + p, -(-args.objects // PROCESSES)) for p in range(PROCESSES)]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        done = pool.map(work, jobs)
    claimed = claims.run_limited(args.claims, args.seed)
    tally: Tally = sum((t for t, _, _ in done), Counter())
    slowest, gained = max(s for _, s, _ in done), max(g for _, _, g in done)
    page = as_markdown(tally, slowest, gained, claimed, about, args.seed)
    print(page, f"{time.monotonic() - begin:.0f} s", sep="\n")
    RESULT.write_text(page)


def as_markdown(
    tally: Tally,
    slowest: float,
    gained: int,
    claimed: dict[str, dict[str, int]],
    about: dict[str, Any],
    seed: int,
) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    results = sorted({result for _, result in tally})
    lines = [
        "# Mutated parts",
        "",
        f"`make soak`: {sum(tally.values())} objects made of {len(FILES) - len(PLAIN)} golden parts and {len(PLAIN)} "
        f"plain files (vLLM's own, without checksums), seed {seed}. Every one ended "
        "in a typed error that names the object, or in the stored numbers. Mutations with new checksums and files "
        "without checksums could also end in the changed numbers. No object caused another error, a timeout or a lack "
        "of memory.",
        "",
        f"The slowest took {slowest:.2f} s of CPU; a process of {sum(tally.values()) // PROCESSES} objects grew by "
        f"{gained / 2**20:.0f} MiB at most, in an address space limited to {MEMORY >> 20} MiB more than at its start.",
        "",
        f"Python {about['python']}, {versions}, libzstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}; "
        f"commit {about['commit']}.",
        "",
        f"| mutation | {' | '.join(results)} | sum |",
        f"|---{'|---' * (len(results) + 1)}|",
    ]
    for kind in KINDS:
        counts = [tally[kind, result] for result in results]
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} | {sum(counts)} |")
    totals = [sum(tally[kind, result] for kind in KINDS) for result in results]
    lines.append(f"| all | {' | '.join(map(str, totals))} | {sum(totals)} |")
    lines += [
        "",
        f"Small objects with large claims, in an address space limited to {claims.MEMORY >> 20} MiB more than at the "
        f"start. Every command and reader read each of them, within {claims.SLOWEST:g} s of CPU:",
        "",
        "| objects | outcomes |",
        "|---|---|",
        *(f"| {kind} | {', '.join(f'{n} {what}' for what, n in found.items())} |" for kind, found in claimed.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
