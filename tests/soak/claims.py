"""Small objects with large claims: every reader must refuse or read them with little memory and time.

    .venv/bin/python -m tests.soak.claims [--objects 2000] [--seed 0]

The address space of this process is limited to its size after its imports plus 256 MiB. Each object is a name, a
receipt, a compacted manifest, a JSON object, a header or an input file, with a claim multiplied by a power of two. The
outcome must be a typed error or a result. A MemoryError, another error, or more than ``SLOWEST`` seconds of CPU end the
run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from hsx_dist.errors import HsxError
from tests.soak import claim_kinds
from tests.soak.claim_kinds import Read
from tests.soak.claim_texts import texts
from tests.soak.claim_zeros import zeros
from tests.soak.mutations import LONGEST_MESSAGE

KINDS = {**claim_kinds.KINDS, "texts": texts, "zeros": zeros}
#: Kinds that are made once before the limit is set, for imports, threads and caches. The others need no more of these.
FIRST = [kind for kind in KINDS if kind not in ("large headers", "chunks", "compressed lines")]
MEMORY = 256 << 20
SLOWEST = 10.0
#: Without these each thread reserves address space that it does not use.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"}


def quietly(read: Read) -> str:
    """A reader's outcome in a word. An error that is not an ``HsxError`` is raised."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            read()
    except HsxError as e:
        if len(str(e)) > LONGEST_MESSAGE:
            raise RuntimeError(f"a message of {len(str(e))} characters") from e
        return type(e).__name__
    return "read"


def attempt(kind: str, seed: str, limit: int | None) -> Counter[tuple[str, str]]:
    """Make one object, and run every reader on it with the address space limited to ``limit``."""
    tally: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="hsx-claims-") as folder:
        readers = KINDS[kind](random.Random(seed), Path(folder))
        gc.collect()
        for number, read in enumerate(readers):
            begin = time.process_time()
            with limited(limit):
                try:
                    tally[kind, quietly(read)] += 1
                except BaseException as e:
                    raise RuntimeError(f"{kind}, seed {seed}, reader {number}: {traceback.format_exc()[-3000:]}") from e
            took = time.process_time() - begin
            if took > SLOWEST:
                raise RuntimeError(f"{kind}, seed {seed}, reader {number}: took {took:.1f} s")
    return tally


@contextlib.contextmanager
def limited(limit: int | None) -> Any:
    """Limit the address space within the context. Objects are made outside, where they may take more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def run_limited(objects: int, seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> dict[str, Any]:
    """Run ``objects`` objects of each kind in another process. Returns its tally.

    Raises:
        RuntimeError: the process failed. Carries its output.
    """
    command = [sys.executable, "-m", "tests.soak.claims", f"--objects={objects}", f"--seed={seed}", "--json"]
    command += [f"--kind={kind}" for kind in kinds]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=200, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    missing = {name: value for name, value in ENVIRONMENT.items() if os.environ.get(name) != value}
    if missing:
        os.execve(sys.executable, [sys.executable, "-m", "tests.soak.claims", *sys.argv[1:]], {**os.environ, **missing})
    threading.stack_size(1 << 20)
    for kind in FIRST:
        attempt(kind, "first", None)
    gc.collect()
    limit = address_space() + MEMORY
    tally: Counter[tuple[str, str]] = Counter()
    for kind in args.kind or KINDS:
        for number in range(args.objects):
            tally += attempt(kind, f"{args.seed}/{number}", limit)
    found: dict[str, dict[str, int]] = {}
    for (kind, result), count in sorted(tally.items()):
        found.setdefault(kind, {})[result] = count
    print(json.dumps(found, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
