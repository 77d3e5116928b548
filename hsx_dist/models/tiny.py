"""A tiny random Llama with a tokenizer, for tests and for checks of an installation. It needs no hub."""

from __future__ import annotations

from pathlib import Path

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The tokenizer's training text. Another text gives other tokens.
_TEXT = """\
A language model reads tokens and predicts the next one. Each layer adds what it has found to the residual stream, and
the last layer's output is projected onto the vocabulary. The hidden states of a model are the values of that stream
between two layers: one vector for each token and each layer. Draft models, probes and sparse autoencoders are trained
on them. A prompt is a list of messages, or a text, or a list of token ids. The tokenizer merges the pairs of bytes
that are most frequent in its training text, until its vocabulary is full. Numbers such as 0, 1, 12, 345 and 2048
stand in it, and signs: commas, colons; brackets (these), [these] and {these}, quotes "like this" and 'like this', a
question? An answer! Programs also have names such as hidden_states, layer_ids, max_tokens and token_ids, and lines
like "for sample in run: print(sample.key, sample.shape)". This text has one use: the tokenizer splits it into pieces,
the same pieces on every machine and in every version. The quick brown fox jumps over the lazy dog, while the
five boxing wizards jump quickly. Once upon a time there was a small model that lived in the memory of a big machine.
It had four layers, two heads and sixty-four channels, and it knew nothing at all, since its weights were random.
It was useful for tests: a program that reads its hidden states must find the same values each time.
"""


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

    ``dtype``: torch's name. ``vocab``: at least 320; the tokenizer has the first 689 at most. ``spread``: standard
    deviation of the weights. The same arguments give the same weights.
    """
    if vocab < 320:
        raise ValueError(f"expected vocab >= 320 (256 bytes, special tokens, some merges), got {vocab}")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(path, vocab, max_positions)
    config = LlamaConfig(
        vocab_size=vocab,
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
    tokenizer.train_from_iterator([_TEXT], trainer)
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
