"""A model with little compute and large states, for benchmarks on CPUs: random weights, few layers, hidden size 2048.

A CPU core computes thousands of times less than a GPU, but copies only several times less. With a real model the cost
of the data path would be invisible on a CPU. So the bytes of states per second of compute must match a GPU's:

- Qwen3-4B on an A100 does 25,451 tokens/s of prefill (arXiv 2605.11093). At 8 GFLOP a token that is 204 TFLOP/s.
- An 8B model needs 16 GFLOP a token, so it would do 12,700 tokens/s. Four layers of 4096 bf16 are 32 KiB a token. That
  is 0.42 GB for each second of compute.
- A machine with eight such GPUs has 96 to 128 cores. With two writer cores for each GPU, a core gets 0.21 GB/s.

The thin model makes 0.2 to 0.45 GB/s on one core. The benchmark reports the measured rate.
"""

from __future__ import annotations

from pathlib import Path

HIDDEN = 2048
LAYERS = 4
#: Captured states: the embeddings, and the output of every layer.
CAPTURED = tuple(range(LAYERS + 1))
VOCAB = 512
MAX_TOKENS = 4096


def thin_model(path: Path) -> Path:
    """Write a random ``LlamaForCausalLM`` in bf16, 0.3 M parameters a layer, to ``path`` unless it exists.

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
