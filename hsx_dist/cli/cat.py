"""``hsx cat``: write one sample to a file in numpy's or safetensors' format."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.cli.export import parse_layers
from hsx_dist.config import parse_storage_options
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.description import TENSOR_DTYPE
from hsx_dist.format.segment_info import ATTACHMENT_DTYPE, RESERVED_NAMES
from hsx_dist.observe.console import say
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.reading import Sample, open_run
from hsx_dist.reading.column import LOSS_MASK, unpacked
from hsx_dist.store.output_file import output_file

#: Names that an array of a file cannot have: numpy.savez's other arguments, and the metadata of a safetensors header.
_TAKEN = RESERVED_NAMES | {"file", "allow_pickle", "__metadata__"}


def run_cat(
    path: str,
    key: str,
    out: str,
    options: Sequence[str],
    *,
    layers: str | None,
    tokens: str | None,
    points: str | None = None,
) -> None:
    """Write the sample to ``out``: ``….npz``, ``….npy`` (the states alone), or ``….safetensors`` (the true dtype).

    ``points``: names with commas, instead of the hidden states. Each array has its point's name, and the ids of its
    layers are ``layer_ids.NAME``.
    """
    suffix = Path(out).suffix
    if suffix not in (".npz", ".npy", ".safetensors"):
        raise ConfigError(f"-o: expected a name that ends in .npz, .npy or .safetensors, got {out!r}")
    if not Path(out).absolute().parent.is_dir():
        raise ConfigError(f"-o: expected a file in a folder that exists, got {out!r}. Make {Path(out).parent} first")
    names = [HIDDEN_STATES] if points is None else list(dict.fromkeys(points.split(",")))
    if taken := sorted(set(names) & (_TAKEN - {HIDDEN_STATES})):
        raise ConfigError(
            f"--points: expected points that share no name with another array of a file, got {taken}. Load them in "
            "Python with Sample.load"
        )
    if suffix == ".npy" and len(names) > 1:
        raise ConfigError(f"-o: expected .npz or .safetensors for {len(names)} points, got {out!r}. Name another file")
    sample = open_run(path, storage_options=parse_storage_options(options))[key]
    wanted, span = parse_layers(layers), _tokens(tokens)
    if suffix == ".safetensors":
        loaded = {name: sample.load_carrier(wanted, span, name) for name in names}
        stored = {name: sample.points[name] for name in names}
        states = {name: unpacked(carrier, stored[name]) for name, (carrier, _) in loaded.items()}
        ids = loaded[names[0]][1]
        layer_ids = {
            name: np.array(point.layers if wanted is None else wanted, np.int64) for name, point in stored.items()
        }
    else:
        found = sample.load(wanted, span, framework="numpy", points=names)
        states, ids, layer_ids = found["points"], found["token_ids"], found["layer_ids"]
    arrays = {"token_ids": ids}
    arrays |= {"layer_ids" if points is None else f"layer_ids.{name}": x for name, x in layer_ids.items()}
    arrays |= _attached(sample, span, _TAKEN | set(states) | set(arrays))
    with output_file(Path(out)) as f:
        if suffix == ".safetensors":
            f.write(_safetensors({**states, **arrays}, {name: sample.points[name].dtype for name in names}))
        elif suffix == ".npy":
            np.save(f, states[names[0]])
        else:
            np.savez(f, **{**states, **arrays})
    for name, x in states.items():
        axes = "tokens, layers, heads, dim" if x.ndim == 4 else "tokens, layers, hidden size"
        say(f"{out}: {name} {list(x.shape)} ({axes}), {sample.points[name].dtype}", to=sys.stderr)


def _attached(sample: Sample, span: slice | None, taken: Collection[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the sample's attached arrays. A part may contain any names: those in ``taken`` get a prefix."""
    attached = {f"attached.{name}" if name in taken else name: x for name, x in sample.attached().items()}
    if LOSS_MASK in attached:  # has a value per token; other arrays may have any meaning, and are not cut
        if attached[LOSS_MASK].shape != (sample.num_tokens,):
            raise FormatError(
                f"{sample.uri}: expected a loss mask of {sample.num_tokens} tokens for {sample.key!r}, got shape "
                f"{attached[LOSS_MASK].shape}. The object was not written by hsx_dist"
            )
        attached[LOSS_MASK] = attached[LOSS_MASK][span or slice(None)]
    return attached


def _tokens(text: str | None) -> slice | None:
    if text is None:
        return None
    first, colon, second = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return slice(int(first) if first else None, int(second) if second else None)
    except ValueError:
        raise ConfigError(f"--tokens: expected START:STOP, such as 0:128 or -10:, got {text!r}") from None


def _safetensors(tensors: Mapping[str, np.ndarray[Any, Any]], dtypes: Mapping[str, str]) -> bytes:
    # Written here, because the safetensors library writes bf16 only from torch.
    names = {np.dtype(there): name for name, there in ATTACHMENT_DTYPE.items()}
    header, at = {}, 0
    for name, x in sorted(tensors.items(), key=lambda item: -item[1].itemsize):  # each is then aligned
        said = TENSOR_DTYPE[dtypes[name]] if name in dtypes else names[x.dtype]
        header[name] = {"dtype": said, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(np.ascontiguousarray(tensors[n]).tobytes() for n in header)])
