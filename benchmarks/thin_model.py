"""A model that computes little and shows much: random weights, few layers, hidden size 2048.

A CPU core computes thousands of times less than a GPU, and copies only several times less: with a real model nothing of
the data path would be seen on it. What must match is what reaches the host while one second is computed. By the one
published figure that we know (Qwen3-4B on an A100: 25,451 tokens/s of prefill, arXiv 2605.11093) a GPU does 204 TFLOP/s
there (8 GFLOP a token), and an 8B model (16 GFLOP) 12,700 tokens/s; four layers of 4096 bf16 are 32 KiB a token:
0.42 GB a second of compute. A machine with eight such GPUs has 96 to 128 cores, of which two a GPU for writers are
little: 0.21 GB/s a writer's core. The thin model's layers are so small that one core makes between the two of them
(0.2 to 0.45 GB/s was seen); the benchmark reports what it really was.
"""

from __future__ import annotations

from pathlib import Path

HIDDEN = 2048
LAYERS = 4
#: What is captured: the embeddings, and what every layer puts out.
CAPTURED = tuple(range(LAYERS + 1))
VOCAB = 512
MAX_TOKENS = 4096


def thin_model(path: Path) -> Path:
    """Write the model to ``path`` unless it is there: a random ``LlamaForCausalLM`` in bf16, 0.3 M parameters a layer.

    It has no tokenizer: prompts are token ids.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (path / "config.json").exists():
        return path
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.2,  # the usual 0.02 leaves every layer's output almost equal to its input
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path
