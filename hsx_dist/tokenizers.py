"""Hashes that identify a tokenizer and its chat template."""

from __future__ import annotations

import hashlib
from typing import Any


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of a transformers tokenizer's serialised form. Another hash means other token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()


def template_hash(tokenizer: Any) -> str | None:
    """Return the SHA-256 of the tokenizer's chat template, or of all its templates; None if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if not template else hashlib.sha256(repr(template).encode("utf-8", "surrogatepass")).hexdigest()
