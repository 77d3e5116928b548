"""The identity of a model's weights: the commit of a model of the hub, or the hash of a folder."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from hsx_dist.errors import ConfigError
from hsx_dist.regular_files import open_regular

#: Weights, the code that ``trust_remote_code`` runs, and configurations. Others, such as a trainer's state, may change.
_FILE = re.compile(
    r".*\.(safetensors|gguf|py|index\.json)"
    r"|((hf_)?quant_|quantize_|generation_|tokenizer_|([a-z]+_)*(pre)?processor_)?config\.json"
    r"|(params|special_tokens_map|added_tokens)\.json"
)
#: Other weights, without a trainer's state. vLLM loads pickled ones if there are no safetensors.
_OTHER = re.compile(r"(?!optimizer|scheduler|rng_state|training_args|scaler).*\.(bin|pt|pth)")
#: ``load_format`` of vLLM with which other weights are not loaded if there are safetensors.
_SAFETENSORS = frozenset(
    ["auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "sharded_state", "dummy"]
)
_BLOCK, _BLOCKS = 4096, 64


def folder_weights(model: str, load_format: object = "auto") -> str | None:
    """Hash the configurations, the code and a sample of the weights in a model's folder, without its subfolders.

    Of each file, the hash has the name, the size and 64 blocks of 4 KiB at equal distances. Another
    checkpoint of a training differs there. Weights that differ in a single tensor may have the same hash.

    ``load_format``: vLLM's. It decides whether pickled weights next to safetensors are loaded.

    Returns:
        64 hex digits, or None if ``model`` is no folder.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        others = str(load_format).lower() not in _SAFETENSORS or not any(
            path.suffix == ".safetensors" for path in paths
        )
        for path in paths:
            if _FILE.fullmatch(path.name) or (others and _OTHER.fullmatch(path.name)):
                with open(path, "rb", opener=open_regular) as f:
                    size = f.seek(0, os.SEEK_END)
                    digest.update(f"{path.name!a} {size}\n".encode())
                    for start in _starts(size):
                        f.seek(start)
                        digest.update(f.read(_BLOCK))
    except OSError as e:
        raise ConfigError(
            f"{e.filename or model}: expected a readable file of the model, got {e.strerror}. Make it readable"
        ) from e
    return digest.hexdigest()


def hub_commit(model: str, revision: str | None, file: str = "config.json") -> str | None:
    """Return the commit of the hub's repository whose ``file`` was loaded last. None if the cache has none."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, file, revision=revision)
    except ValueError:  # no id of the hub
        return None
    return Path(found).parent.name if isinstance(found, str) else None


def _starts(size: int) -> list[int]:
    """Offsets of the blocks: all of a small file, else from the first to the last at equal distances."""
    if size <= _BLOCK * _BLOCKS:
        return list(range(0, size, _BLOCK))
    return [(size - _BLOCK) * i // (_BLOCKS - 1) for i in range(_BLOCKS)]
