"""Random mutations of the golden parts, and the outcomes that are allowed for readers.

Files of vLLM's own connector are mutated, too. They have no checksums: a reader returns changed data as stored, but
raises no untyped error and reads nothing out of bounds.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import save

from hsx_dist.errors import FormatError
from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.container import Part
from hsx_dist.format.description import Description
from hsx_dist.format.header import build_header
from hsx_dist.testing.stores import MemoryStore
from tests.golden.make import FOLDER


def _plain(dtype: str, metadata: dict[str, str] | None) -> bytes:
    """A sample of 19 tokens and three layers of 16, as vLLM's own connector stores it."""
    states = torch.from_numpy(np.random.default_rng(1).standard_normal((19, 3, 16))).to(getattr(torch, dtype))
    return save({"hidden_states": states, "token_ids": torch.arange(19)}, metadata)


PLAIN = {
    "plain-bfloat16": _plain("bfloat16", None),
    "plain-float16": _plain("float16", {"format": "np"}),
    "plain-float32": _plain("float32", {"format": "pt"}),
}
FILES = [*sorted(path.name for path in FOLDER.glob("*.safetensors")), *PLAIN]
NUMBERS = [-1, 0, 1, 2, 7, 255, 2**31, 2**32, 2**53, 2**60, 2**63, 2**64, 10**30, -(2**60), 1.5, 1e300]
VALUES = [None, True, False, "", "x", "\ud800", [], {}, [[]], [0], {"a": 1}, *NUMBERS]
LONGEST_MESSAGE = 2000

#: (the mutated object, whether its maker could compute new checksums)
Mutated = tuple[bytes, bool]


@lru_cache(maxsize=64)
def golden(name: str) -> bytes:
    return PLAIN[name] if name in PLAIN else (FOLDER / name).read_bytes()


@lru_cache(maxsize=64)
def truth(name: str) -> list[tuple[bytes, ...]]:
    return read_all(golden(name))


def read_all(data: bytes, told_size: bool = True) -> list[tuple[bytes, ...]]:
    """Everything that a reader can read from a part."""
    store = MemoryStore()
    store.objects["p"] = data
    part = Part.open(store, "p", size=len(data) if told_size else None)
    found = []
    for i, info in enumerate(part.segments):
        states, ids, _ = part.load(i)
        attached = part.attached(i)
        said = repr((info, part.codec, sorted(part.about.items()), info.segment.meta, part.loss(i), list(attached)))
        found.append((states.tobytes(), ids.tobytes(), *(a.tobytes() for a in attached.values()), said.encode()))
    return found


def outcome(name: str, data: bytes, forged: bool, told_size: bool) -> str:
    """A reader's outcome in a word.

    Raises:
        AssertionError: the outcome is not allowed.
    """
    try:
        found = read_all(data, told_size)
    except FormatError as e:
        message = str(e)
        assert "test://memory/p" in message, f"expected the object's name in the message, got {message}"
        assert len(message) <= LONGEST_MESSAGE, f"got a message of {len(message)} characters: {message[:300]}"
        return type(e).__name__
    if found == truth(name):
        return "read, the same"
    assert forged, "wrong numbers"
    return "read, as forged"


def mutate(name: str, rng: random.Random) -> tuple[str, Mutated]:
    """Mutate a golden part. Returns the kind of mutation and its result."""
    kind = rng.choice(_OF_PLAIN if name in PLAIN else KINDS)
    data, forged = _KINDS[kind](golden(name), rng)
    return kind, (data, forged or (name in PLAIN and kind != "truncated"))


# -- bytes, without new checksums ------------------------------------------------------------------------------------


def _truncated(data: bytes, rng: random.Random) -> Mutated:
    return data[: rng.randrange(len(data))], False


def _flipped(data: bytes, rng: random.Random) -> Mutated:
    bad = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    return bytes(bad), False


def _overwritten(data: bytes, rng: random.Random) -> Mutated:
    a = rng.randrange(len(data))
    n = rng.choice([1, 2, 8, 64, 512])
    filler = rng.choice([bytes(n), b"\xff" * n, rng.randbytes(n), b'"' * n])
    return (data[:a] + filler + data[a + n :])[: len(data)], False


def _spliced(data: bytes, rng: random.Random) -> Mutated:
    a, b, c = sorted(rng.randrange(len(data)) for _ in range(3))
    other = golden(rng.choice(FILES))
    d = rng.randrange(len(other))
    pieces = [
        data[:a] + data[b:],
        data[:b] + data[a:],
        data[:a] + data[b:c] + data[a:b] + data[c:],
        data[:a] + other[d : d + b - a] + data[b:],
        data[:a] + other[min(a, len(other)) :],
    ]
    bad = rng.choice(pieces)
    return bad, any(bad == golden(name) for name in FILES)  # two parts may have the same first bytes


def _wrong_length(data: bytes, rng: random.Random) -> Mutated:
    (n,) = struct.unpack_from("<Q", data)
    lie = rng.choice([0, 1, n - 8, n + 8, n + 1, len(data), 10**8, 10**8 + 1, 2**32, 2**60, 2**63, 2**64 - 1])
    return struct.pack("<Q", lie) + data[8:], False


# -- meaning, with correct checksums ---------------------------------------------------------------------------------


