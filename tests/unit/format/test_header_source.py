"""Headers of many parts, and headers that are holes of a file, are opened with little memory."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hsx_dist import HiddenStatesDataset
from hsx_dist.errors import FormatError
from hsx_dist.format import container_read, header_source
from hsx_dist.format.byte_budget import ByteBudget
from hsx_dist.format.container import Part
from hsx_dist.format.origin import origin_of
from hsx_dist.reading import Run
from hsx_dist.reading.expiry import expired
from hsx_dist.reading.verify import verify_run
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run

HOLE = 99_000_000


@pytest.mark.parametrize("read", [
    lambda run: run.select(where=lambda meta: not meta),
    lambda run: verify_run(run._place.root, workers=8),
    lambda run: list(HiddenStatesDataset(run, rank=0, world_size=1, framework="numpy", max_tokens=1)),
])  # fmt: skip
def test_threads_share_the_memory_of_the_headers_that_they_open(read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store_run(store, [random_sample(f"k{i}", 5, layer_ids=[1], hidden_size=4) for i in range(12)], per_part=1)
    run = Run(store)
    opening: list[int] = []
    most = [0]
    parse = container_read.parse_header

    def counted(body: bytes, data_bytes: int) -> object:
        opening.append(1)
        most[0] = max(most[0], len(opening))
        time.sleep(0.02)
        opening.pop()
        return parse(body, data_bytes)

    monkeypatch.setattr(container_read, "parse_header", counted)
    monkeypatch.setattr(header_source, "_budget", ByteBudget(1))
    read(run)
    assert most[0] == 1


@pytest.mark.parametrize("receipt", [True, False])
def test_a_kept_error_does_not_hold_the_fetched_bytes(receipt: bool) -> None:
    fetched: list[weakref.ref[np.ndarray]] = []

    class Source(MemoryStore):
        def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
            arrays = [np.frombuffer(view, np.uint8).copy() for view in super().get_ranges(name, ranges)]
            fetched.extend(map(weakref.ref, arrays))
            return [memoryview(array) for array in arrays]

    store = Source()
    body = b'{"__metadata__":{' + b" " * 1000
    store.put("p.safetensors", [struct.pack("<Q", len(body)), body])
    with pytest.raises(FormatError, match="got an error from the parser") as raised:
        Part.open(store, "p.safetensors", header_bytes=8 + len(body) if receipt else None)
    assert fetched
    assert not any(array() is not None for array in fetched)
    assert raised.value.__cause__ is raised.value.__context__ is None  # they have the text that the parser got


def test_a_header_that_does_not_fit_the_memory_is_a_format_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store_run(store, [random_sample(f"k{i}", 5) for i in range(3)], per_part=1)
    run = Run(store)

    def parse(body: bytes, data_bytes: int) -> object:
        raise MemoryError

    monkeypatch.setattr(container_read, "parse_header", parse)
    data = HiddenStatesDataset(run, rank=0, world_size=1, framework="numpy", on_error="skip")
    assert (list(data), data.skipped) == ([], 3)


class Ranges(LocalStore):
    """Records the ranges that are fetched."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[tuple[int, int]] = []

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        self.asked += ranges
        return super().get_ranges(name, ranges)


def with_hole(path: Path) -> None:
    with path.open("wb") as f:
        f.write(struct.pack("<Q", HOLE) + b'{"__metadata__":{"format":"hsx/1","hsx":"x')
        f.truncate(8 + HOLE + 100)


def test_the_hole_of_a_header_is_not_fetched(tmp_path: Path) -> None:
    store = Ranges(tmp_path)
    with_hole(tmp_path / "k.safetensors")
    assert not list(expired(store))
    with pytest.raises(FormatError, match="got a zero byte"):
        origin_of(store, "k.safetensors")
    assert max(stop - start for start, stop in store.asked) < 1 << 17


def test_the_hole_of_a_header_that_a_receipt_claims_is_not_parsed(tmp_path: Path) -> None:
    with_hole(tmp_path / "k.safetensors")
    with pytest.raises(FormatError, match="got a zero byte"):
        Part.open(LocalStore(tmp_path), "k.safetensors", header_bytes=8 + HOLE, size=8 + HOLE + 100)


def test_a_forked_process_opens_headers_that_threads_of_its_parent_held() -> None:
    script = """
import os, threading
from hsx_dist.format import header_source
held = threading.Event()
def hold():
    with header_source._budget.hold(1 << 40):
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
if not os.fork():
    with header_source._budget.hold(1 << 40):
        os._exit(7)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=60, check=False, env=os.environ)
    assert done.returncode == 7
