"""Kill writers at random for a given time, and check after each round that no sample with a receipt was lost.

    python -m scripts.soak_pool --minutes 60 [--tally benchmarks/results/soak-pool.json]

Each round is a new run. Samples are sent to real Ray writers, which store them on a real S3 server (SeaweedFS). A
thread sends SIGKILL to random writers at random times. Samples without a receipt are sent again until all have one.
Then every stored sample is compared with the sent sample.

The tally is written after each round. A sample whose receipt disappears counts as lost, a sample with other values as
wrong. Exit status 1 means lost or wrong samples, or a damaged run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from benchmarks.provenance import provenance
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.container import Part
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.writers.ray_pool import PoolWriterSpec, RaySender, start_writer
from hsx_dist.writers.sink import SinkOptions
from tests.harness.runs import write_v1_run
from tests.harness.servers import S3Server, seaweedfs


class Killer:
    """A thread that kills a random actor's process again and again, after pauses of up to ``longest`` seconds."""

    def __init__(self, actors: list[Any], chance: random.Random, longest: float):
        self.kills = 0
        self._actors = actors
        self._chance = chance
        self._longest = longest
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._end.wait(self._chance.uniform(0.1, self._longest)):
            actor = self._chance.choice(self._actors)
            with suppress(RayError, ProcessLookupError):
                os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30), signal.SIGKILL)
                self.kills += 1

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


#: Members of the tally. They are written even if they are zero.
COUNTED = (
    "rounds",
    "turns",
    "kills",
    "samples",
    "parts",
    "losses told",
    "samples lost",
    "samples wrong",
    "runs damaged",
)


def wrong(store: Store, samples: dict[str, RandomSample]) -> Counter[str]:
    """Number of lost and wrong samples of a run in which all samples have receipts, and whether it is damaged."""
    manifest = load_manifest(store)
    found = Counter({"samples lost": len(samples.keys() - manifest.samples.keys())})
    for key, record in manifest.samples.items():
        states = [
            Part.open(store, proof.part, header_bytes=manifest.parts[proof.part].header_bytes).read(proof.slot)
            for proof in record.segments
        ]
        found["samples wrong"] += key not in samples or not np.array_equal(np.concatenate(states), samples[key].states)
    found["runs damaged"] += not verify_run(store).ok
    return found


def one_round(server: S3Server, number: int, chance: random.Random) -> Counter[str]:
    url = f"{server.url}/round-{number}"
    store = open_store(url, server.storage_options)
    write_v1_run(store, {})
    attempt = take_attempt(store, {})
    samples = {f"k{i}": random_sample(f"k{i}", chance.randint(1, 800), seed=i) for i in range(200)}
    actors = []
    for i in range(2):
        options = SinkOptions(
            resolve_codec("split"),
            {},
            f"w{i}",
            attempt,
            part_bytes=chance.choice([20_000, 200_000, 1 << 20]),
            part_seconds=chance.choice([0.5, 60.0]),
            max_bytes=1 << 20,
        )
        spec = PoolWriterSpec(url, server.storage_options, "auto", 60.0, {}, options, 1 << 20)
        node = ray.get_runtime_context().get_node_id()
        actors.append(start_writer(spec, node_id=node, num_cpus=0, threads=2, name=f"w{i}-{number}"))
    lost: list[Any] = []
    sender = RaySender([(ray.get_runtime_context().get_node_id(), a) for a in actors], lost.append)
    killer = Killer(actors, chance, longest=chance.choice([0.3, 1.0, 2.5]))
    tally: Counter[str] = Counter(rounds=1)
    proven: set[str] = set()
    try:
        while missing := sorted(samples.keys() - (now := load_manifest(store).samples.keys())):
            tally["samples lost"] += len(proven - now)
            proven |= now
            tally["turns"] += 1
            if tally["turns"] == 12:
                killer.stop()  # otherwise the round may never end
            for key in missing:
                cuts = [len(samples[key].token_ids) // 2] if len(samples[key].token_ids) > 100 else []
                for segment in samples[key].segments(*cuts):
                    sender.send(list(samples[key].pages(segment)), lambda _: None)
            sender.flush()
            for actor in actors:
                with suppress(RayError):
                    ray.get(actor.flush.remote())
    finally:
        killer.stop()
    tally += wrong(store, samples)
    tally["kills"] += killer.kills
    tally["samples"] += len(samples)
    tally["parts"] += len(load_manifest(store).parts)
    tally["losses told"] += len(lost)
    for actor in actors:
        ray.kill(actor)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--tally", type=Path, help="file for the tally, as JSON")
    args = parser.parse_args()
    chance = random.Random(args.seed)  # noqa: S311
    tally: Counter[str] = Counter()
    found: dict[str, Any] = {"about": provenance("ray", "obstore", "zstandard", "numpy"), "seed": args.seed}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hsx-soak-") as folder, seaweedfs(Path(folder)) as server:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False
        )
        number = 0
        while time.monotonic() - start < 60 * args.minutes:
            tally += one_round(server, number, chance)
            number += 1
            found["minutes"] = round((time.monotonic() - start) / 60, 1)
            found |= {name: tally[name] for name in COUNTED}
            print(json.dumps({k: v for k, v in found.items() if k != "about"}), flush=True)
            if args.tally:
                args.tally.write_text(json.dumps(found, indent=1) + "\n")
        ray.shutdown()
    return 1 if tally["samples lost"] or tally["samples wrong"] or tally["runs damaged"] else 0


if __name__ == "__main__":
    sys.exit(main())
