"""Make the golden parts: every codec and dtype, several samples and segments, attached tensors, vLLM's schema.

    .venv/bin/python -m tests.golden.make

Golden parts are never made again: a later version that cannot read them byte for byte breaks the format. New ones get
new names, and this program makes only parts that do not exist. ``expected.json`` holds the crc32c of the arrays that a
reader must return. States and ids follow from ``samples``, which uses integer arithmetic only, so that they do not
depend on a library's random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.format.checksum import crc32c, crc32c_hex
from hsx_dist.format.codecs import Codec, Fp8TokenCodec, NoneCodec, SplitCodec, ZstdCodec
from hsx_dist.format.container import EncodedPart, EncodedSegment, Part, SegmentEncoder, build_part
from hsx_dist.page import CARRIER, FLOATS, HIDDEN_STATES
from hsx_dist.store.base import as_bytes_view
from hsx_dist.testing.samples import RandomSample
from hsx_dist.testing.stores import MemoryStore

FOLDER = Path(__file__).parent
ABOUT = {
    "model": "example/model",
    "revision": None,
    "tokenizer_sha256": "0" * 64,
    "num_hidden_layers": 30,
    "norm": "pre",
    "hsx": "0.1.0",
    "vllm": "0.32.0",
}
LAYERS = (2, 15, 30)
HIDDEN = 16


def sample(key: str, tokens: int, dtype: str, seed: int) -> RandomSample:
    """States with few exponents and noisy mantissas, like real ones: a linear congruential sequence."""
    count, state = tokens * len(LAYERS) * HIDDEN, seed
    values = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        values.append(state >> 33)
    noise = np.array(values, np.uint64)
    width = 16 if CARRIER[dtype] is np.uint16 else 32
    mantissa, bias = {"bfloat16": (7, 127), "float16": (10, 15), "float32": (23, 127)}[dtype]
    exponent = bias - 3 + noise % 4
    bits = (noise >> 30 & 1) << (width - 1) | exponent << mantissa | (noise >> 3) % 2**mantissa
    states = bits.astype(CARRIER[dtype]).reshape(tokens, len(LAYERS), HIDDEN)
    ids = np.arange(tokens) * 7919 % 50_257
    return RandomSample(key, states, ids, LAYERS, dtype, chunk_tokens=8)


def segment(
    codec: Codec, s: RandomSample, index: int = 0, *cuts: int, of: Mapping[str, Any] | None = None, **attached: Any
) -> EncodedSegment:
    of = of or {}
    encoder = SegmentEncoder(codec)
    meta = {"finish_reason": "stop", "note": 'ä "quoted" \\'} if s.key == "a" and not of.get("column") else {}
    for page in s.pages(replace(s.segments(*cuts)[index], meta=meta, **of)):
        encoder.add(page)
    return encoder.finish(attached)


def points(codec: Codec) -> list[EncodedSegment]:
    """Two samples: one with hidden states, expert ids and a point of two shards, one with hidden states only."""
    hidden, other = sample("a", 11, "bfloat16", 1), sample("c", 3, "float16", 3)
    shards = [sample("a", 11, "bfloat16", seed) for seed in (6, 7)]
    ids = replace(hidden, states=(shards[0].states[:, :2, :2] % 128).astype(np.uint32), layer_ids=(0, 5), dtype="int32")
    columns = [
        (hidden, {"column": 0, "point": HIDDEN_STATES}),
        *((x, {"column": 2 - i, "point": "q", "shard": i, "shards": 2, "head": 8}) for i, x in enumerate(shards)),
        (ids, {"column": 3, "point": "topk_ids"}),
    ]
    encoded = [segment(codec, x, of={"columns": 4, "sample_hash": "0" * 16} | of) for x, of in columns]
    return [encoded[2], segment(codec, other), *encoded[:2], encoded[3]]


def parts() -> Iterator[tuple[str, EncodedPart]]:
    """File name → part. Each holds several samples. One has its two segments in reverse order, one other layers."""
    codecs: list[Codec] = [NoneCodec(), ZstdCodec(), SplitCodec(), Fp8TokenCodec()]
    for codec in codecs:
        for dtype in FLOATS:
            a, b = sample("a", 11, dtype, 1), sample("conversation/é-2", 20, dtype, 2)
            c = sample("c", 3, dtype, 3)
            c = replace(c, states=c.states[:, :1], layer_ids=(7,), chunk_tokens=3)
            mask = np.arange(20) % 3 == 0
            segments = [
                segment(codec, b, 1, 12),
                segment(codec, a),
                segment(codec, b, 0, 12, loss_mask=mask, label=np.float64(0.5), weights=np.arange(3, dtype=np.float32)),
                segment(codec, c),
            ]
            yield f"{codec.name}-{dtype}.safetensors", build_part(segments, codec, ABOUT)
    for dtype in FLOATS:
        one = segment(NoneCodec(), sample("one", 19, dtype, 4))
        yield f"one-none-{dtype}.safetensors", build_part([one], NoneCodec(), ABOUT)
    for codec in codecs:
        yield f"points-{codec.name}.safetensors", build_part(points(codec), codec, ABOUT)
    with_mask = segment(NoneCodec(), sample("one", 5, "bfloat16", 5), loss_mask=np.array([0, 1, 1, 0, 1], bool))
    yield "one-none-attached.safetensors", build_part([with_mask], NoneCodec(), ABOUT)


def content(part: EncodedPart) -> bytes:
    return b"".join(map(as_bytes_view, part.buffers))


def facts(data: bytes) -> dict[str, Any]:
    """The checksums of a part as read: of each segment the states ``[n, L, H]``, ids and attached arrays."""
    store = MemoryStore()
    store.objects["p"] = data
    part = Part.open(store, "p", size=len(data))
    segments = []
    for i, info in enumerate(part.segments):
        states, ids, _ = part.load(i)
        s = info.segment
        segments.append(
            {
                "key": s.key,
                **({"column": [s.point, s.column, s.columns, s.shard, s.shards, s.head]} if s.of_points else {}),
                "tokens": [s.index, s.start, s.stop, s.total],
                "shape": list(states.shape),
                "states": crc32c_hex(crc32c(states)),
                "token_ids": crc32c_hex(crc32c(ids)),
                "attached": {k: crc32c_hex(crc32c(v)) for k, v in part.attached(i).items()},
                "meta": dict(s.meta),
                "loss": {str(k): [x.rms, x.worst_token] for k, x in part.loss(i).items()},
            }
        )
    return {"object": crc32c_hex(crc32c(data)), "segments": segments}


def main() -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())
    for name, part in parts():
        path = FOLDER / name
        if path.exists():
            continue
        path.write_bytes(content(part))
        expected["parts"][name] = facts(content(part))
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
