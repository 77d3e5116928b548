"""``hsx cat``: one sample into a file of numpy's or safetensors' format."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.cli.export import parse_layers
from hsx_dist.config import parse_storage_options
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.description import ATTACHMENT_DTYPE, RESERVED_NAMES, TENSOR_DTYPE
from hsx_dist.observe.console import say
from hsx_dist.reading import open_run
from hsx_dist.reading.sample import LOSS_MASK

_TAKEN = RESERVED_NAMES | {"file", "allow_pickle"}  # numpy.savez takes arrays as arguments beside its own


def run_cat(path: str, key: str, out: str, options: Sequence[str], *, layers: str | None, tokens: str | None) -> None:
    """Write the sample to ``out``: ``….npz``, ``….npy`` (the states alone), or ``….safetensors`` (the true dtype)."""
    suffix = Path(out).suffix
    if suffix not in (".npz", ".npy", ".safetensors"):
        raise ConfigError(f"-o: expected a name that ends in .npz, .npy or .safetensors, came {out!r}")
    if not Path(out).absolute().parent.is_dir():
        raise ConfigError(f"-o: expected a file in a folder that exists, came {out!r}; make {Path(out).parent} first")
    sample = open_run(path, storage_options=parse_storage_options(options))[key]
    wanted, span = parse_layers(layers), _tokens(tokens)
    # A part may hold any names. Those of the sample itself, and of numpy's arguments, get a prefix.
    attached = {f"attached.{name}" if name in _TAKEN else name: x for name, x in sample.attached().items()}
    if LOSS_MASK in attached:  # of each token; what else is attached may mean anything, and stays whole
        if attached[LOSS_MASK].shape != (sample.num_tokens,):
            raise FormatError(
                f"{sample.uri}: expected a loss mask of {sample.num_tokens} tokens for {key!r}, got shape "
                f"{attached[LOSS_MASK].shape}. The object was not written by hsx_dist"
            )
        attached[LOSS_MASK] = attached[LOSS_MASK][span or slice(None)]
    if suffix == ".safetensors":
        carrier, ids = sample.load_carrier(wanted, span)
        layer_ids = np.array(sample.layer_ids if wanted is None else wanted, np.int64)
        tensors = {"hidden_states": carrier, "token_ids": ids, "layer_ids": layer_ids, **attached}
        Path(out).write_bytes(_safetensors(tensors, sample.dtype))
        shape: tuple[int, ...] = carrier.shape
    else:
        loaded = sample.load(wanted, span, framework="numpy")
        states = loaded["hidden_states"]
        with Path(out).open("wb") as f:
            if suffix == ".npy":
                np.save(f, states)
            else:
                arrays = {"token_ids": loaded["token_ids"], "layer_ids": loaded["layer_ids"], **attached}
                np.savez(f, hidden_states=states, **arrays)
        shape = states.shape
    say(f"{out}: hidden_states {list(shape)} (tokens, layers, hidden size), {sample.dtype}", to=sys.stderr)


def _tokens(text: str | None) -> slice | None:
    if text is None:
        return None
    first, colon, second = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return slice(int(first) if first else None, int(second) if second else None)
    except ValueError:
        raise ConfigError(f"--tokens: expected START:STOP, such as 0:128 or -10:, came {text!r}") from None


def _safetensors(tensors: Mapping[str, np.ndarray[Any, Any]], dtype: str) -> bytes:
    # By hand: the library writes bf16 from torch only.
    names = {np.dtype(there): name for name, there in ATTACHMENT_DTYPE.items()}
    header, at = {}, 0
    for name, x in sorted(tensors.items(), key=lambda item: -item[1].itemsize):  # each is then aligned
        said = TENSOR_DTYPE[dtype] if name == "hidden_states" else names[x.dtype]
        header[name] = {"dtype": said, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(np.ascontiguousarray(tensors[n]).tobytes() for n in header)])
