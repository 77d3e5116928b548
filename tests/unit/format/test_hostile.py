"""Mutated golden parts. ``make soak`` tests two hundred thousand of them."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx_dist.errors import FormatError
from hsx_dist.format.codecs import SplitCodec
from hsx_dist.format.container import SegmentEncoder, build_part
from hsx_dist.format.description import Description
from hsx_dist.format.header import parse_header
from hsx_dist.testing.samples import random_sample
from tests.soak.mutations import FILES, KINDS, PLAIN, golden, mutate, outcome, read_all, truth


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FILES), st.integers(0, 2**32), st.booleans())
def test_a_mutated_part_raises_a_typed_error_or_gives_the_stored_states(name: str, seed: int, told_size: bool) -> None:
    _, (data, forged) = mutate(name, random.Random(seed))
    outcome(name, data, forged, told_size)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_any_bytes_in_any_place(name: str, data: st.DataObject) -> None:
    whole = golden(name)
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(0, 40))
    bad = whole[:at] + data.draw(st.binary(max_size=40)) + whole[at + cut :]
    outcome(name, bad, name in PLAIN, data.draw(st.booleans()))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_at_all(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_all(data)


def test_every_kind_of_mutation_is_made_and_most_are_found() -> None:
    found: dict[str, set[str]] = {}
    for seed in range(600):
        rng = random.Random(seed)
        name = rng.choice(FILES)
        kind, (data, forged) = mutate(name, rng)
        found.setdefault(kind, set()).add(outcome(name, data, forged, True))
    assert set(found) == set(KINDS)
    assert all(results & {"FormatError", "IntegrityError"} for results in found.values())


def test_wrong_numbers_would_be_seen() -> None:
    name = "split-bfloat16.safetensors"
    assert truth(name) != truth("zstd-bfloat16.safetensors")
    with pytest.raises(AssertionError, match="wrong numbers"):
        outcome(name, golden("zstd-bfloat16.safetensors"), False, True)


def test_damaged_metadata_does_not_make_a_part_one_without_checksums() -> None:
    """Damages both names that mark a part with checksums, and then the states. (Found by ``make soak``.)"""
    whole = golden("one-none-float16.safetensors")
    for old, new in ((b'"hsx/1"', b'"hsxo1"'), (b'"hsx":', b'"jsx":'), (b'"hsx_crc32c"', b'"jsx_crc32c"')):
        assert whole.count(old) == 1
        whole = whole.replace(old, new)
    bad = whole[:-1] + bytes([whole[-1] ^ 1])
    assert outcome("one-none-float16.safetensors", bad, False, True) == "FormatError"


@pytest.mark.parametrize(
    ("states", "ids", "more"),
    [
        ([0, 16], [0, 16], {}),  # the same bytes twice
        ([0, 16], [8, 24], {}),
        ([0, 16], [24, 40], {}),  # a gap
        ([8, 24], [24, 40], {}),
        ([0, 16], [16, 32], {"mine": {"dtype": "I64", "shape": [1], "data_offsets": [100, 108]}}),
    ],
)
def test_a_plain_file_whose_tensors_overlap_or_leave_holes(states: list[int], ids: list[int], more: dict) -> None:
    table = {
        "hidden_states": {"dtype": "BF16", "shape": [2, 1, 4], "data_offsets": states},
        "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": ids},
        **more,
    }
    body = json.dumps(table).encode()
    with pytest.raises(FormatError, match="expected to begin at"):
        parse_header(body, None)


def test_a_shape_of_very_many_numbers_is_cut_in_the_error() -> None:
    table = {
        "hidden_states": {"dtype": "BF16", "shape": [2, 1, 4], "data_offsets": [0, 16]},
        "token_ids": {"dtype": "I64", "shape": [2, *[1] * 100_000], "data_offsets": [16, 32]},
    }
    with pytest.raises(FormatError, match="expected I64") as error:
        parse_header(json.dumps(table).encode(), None)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[0].update(key=""), "key: expected a non-empty string"),
        (lambda rows: rows.append(rows[0]), "each key, column and index once"),
    ],
)
def test_keys_that_no_writer_writes(change, said: str) -> None:
    encoder = SegmentEncoder(SplitCodec())
    for page in random_sample(tokens=20).pages():
        encoder.add(page)
    part = build_part([encoder.finish()], SplitCodec(), {})
    header = json.loads(part.header[8:])
    body = json.loads(header["__metadata__"]["hsx"])
    body["segments"] = [body["common"] | row for row in body["segments"]]
    change(body["segments"])
    with pytest.raises(FormatError, match=said):
        Description.from_json(json.dumps(body))
