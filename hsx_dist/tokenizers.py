"""Which tokenizer: what makes token ids of two places the same ids."""

from __future__ import annotations

import hashlib
from typing import Any


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of a transformers tokenizer's serialised form: whoever has another hash reads other token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()
