"""Final norm and scaling of the logits of each family of models. All are tested against transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsx_dist.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EndRule:
    """How a family computes its logits after the last layer.

    ``norm``: ``cast`` multiplies the states' dtype by the weight, ``float`` multiplies in float32, ``plus_one`` in
    float32 by the weight + 1. ``scaling``: what ``logits_scaling`` does. ``softcap``: the default of
    ``final_logit_softcapping``; ``unused``: the family ignores the member.
    """

    norm: Literal["cast", "float", "plus_one"] = "cast"
    scaling: Literal["unused", "divides", "multiplies"] = "unused"
    softcap: float | Literal["unused"] | None = "unused"


_CAST = (
    *("apertus", "arcee", "aria_text", "bitnet", "cwm", "deepseek_v2", "deepseek_v3", "diffllama", "doge", "dots1"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "jetmoe", "llama", "llama4_text", "mimo_v2_flash", "minimax", "minimax_m2"),
    *("ministral", "ministral3", "mistral", "mixtral", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("seed_oss", "smollm3", "solar_open"),
)
_FLOAT = ("afmoe", "flex_olmo", "gpt_oss", "helium", "olmo2", "olmo3", "olmo_hybrid")
_PLUS_ONE = ("gemma", "minimax_m3_vl_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_GRANITE = ("granite", "granitemoe", "granitemoehybrid", "granitemoeshared")

#: ``model_type`` of the language model → its rule. A test holds each against the classes of transformers.
END_RULES: dict[str, EndRule] = {
    **dict.fromkeys(_CAST, EndRule()),
    **dict.fromkeys(_FLOAT, EndRule("float")),
    **dict.fromkeys(_PLUS_ONE, EndRule("plus_one")),
    **dict.fromkeys(_GRANITE, EndRule(scaling="divides")),
    "hyperclovax": EndRule(scaling="multiplies"),
    "gemma2": EndRule("plus_one", softcap=30.0),
    "vaultgemma": EndRule("plus_one", softcap=30.0),
    "gemma3_text": EndRule("plus_one", softcap=None),
    "gemma4_text": EndRule("float", softcap=None),
}


def end_rule(model: str, model_type: str | None) -> EndRule:
    """Return the rule of ``model_type``. ``model``: the model's name, for the error.

    Raises:
        ConfigError: the type is unknown. Norms and scalings differ: a wrong rule would give wrong states silently.
    """
    try:
        return END_RULES[model_type or ""]
    except KeyError:
        raise ConfigError(
            f"{model}: expected a language model whose final norm and logits hsx_dist computes, one of the types "
            f"{', '.join(sorted(END_RULES))}; got model_type {model_type!r:.100}. Export to vllm or speculators, which "
            "take the last state before the norm, and apply the model's own code"
        ) from None
