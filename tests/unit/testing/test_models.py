"""The tiny model: equal arguments make equal files, and its tokenizer decodes its tokens to the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hsx_dist.models.builtin import resolve_model
from hsx_dist.models.tiny import tiny_llama, write_tiny_tokenizer


def test_tiny_llama_is_the_same_every_time(tmp_path: Path) -> None:
    one, two = tiny_llama(tmp_path / "one"), tiny_llama(tmp_path / "two")
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in two.iterdir())
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name
    other = tiny_llama(tmp_path / "other", seed=1)
    assert (other / "model.safetensors").read_bytes() != (one / "model.safetensors").read_bytes()


def test_tiny_llamas_tokenizer_gives_text_back(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama(tmp_path))
    text = "Größe: 12 µm — 今日は\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = [{"role": "user", "content": "hi"}]
    wanted = "<|user|>hi</s><|assistant|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == wanted


def test_the_tokenizer_has_as_many_entries_as_the_docstring_says(tmp_path: Path) -> None:
    assert f"the first {write_tiny_tokenizer(tmp_path, 2000, 512)} at most" in (tiny_llama.__doc__ or "")


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab >= 320"):
        tiny_llama(tmp_path, vocab=300)


def test_other_models_are_left_alone() -> None:
    assert resolve_model("org/model") == "org/model"
