"""Stores samples into a run on a small separate disk until it is full, then on the same disk with more space.

    unshare --user --map-root-user --mount python -m tests.unit.writers.on_a_small_disk FOLDER PART_BYTES

Prints a JSON object with the writer's events and the disk's contents. It runs in a new mount namespace: no other
process sees the disk, and no privilege is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from hsx_dist.errors import FormatError, StoreError
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.container import Part
from hsx_dist.format.manifest import Receipt
from hsx_dist.format.names import parse_part_name
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import random_sample
from hsx_dist.writers.events import Event, Lost
from hsx_dist.writers.sink import PartSink, SinkOptions
from tests.harness.runs import write_v1_run

#: 24 samples of 0.6 MB.
SAMPLES = {f"k{i}": random_sample(f"k{i}", tokens=100, hidden_size=1024, seed=i) for i in range(24)}


def store_missing(store: Store, attempt: int, part_bytes: int) -> list[Event]:
    """Store the samples without receipt. Returns the writer's events."""
    events: list[Event] = []
    proven = load_manifest(store).samples.keys()
    sink = PartSink(store, SinkOptions(resolve_codec("none"), {}, "w", attempt, part_bytes=part_bytes), events.append)
    try:
        for key in SAMPLES.keys() - proven:
            for page in SAMPLES[key].pages():
                sink.add(page)
    except StoreError:
        pass  # its event has the reason
    sink.close()
    return events


def are_as_sent(store: Store) -> bool:
    manifest = load_manifest(store)
    for key, record in manifest.samples.items():
        states = [Part.open(store, proof.part).read(proof.slot) for proof in record.segments]
        if not np.array_equal(np.concatenate(states), SAMPLES[key].states):
            return False
    return verify_run(store).ok


def is_whole(store: Store, name: str) -> bool:
    try:
        part = Part.open(store, name)
        return all(len(part.read(slot)) for slot in range(len(part.segments)))
    except FormatError:
        return False


def main() -> None:
    folder, part_bytes = Path(sys.argv[1]), int(sys.argv[2])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    store = open_store(str(folder))
    write_v1_run(store, {})
    events = store_missing(store, take_attempt(store, {}), part_bytes)
    parts = {e.part for e in events if isinstance(e, Receipt)}
    there = {str(f.relative_to(folder)) for f in (folder / "data").rglob("*") if f.is_file()}
    # The disk may have had space for a part and none for its receipt: then the part is whole, and garbage.
    broken = [name for name in there - parts if parse_part_name(name) is None or not is_whole(store, name)]
    found = {
        "fatal": [e.reason for e in events if isinstance(e, Lost) and e.fatal],
        "proven": len(load_manifest(store).samples),
        "broken_files": sorted(broken),
        "as_sent": are_as_sent(store),
    }
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
    events = store_missing(store, take_attempt(store, {}), part_bytes)
    found["lost_later"] = [e.reason for e in events if isinstance(e, Lost)]
    found["proven_later"] = len(load_manifest(store).samples)
    found["as_sent_later"] = are_as_sent(store)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
