"""A damaged or missing part costs a reader its bytes a few times, not once for each of its samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hsx_dist import HiddenStatesDataset
from hsx_dist.errors import FormatError, HsxError, IntegrityError, NotFound, Unavailable, UnknownCodec
from hsx_dist.format.codecs import CODECS, NoneCodec
from hsx_dist.format.container import Part
from hsx_dist.reading import kept_parts, verify_run
from hsx_dist.reading.kept_parts import KeptParts
from hsx_dist.reading.run import Run
from hsx_dist.store import open_store
from hsx_dist.testing.faulty_stores import WrappedStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import store_run

MANY = 200


class Counting(WrappedStore):
    """Counts requests and bytes of parts, and requests for other objects."""

    requests = nbytes = others = 0

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        self.requests += 1
        self.nbytes += sum(b - a for a, b in ranges)
        return super().get_ranges(name, ranges)

    def get(self, name: str, most: int | None = None) -> bytes:
        self.others += 1
        return super().get(name, most)


def stored_run() -> tuple[MemoryStore, str]:
    """A run of one part, and the part's name."""
    store = MemoryStore()
    made = [random_sample(f"k{i}", 1, layer_ids=(1,), hidden_size=1, chunk_tokens=1, odd=False) for i in range(MANY)]
    store_run(store, made, per_part=MANY, codec=NoneCodec())
    return store, next(name for name in store.objects if name.endswith(".safetensors"))


def skipped(run: Run, cache: Path | None = None) -> int:
    dataset = HiddenStatesDataset(
        run, on_error="skip", framework="numpy", threads=4, rank=0, world_size=1, cache_dir=cache and str(cache)
    )
    assert list(dataset) == []
    return dataset.skipped


def damage(store: MemoryStore, name: str, kind: str) -> int:
    """Damage the header or all token ids. Returns the header's bytes."""
    data = bytearray(store.objects[name])
    header = 8 + int.from_bytes(data[:8], "little")
    for at in [data.index(b"tiny")] if kind == "header" else range(header, header + 8 * MANY, 8):
        data[at] ^= 1
    store.objects[name] = bytes(data)
    return header


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", ["header", "token ids"])
def test_the_transfer_for_a_damaged_part_does_not_grow_with_its_samples(
    kind: str, cached: bool, tmp_path: Path
) -> None:
    store, name = stored_run()
    header = damage(store, name, kind)
    counting = Counting(store)
    assert skipped(Run(counting), tmp_path / "cache" if cached else None) == MANY
    # Threads may fetch the header and the ids again at the same time. Each sample fetches its states and ids.
    assert counting.nbytes <= 6 * (header + 8 * MANY) + 32 * MANY
    assert kind == "token ids" or counting.requests == 2


def test_samples_of_a_missing_part_do_not_read_the_description_again() -> None:
    store, name = stored_run()
    del store.objects[name]
    counting = Counting(store)
    run = Run(counting)
    before = counting.others
    assert skipped(run) == MANY
    assert counting.others - before < 10


def test_verify_reads_no_hole_behind_a_part(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store_run(store, [random_sample("k", 1, layer_ids=(1,), hidden_size=1)], per_part=1)
    [part] = tmp_path.rglob("*.safetensors")
    os.truncate(part, 1 << 42)
    report = verify_run(store)
    assert "bytes, as its receipt says" in report.problems[0].message
    assert report.bytes < 1 << 20


@pytest.mark.parametrize(("error", "seconds"), [
    (IntegrityError("a b"), 60), (NotFound("a b"), 5), (Unavailable("a b"), 0), (ValueError("a b"), 0),
    (UnknownCodec("a b"), 60),
])  # fmt: skip
def test_an_error_is_raised_again_for_some_seconds(error: Exception, seconds: float) -> None:
    now, opened, raised = [100.0], list[str](), list[BaseException]()

    def fail(name: str) -> Part:
        opened.append(name)
        raise error

    kept = KeptParts(lambda: now[0])
    for at in (0, 0, seconds - 0.5, seconds):
        now[0] = 100 + at
        with pytest.raises(type(error), match="a b") as caught:
            kept.get("p", fail)
        raised.append(caught.value)
    assert len(opened) == (2 if seconds else 4)
    assert not seconds or len({id(e) for e in raised[:3]}) == 3
    kept.forget_errors()
    before = len(opened)
    with pytest.raises(type(error)):
        kept.get("p", fail)
    assert len(opened) == before + 1


def test_a_part_of_an_unknown_codec_is_opened_again_once_a_codec_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = stored_run()
    counting, codec = Counting(store), CODECS["none"]
    run = Run(counting)
    monkeypatch.delitem(CODECS, "none")
    assert skipped(run) == MANY
    assert counting.requests == 2
    monkeypatch.setitem(CODECS, "none", codec)
    assert len(run["k0"].token_ids()) == 1


def test_the_number_of_kept_errors_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_parts, "_MOST_ERRORS", 3)
    opened, kept = list[str](), KeptParts()

    def fail(name: str) -> Part:
        opened.append(name)
        raise FormatError(name)

    for name in "abcddcba":
        with pytest.raises(HsxError, match=name):
            kept.get(name, fail)
    assert "".join(opened) == "abcda"


def test_a_refresh_opens_a_restored_part() -> None:
    store, name = stored_run()
    whole = store.objects[name]
    damage(store, name, "header")
    run = Run(store)
    with pytest.raises(FormatError):
        run["k0"].load_carrier()
    store.objects[name] = whole
    with pytest.raises(FormatError):
        run["k1"].load_carrier()
    run.refresh()
    assert run["k0"].load_carrier()[1].size == 1
