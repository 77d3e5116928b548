"""The end of a model, from its own weights: the final norm and the head. Nothing else of it is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.exporting.model_ends import end_rule
from hsx_dist.format.json_objects import Check, anything, check_members, object_of, or_null, parse_object, shown, text
from hsx_dist.isa import avoid_broken_amx
from hsx_dist.models.builtin import SMOLLM2, resolve_model
from hsx_dist.reading.run import Run

#: An id of the Hugging Face hub, ``name`` or ``org/name``: no path and no URL.
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
_WEIGHTS = ".safetensors"
_NORM = ("model.norm.weight", "model.language_model.norm.weight", "language_model.model.norm.weight")
_HEAD = ("lm_head.weight", "language_model.lm_head.weight")
_EMBED = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
#: Of ``config.json`` and of the weights' index, which has an entry for each of a mixture's experts.
_JSON_BYTES, _JSON_VALUES = 64 << 20, 1_000_000
#: float32 logits that are held at once; with what is computed from them, a few times as much.
_LOGITS_BYTES = 256 << 20
_DTYPES = ("F64", "F32", "F16", "BF16")


def _positive(value: Any) -> str | None:
    """A ``Check``. Within the bounds a float32 logit divided or multiplied by the value is finite."""
    fine = type(value) in (int, float) and 1e-30 <= value <= 1e30
    return None if fine else "a number from 1e-30 to 1e30"


_MEMBERS: dict[str, Check] = {
    "model_type": text,
    "text_config": or_null(object_of(anything)),
    "rms_norm_eps": or_null(_positive),
    "logits_scaling": or_null(_positive),
    "final_logit_softcapping": or_null(_positive),
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

    def __init__(self, run: Run, model: str | None = None):
        self.model, self._folder = _named(model) if model else _stored(run)
        path = self._folder / "config.json"
        config = _read_json(path, _MEMBERS)
        config |= config.get("text_config") or {}
        check_members(config, _MEMBERS, str(path))
        self.eps = config.get("rms_norm_eps")
        if self.eps is None:
            raise ConfigError(f"{self.model}: expected a model with a final RMSNorm, its config has no rms_norm_eps")
        self._rule = rule = end_rule(self.model, config.get("model_type"))
        # Members that a family does not use may stand in its configuration all the same.
        scale = config.get("logits_scaling") or 1.0
        self._scale = {"unused": 1.0, "divides": 1 / scale, "multiplies": scale}[rule.scaling]
        softcap = None if rule.softcap == "unused" else rule.softcap
        self._softcap = config.get("final_logit_softcapping", softcap) if rule.softcap != "unused" else None
        self._files = _weight_files(self._folder)
        self._norm: Any = None
        self._head: Any = None

    def norm(self, states: Any) -> Any:
        """``states`` ``[…, H]`` after the final norm, same dtype; as transformers computes it."""
        import torch

        if self._norm is None:
            weight = self._tensor(states.shape[-1:], _NORM)
            self._norm = {"cast": weight, "float": weight.float(), "plus_one": weight.float() + 1}[self._rule.norm]
        x = states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self._rule.norm == "cast":
            return self._norm.to(states.dtype) * x.to(states.dtype)
        return (x * self._norm).to(states.dtype)

    def logprobs(self, states: Any) -> Iterator[Any]:
        """Log-probabilities of the next token from layer N's states ``[T, H]``: float32 ``[t, V]``, of as many
        positions at once as take ``_LOGITS_BYTES``."""
        import torch

        if self._head is None:
            avoid_broken_amx()
            self._head = self._tensor((None, states.shape[-1]), _HEAD, _EMBED)
        for part in states.split(max(_LOGITS_BYTES // (4 * len(self._head)), 1)):
            x = self.norm(part)
            logits = (x @ self._head.to(x.dtype).T).float() * self._scale
            if self._softcap:
                logits = torch.tanh(logits / self._softcap) * self._softcap
            yield torch.log_softmax(logits, -1)

    def _tensor(self, shape: tuple[int | None, ...], *groups: tuple[str, ...]) -> Any:
        """The first of the named tensors. ``shape``: None for any number."""
        for name in (name for group in groups for name in group):
            if name in self._files:
                path = self._folder / self._files[name]
                with _opened(path) as f:
                    there = f.get_slice(name)
                    found, dtype = there.get_shape(), there.get_dtype()
                    pairs = zip(found, shape, strict=False)
                    fits = len(found) == len(shape) and all(n and m in (n, None) for n, m in pairs)
                    if not fits or dtype not in _DTYPES:
                        wanted = ", ".join(str(n or "V") for n in shape)
                        raise ConfigError(
                            f"{path}: expected {name} of shape [{wanted}] and a dtype of {', '.join(_DTYPES)}, as the "
                            f"run's states need it, got {found} {dtype}. Name the run's model (--model)"
                        )
                    return f.get_tensor(name)
        raise ConfigError(
            f"{self.model}: expected one of the tensors {[n for g in groups for n in g]} in its safetensors files, "
            "found none; name a folder that has them (--model)"
        )


def _named(model: str) -> tuple[str, Path]:
    """The name and folder of the model that the caller named."""
    path = Path(resolve_model(model)).expanduser()
    return model, path if (path / "config.json").is_file() else _download(model, None)


def _stored(run: Run) -> tuple[str, Path]:
    """The name and folder of the run's model: the built-in one, or a repository of the hub.

    The run's author must not choose which of this machine's files are loaded.
    """
    meaning = run.info.get("meaning")
    meaning = meaning if isinstance(meaning, dict) else {}
    if meaning.get("model") == SMOLLM2:
        return SMOLLM2, Path(resolve_model(SMOLLM2))
    name = _plain(run, "model", meaning.get("model"), _HUB_ID)
    revision = _plain(run, "revision", meaning.get("revision") or "main", _REVISION)
    if Path(name).exists():
        raise ConfigError(
            f"{run.url}: expected an id of the Hugging Face hub as the run's model, got {name!r}, which is also a "
            f"path here. Name the one that you want (--model ./{name})"
        )
    return name, _download(name, revision)


def _plain(run: Run, what: str, value: Any, form: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not form.fullmatch(value) or ".." in value:
        raise ConfigError(
            f"{run.url}: expected an id of the Hugging Face hub as the run's {what}, got {str(value)[:100]!r}. Name "
            "the model's folder or id yourself (--model)"
        )
    return value


def _download(model: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as e:
        raise ConfigError(
            f"{model}: expected a folder with config.json, or a model of the Hugging Face hub; {type(e).__name__}: {e}"
        ) from e


def _read_json(path: Path, checks: Mapping[str, Check]) -> dict[str, Any]:
    """The JSON object in the file, its members checked."""
    try:
        with path.open("rb") as f:
            data = f.read(_JSON_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{path}: expected a file of the model, got {e.strerror}. Name another (--model)") from e
    if len(data) > _JSON_BYTES:
        raise FormatError(f"{path}: expected at most {_JSON_BYTES} bytes, got more. Name another model (--model)")
    # transformers writes Infinity into some configurations.
    found = parse_object(data, str(path), values=_JSON_VALUES, constants=True)
    check_members(found, checks, str(path))
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            yield f
    except (SafetensorError, OSError, UnicodeError) as e:
        raise FormatError(
            f"{str(path)!a}: expected a whole safetensors file with the tensors that its index names, got "
            f"{type(e).__name__}: {str(e)[:200]!a}. Download the model again"
        ) from e


def _weight_files(folder: Path) -> dict[str, str]:
    """Tensor → file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        found: dict[str, str] = _read_json(index, {"weight_map": object_of(text)}).get("weight_map", {})
        if wrong := [name for name in found.values() if Path(name).name != name or not name.endswith(_WEIGHTS)]:
            raise ConfigError(
                f"{index}: expected safetensors files next to it, got {shown(wrong[0])}. Use another model"
            )
        return found
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _opened(path) as f:
            names |= dict.fromkeys(f.keys(), path.name)
    return names
