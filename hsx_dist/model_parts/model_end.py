"""The end of a model: its final norm and its head. Nothing else of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hsx_dist.errors import ConfigError
from hsx_dist.format.json_objects import MemberCheck, or_null
from hsx_dist.isa import avoid_broken_amx
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
#: float32 logits that are held at once; with what is computed from them, twice as much.
_LOGITS_BYTES = 64 << 20
#: Of the head that are converted to another dtype at once.
_HEAD_BYTES = 64 << 20
_MEMBERS: dict[str, MemberCheck] = {
    "logits_scaling": or_null(positive),
    "final_logit_softcapping": or_null(positive),
}


class ModelEnd:
    """Final RMSNorm and ``lm_head`` of a model in Hugging Face's format, on the CPU.

    Only ``config.json``, the weights' index and safetensors files are read: no pickle, and no code of the model.

    Args:
        run: its ``run.json`` names the model and the revision that are used without ``model``.
        model: a folder or id instead of the run's.

    Raises:
        ConfigError: the run's model is no id of the hub; the weights cannot be loaded; the model's type is not one of
            ``END_RULES``; the last norm is no RMSNorm.
        FormatError: a file of the model is damaged.
    """

    def __init__(self, run: Run | None, model: str | None = None):
        self.files = ModelFiles(run, model, _MEMBERS)
        self.model = self.files.model
        config = self.files.config
        self.eps = config.get("rms_norm_eps")
        if self.eps is None:
            raise ConfigError(f"{self.model}: expected a model with a final RMSNorm, its config has no rms_norm_eps")
        self._rule = rule = end_rule(self.model, config.get("model_type"))
        # Members that a family does not use may stand in its configuration all the same.
        scale = config.get("logits_scaling") or 1.0
        self._scale = {"unused": 1.0, "divides": 1 / scale, "multiplies": scale}[rule.scaling]
        softcap = None if rule.softcap == "unused" else rule.softcap
        self._softcap = config.get("final_logit_softcapping", softcap) if rule.softcap != "unused" else None
        self._norm: Any = None
        self._head: Any = None

    def norm(self, states: Any) -> Any:
        """``states`` ``[…, H]`` after the final norm, same dtype; as transformers computes it."""
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
        """Scores of the next token from states ``[T, H]`` of the residual stream: float32 ``[t, V]``, of as many
        positions at once as take ``_LOGITS_BYTES``.

        ``normed``: the states have the final norm already. The product is computed in the states' dtype.
        """
        head = self._loaded_head(states.shape[-1])
        for part in states.split(max(_LOGITS_BYTES // (4 * len(head)), 1)):
            yield self._scores(part if normed else self.norm(part), head)

    def top_k(self, states: Any, k: int, *, normed: bool = False) -> tuple[Any, Any]:
        """The ``k`` most likely next tokens of each position, the most likely first: ids int64 ``[T, k]``, and their
        natural logarithms of probabilities among all tokens, float32 ``[T, k]``. ``states``: as ``logits``'."""
        import torch

        found = []
        for logits in self.logits(states, normed=normed):
            top = logits.topk(min(k, logits.shape[1]))
            found.append((top.indices, top.values - logits.logsumexp(-1, keepdim=True)))
        ids, values = zip(*found, strict=True)
        return torch.cat(ids), torch.cat(values)

    def _loaded_head(self, width: int) -> Any:
        if self._head is None:
            avoid_broken_amx()
            self._head = self.files.tensor((None, width), *_HEAD, *_EMBED)
        return self._head

    def _scores(self, x: Any, head: Any) -> Any:
        import torch

        logits = torch.empty(len(x), len(head), dtype=torch.float32)
        # A head of another dtype is converted piece by piece: a copy of it may be larger than all else.
        rows = len(head) if head.dtype == x.dtype else max(_HEAD_BYTES // (4 * head.shape[1]), 1)
        for start in range(0, len(head), rows):
            logits[:, start : start + rows] = x @ head[start : start + rows].to(x.dtype).T
        logits *= self._scale
        return logits.div_(self._softcap).tanh_().mul_(self._softcap) if self._softcap else logits