def _parsed(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header, its description, and the data."""
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    return header, json.loads(header["__metadata__"]["hsx"]), data[8 + n :]


def _assembled(header: dict[str, Any], metadata: dict[str, str], text: str, content: bytes) -> bytes:
    """``metadata``: the previous one, whose version is kept."""
    crc = crc32c_hex(crc32c(text.encode("utf-8", "surrogatepass")))
    header["__metadata__"] = metadata | {"hsx": text, "hsx_crc32c": crc}
    body = json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + content


def spots(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, child in items:
        found.append((value, key))
        if isinstance(child, dict | list):
            spots(child, found)
    return found


def _tampered(value: Any, rng: random.Random) -> None:
    container, key = rng.choice(spots(value, []))
    old = container[key]
    if rng.random() < 0.15:
        del container[key]
    elif isinstance(old, int) and rng.random() < 0.5:
        container[key] = old + rng.choice([-1, 1, -8, 8, 1 << rng.randrange(64)])
    else:
        container[key] = deepcopy(rng.choice(VALUES))  # a later change must not reach VALUES


def _wrong_description(data: bytes, rng: random.Random) -> Mutated:
    header, description, content = _parsed(data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        _tampered(description, rng)
    text = json.dumps(description)
    if rng.random() < 0.5:
        try:  # use the table of the changed description, if it is valid: the code that reads the data is then reached
            made = build_header(Description.from_json(text))
        except (FormatError, ValueError, RecursionError):
            pass
        else:
            data_bytes = Description.from_json(text).data_bytes
            fitted = (content + bytes(min(max(0, data_bytes - len(content)), 1 << 20)))[:data_bytes]
            return made + fitted, True
    return _assembled(header, header["__metadata__"], text, content), True


def _wrong_table(data: bytes, rng: random.Random) -> Mutated:
    (n,) = struct.unpack_from("<Q", data)
    header, content = json.loads(data[8 : 8 + n]), data[8 + n :]
    metadata = header.pop("__metadata__", {})
    text = metadata.get("hsx")
    if text is None and metadata:
        header["__metadata__"] = metadata
    for _ in range(rng.choice([1, 1, 2])):
        _tampered(header, rng)
        if not header:
            break
    if text is None:
        body = json.dumps(header).encode()
        return struct.pack("<Q", len(body)) + body + content, True
    return _assembled(header, metadata, text, content), True


def _wrong_json(data: bytes, rng: random.Random) -> Mutated:
    """Duplicate names, invalid UTF-8, deep nesting and NaNs, in the text of the header or of the description."""
    header, description, content = _parsed(data)
    text = json.dumps(description)
    at = rng.randrange(len(text))
    text = rng.choice(
        [
            text[:-1] + ',"codec":{"name":"none"}}',
            text[:1] + '"common":{},' + text[1:],
            text.replace('"index": 0', '"index": 0, "index": 0', 1),
            text[:at] + rng.choice(["NaN", "-Infinity", "1e999", "[" * 3000, "\\ud800", "\x00", "{"]) + text[at:],
            text[:at] + text[at + rng.randrange(1, 40) :],
            "[" * 100_000,
        ]
    )
    made = bytearray(_assembled(header, header["__metadata__"], text, content))
    if rng.random() < 0.3:
        made[8 + rng.randrange(100)] = rng.choice([0x80, 0xC0, 0xFF, 0xFE])
    return bytes(made), True


def _wrong_chunk(data: bytes, rng: random.Random) -> Mutated:
    """Change a chunk's content. Its size, checksum and table stay correct: only the codec can detect the change."""
    header, description, content = _parsed(data)
    if description["schema"] == "vllm":
        return _wrong_description(data, rng)
    i = rng.randrange(len(description["segments"]))
    segment = description["common"] | description["segments"][i]
    k, c = rng.randrange(len(segment["layer_ids"])), rng.randrange(len(segment["crcs"][0]))
    if "sizes" not in segment:
        return _wrong_description(data, rng)
    sizes = segment["sizes"][k]
    a = header[f"{i}.{k}"]["data_offsets"][0] + sum(sizes[:c])
    old = content[a : a + sizes[c]]
    new = _another_chunk(old, rng)
    sizes[c], segment["crcs"][k][c] = len(new), crc32c(new)
    description["segments"][i] |= {"sizes": segment["sizes"], "crcs": segment["crcs"]}
    made = build_header(Description.from_json(json.dumps(description)))
    return made + content[:a] + new + content[a + len(old) :], True


def _another_chunk(old: bytes, rng: random.Random) -> bytes:
    magic = old.find(b"\x28\xb5\x2f\xfd")
    raw, frame = (old[:magic], old[magic:]) if magic >= 0 else (old, b"")
    choice = rng.randrange(6)
    if choice == 0:
        return _flipped(old, rng)[0]
    if choice == 1:
        return old[: rng.randrange(len(old))]
    if choice == 2:
        return old + rng.choice([b"\x00", frame, rng.randbytes(20)])
    if choice == 3:  # a bomb
        size = rng.choice([1 << 16, 1 << 22, 1 << 26])
        return raw + _bomb(size)
    if choice == 4:  # a wrong content size, in any of the frame's header fields
        bad = bytearray(frame or b"\x00" * 8)
        bad[4] = rng.randrange(256)
        bad[5 : 5 + rng.randrange(1, 9)] = rng.randbytes(8)
        return raw + bytes(bad)
    return rng.randbytes(rng.randrange(200))


@lru_cache(maxsize=8)
def _bomb(size: int) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(np.zeros(size, np.uint8).data)


_KINDS: dict[str, Callable[[bytes, random.Random], Mutated]] = {
    "truncated": _truncated,
    "bits flipped": _flipped,
    "overwritten": _overwritten,
    "spliced": _spliced,
    "header length lies": _wrong_length,
    "description lies": _wrong_description,
    "table lies": _wrong_table,
    "JSON lies": _wrong_json,
    "chunk lies": _wrong_chunk,
}
KINDS = tuple(_KINDS)
#: Kinds for files without this project's description.
_OF_PLAIN = ("truncated", "bits flipped", "overwritten", "spliced", "header length lies", "table lies")
