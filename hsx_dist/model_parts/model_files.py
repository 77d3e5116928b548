"""``config.json`` and single tensors of a model's folder or Hugging Face repository. No pickle, and no model code.

A stored run must not choose which local files are loaded, so it may name only the built-in model or an id of the hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.format.description import described_layers
from hsx_dist.format.json_objects import (
    MemberCheck,
    anything,
    check_members,
    object_of,
    or_null,
    parse_object,
    shown,
    text,
)
from hsx_dist.home import with_home
from hsx_dist.logger import get_logger
from hsx_dist.model_parts.config_numbers import count, positive
from hsx_dist.models.builtin import SMOLLM2, resolve_model
from hsx_dist.models.weights import folder_weights
from hsx_dist.reading.arguments import path_text
from hsx_dist.reading.run import Run
from hsx_dist.reading.sample import Sample
from hsx_dist.regular_files import open_regular
from hsx_dist.text import head

log = get_logger(__name__)

#: An id of the Hugging Face hub, ``name`` or ``org/name``. Matches no path and no URL.
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = ".safetensors"
#: Limit of ``config.json`` and of the weights' index, which has an entry for each expert of a mixture.
_JSON_BYTES, _JSON_VALUES = 64 << 20, 1_000_000
_MEMBERS: dict[str, MemberCheck] = {
    "model_type": text,
    "text_config": or_null(object_of(anything)),
    "num_hidden_layers": or_null(count),
    "rms_norm_eps": or_null(positive),
}
#: Engine arguments that override values of the model's configuration files.
_CHANGES = {"hf_overrides", "hf_config_path", "rope_scaling", "rope_theta", "rope_parameters"}
_DTYPES = ("F64", "F32", "F16", "BF16")


class ModelFiles:
    """``config.json`` and the safetensors files of a model in Hugging Face's format.

    From the hub, the JSON files are downloaded first, and then only the weight files that contain a requested tensor.

    Attributes:
        model: the model's name, as given by ``model`` or the run.
        revision: the commit of a hub's model. Of a folder, the hash of its files (``models.weights.folder_weights``).
        config: the language model's configuration. Members of ``text_config``, if any, override the others.

    Args:
        run: its ``run.json`` names the default model and revision.
        model: a folder or id instead of the run's.
        members: checks of the configuration's members that the caller uses.

    Raises:
        ConfigError: the run's model is no id of the hub; the model does not exist.
        FormatError: its configuration is damaged.
    """

    def __init__(self, run: Run | None, model: str | None, members: Mapping[str, MemberCheck]) -> None:
        self.revision: str | None = None
        self._from_hub = False
        self.model, self._folder = self._named(model) if model or run is None else self._stored(run)
        members = {**_MEMBERS, **members}
        path = self._folder / "config.json"
        self.config = _read_json(path, members)
        self.config |= self.config.get("text_config") or {}
        check_members(self.config, members, str(path))
        self._files: dict[str, str] | None = None
        if not self._from_hub:
            self.revision = folder_weights(str(self._folder))
            stored = None if run is None else _meaning(run).get("weights")
            if stored not in (None, self.revision):
                log.warning("%s: its files differ from those of the model of %s", self.model, run and run.url)

    def tensor(self, shape: tuple[int | None, ...], *names: str) -> Any:
        """Load the first of the named tensors that the model has, to the CPU, in the file's dtype.

        Args:
            shape: the expected shape; None for any size.

        Raises:
            ConfigError: the model has none of the tensors; the tensor has another shape or is quantised.
            FormatError: its file is damaged.
        """
        if self._files is None:
            self._files = self._weight_files()
        name = next((name for name in names if name in self._files), None)
        if name is None:
            raise ConfigError(
                f"{self.model}: expected one of the tensors {list(names)} in its safetensors files, "
                "got none. Name a folder that has them (--model)"
            )
        path = self._file(self._files[name])
        with _opened(path) as f:
            there = f.get_slice(name)
            found, dtype = there.get_shape(), there.get_dtype()
            fits = len(found) == len(shape) and all(n and m in (n, None) for n, m in zip(found, shape, strict=False))
            if not fits or dtype not in _DTYPES:
                wanted = ", ".join(str(n or "V") for n in shape)
                raise ConfigError(
                    f"{path}: expected {name} of shape [{wanted}] and a dtype of {', '.join(_DTYPES)}, as the "
                    f"run's states need it, got {found} {dtype}. Name the run's model (--model)"
                )
            return f.get_tensor(name)

    def num_layers_of(self, sample: Sample) -> int | None:
        """Return the model's number of layers, or None if its configuration lacks it.

        Raises:
            ConfigError: the sample is of a model with another number of layers.
        """
        model, of_sample = self.config.get("num_hidden_layers"), described_layers(sample.about)
        if of_sample is not None and model is not None and of_sample != model:
            raise ConfigError(
                f"sample {head(sample.key, 80)!a}: expected one of {self.model}, which has {model} layers, got one of "
                f"a model with {of_sample}. Name the sample's model"
            )
        return model

    def _weight_files(self) -> dict[str, str]:
        """Return each tensor's file."""
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            found: dict[str, str] = _read_json(index, {"weight_map": object_of(text)}).get("weight_map", {})
            if wrong := [name for name in found.values() if Path(name).name != name or not name.endswith(_WEIGHTS)]:
                raise ConfigError(
                    f"{index}: expected safetensors files next to it, got {shown(wrong[0])}. Use another model"
                )
            return found
        if self._from_hub:
            self._folder = self._download(f"*{_WEIGHTS}")
        names: dict[str, str] = {}
        for path in sorted(self._folder.glob(f"*{_WEIGHTS}")):
            with _opened(path) as f:
                names |= dict.fromkeys(f.keys(), path.name)
        return names

    def _file(self, name: str) -> Path:
        if self._from_hub and not (self._folder / name).is_file():
            return self._download(name) / name
        return self._folder / name

    def _named(self, model: str | None) -> tuple[str, Path]:
        """Return the name and folder of the model that the caller named."""
        if not model:
            raise ConfigError("model: expected a folder or an id of the Hugging Face hub, got none. Name one")
        path = with_home(resolve_model(path_text("model", model)))
        return model, path if (path / "config.json").is_file() else self._hub(model, None)

    def _stored(self, run: Run) -> tuple[str, Path]:
        """Return the name and folder of the run's model: the built-in model, or a repository of the hub."""
        require_own_configuration(run)
        if is_builtin(run):
            return SMOLLM2, Path(resolve_model(SMOLLM2))
        meaning = _meaning(run)
        name = _plain(run, "model", meaning.get("model"), _HUB_ID)
        revision = _plain(run, "revision", meaning.get("revision") or "main", _REVISION)
        if Path(name).exists():
            raise ConfigError(
                f"{run.url}: expected an id of the Hugging Face hub as the run's model, got {name!r}, which is also a "
                f"path here. Name the folder (--model ./{name}), or rename it"
            )
        return name, self._hub(name, revision)

    def _hub(self, model: str, revision: str | None) -> Path:
        self.model, self.revision, self._from_hub = model, revision, True
        folder = self._download("*.json")
        if _COMMIT.fullmatch(folder.name):  # the weights are loaded later, and a branch may move
            self.revision = folder.name
        return folder

    def _download(self, pattern: str) -> Path:
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(self.model, revision=self.revision, allow_patterns=[pattern]))
        except Exception as e:
            raise ConfigError(
                f"{self.model}: expected a folder with config.json, or a model of the Hugging Face hub, got "
                f"{type(e).__name__}: {e}. Check the name and the access to it"
            ) from e


