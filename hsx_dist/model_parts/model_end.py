"""A model's final norm and head. No other weights of the model are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.format.json_objects import MemberCheck, or_null
from hsx_dist.isa import avoid_amx
from hsx_dist.model_parts.config_numbers import positive
from hsx_dist.model_parts.end_rules import end_rule
from hsx_dist.model_parts.model_files import ModelFiles
from hsx_dist.reading.run import Run

_NORM = ("model.norm.weight", "model.language_model.norm.weight", "language_model.model.norm.weight")
_HEAD = ("lm_head.weight", "language_model.lm_head.weight")
_EMBED = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
#: Bytes of float32 logits in memory at once. Results computed from them take as much again.
_LOGITS_BYTES = 64 << 20
#: Bytes of the head that are converted to another dtype at once.
_HEAD_BYTES = 64 << 20
_MEMBERS: dict[str, MemberCheck] = {
    "logits_scaling": or_null(positive),
    "final_logit_softcapping": or_null(positive),
}


class ModelEnd:
    """Final RMSNorm and ``lm_head`` of a model in Hugging Face's format, on the CPU.

    Reads only ``config.json``, the weights' index and safetensors files: no pickle, and no code of the model.

    Args:
        run: its ``run.json`` names the default model and revision.
        model: a folder or id instead of the run's.
        num_layers: the number of layers that the model must have, if its configuration says it.

    Raises:
        ConfigError: the run's model is no id of the hub; the weights cannot be loaded; ``END_RULES`` lacks the model's
            type; the last norm is no RMSNorm. Or the model has another number of layers.
        FormatError: a file of the model is damaged.
    """

    def __init__(self, run: Run | None, model: str | None = None, num_layers: int | None = None):
        self.files = ModelFiles(run, model, _MEMBERS)
        self.model = self.files.model
        config = self.files.config
        layers = config.get("num_hidden_layers")
        if None not in (num_layers, layers) and layers != num_layers:
            raise ConfigError(
                f"{self.model}: expected a model of {num_layers} layers, as the run's, got one of {layers}. Name the "
                "run's model (--model), or correct num_layers (--num-layers)"
            )
        self.eps = config.get("rms_norm_eps")
        if self.eps is None:
            raise ConfigError(f"{self.model}: expected rms_norm_eps in its config.json, got none. Name another model")
        self._rule = rule = end_rule(self.model, config.get("model_type"))
        # A configuration may have members that its family does not use.
        scale = config.get("logits_scaling") or 1.0
        self._scale = {"unused": 1.0, "divides": 1 / scale, "multiplies": scale}[rule.scaling]
        softcap = None if rule.softcap == "unused" else rule.softcap
        self._softcap = config.get("final_logit_softcapping", softcap) if rule.softcap != "unused" else None
        self._norm: Any = None
        self._head: Any = None

    def norm(self, states: Any) -> Any:
        """Apply the final norm to ``states`` ``[…, H]`` as transformers does. Same dtype."""
        import torch

        if self._norm is None:
            weight = self.files.tensor(states.shape[-1:], *_NORM)
            self._norm = {"cast": weight, "float": weight.float(), "plus_one": weight.float() + 1}[self._rule.norm]
        x = states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self._rule.norm == "cast":
            return self._norm.to(states.dtype) * x.to(states.dtype)
        return (x * self._norm).to(states.dtype)

    def logits(self, states: Any, *, normed: bool = False) -> Iterator[Any]:
        """Yield logits float32 ``[t, V]`` of the next token from states ``[T, H]`` of the residual stream.

        Each block has at most ``_LOGITS_BYTES``. ``normed``: the final norm is already applied. The product is computed
        in the states' dtype.
        """
        head = self._loaded_head(states.shape[-1])
        for part in states.split(max(_LOGITS_BYTES // (4 * len(head)), 1)):
            yield self._scores(part if normed else self.norm(part), head)

    def top_k(self, states: Any, k: int, *, normed: bool = False) -> tuple[Any, Any]:
        """Return the ``k`` most likely next tokens of each position, the most likely first.

        Their ids are int64 ``[T, k]``; the natural logarithms of their probabilities among all tokens are float32
        ``[T, k]``. ``states``: see ``logits``.
        """
        import torch

        found = []
        for logits in self.logits(states, normed=normed):
            top = logits.topk(min(k, logits.shape[1]))
            found.append((top.indices, top.values - logits.logsumexp(-1, keepdim=True)))
        ids, values = zip(*found, strict=True)
        return torch.cat(ids), torch.cat(values)

    def _loaded_head(self, width: int) -> Any:
        if self._head is None:
            avoid_amx()
            # A head under another name, such as a quantized one, must not be replaced by the embeddings.
            tied = self.files.config.get("tie_word_embeddings") is not False
            self._head = self.files.tensor((None, width), *_HEAD, *(_EMBED if tied else ()))
        return self._head

    def _scores(self, x: Any, head: Any) -> Any:
        import torch

        logits = torch.empty(len(x), len(head), dtype=torch.float32)
        # A head of another dtype is converted in slices: a full copy may be larger than everything else in memory.
        rows = len(head) if head.dtype == x.dtype else max(_HEAD_BYTES // (4 * head.shape[1]), 1)
        for start in range(0, len(head), rows):
            logits[:, start : start + rows] = x @ head[start : start + rows].to(x.dtype).T
        logits *= self._scale
        return logits.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap else logits