def require_own_configuration(run: Run) -> None:
    """Raise ``ConfigError`` if the run's engine changed the model's configuration: norms and positions may differ."""
    engine = _meaning(run).get("engine_kwargs")
    if changed := sorted(_CHANGES & engine.keys()) if isinstance(engine, Mapping) else []:
        raise ConfigError(
            f"{run.url}: expected a run with its model's unchanged configuration, got engine_kwargs with "
            f"{', '.join(changed)}. Write the changes into a copy of its config.json, and name that folder"
        )


def is_builtin(run: Run) -> bool:
    """Whether the run's model is the built-in model."""
    return _meaning(run).get("model") == SMOLLM2


def _meaning(run: Run) -> dict[str, Any]:
    meaning = run.info.get("meaning")
    return meaning if isinstance(meaning, dict) else {}


def _plain(run: Run, what: str, value: Any, form: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not form.fullmatch(value) or ".." in value:
        raise ConfigError(
            f"{run.url}: expected an id of the Hugging Face hub as the run's {what}, got {head(str(value), 100)!r}. "
            "Name the model's folder or id yourself (--model)"
        )
    return value


def _read_json(path: Path, checks: Mapping[str, MemberCheck]) -> dict[str, Any]:
    """Load the JSON object in the file, and check its members."""
    try:
        with open(path, "rb", opener=open_regular) as f:
            data = f.read(_JSON_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{path}: expected the model's file, got {e.strerror}. Name another model (--model)") from e
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
        open(path, opener=open_regular).close()  # safetensors would wait for a FIFO
        with safe_open(path, "pt") as f:
            yield f
    except (SafetensorError, OSError, UnicodeError) as e:
        raise FormatError(
            f"{str(path)!a}: expected a whole safetensors file with the tensors that its index names, got "
            f"{type(e).__name__}: {head(str(e), 200)!a}. Download the model again"
        ) from e
