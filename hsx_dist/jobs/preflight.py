"""Checks before any engine starts: model, layers, versions, store."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hsx_dist
from hsx_dist.config import ExtractConfig, public_url
from hsx_dist.config.engine_arguments import engine_meaning, trusts_remote_code
from hsx_dist.config.secrets import hide_secrets
from hsx_dist.connector.versions import OLDEST as VLLM_OLDEST
from hsx_dist.connector.versions import TESTED as VLLM_TESTED
from hsx_dist.errors import ConfigError, StoreError, install_extra
from hsx_dist.jobs.capture import CapturedRows, captured_rows, column_bytes, token_bytes
from hsx_dist.logger import get_logger
from hsx_dist.models.builtin import resolve_model
from hsx_dist.models.weights import folder_weights, hub_commit
from hsx_dist.page import HIDDEN_STATES
from hsx_dist.regular_files import check_folder
from hsx_dist.store import Store, open_store
from hsx_dist.text import bounded
from hsx_dist.tokenizers import template_hash, tokenizer_hash

log = get_logger(__name__)

#: Versions that the tests have run with: [lowest, below).
TESTED = {
    "vllm": ("{}.{}".format(*VLLM_TESTED[0]), f"{VLLM_TESTED[1][0]}.{VLLM_TESTED[1][1] + 1}"),
    "ray": ("2.60", "2.61"),
}
#: Tokens of a cache block without ``block_size`` in ``engine_kwargs``: vLLM's default on CPU, its largest default.
BLOCK_TOKENS = 128
#: Older versions lack functions that the connector (``connector/versions.py``) or jobs need.
LOWEST = {"vllm": "{}.{}".format(*VLLM_OLDEST), "ray": "2.55"}


@dataclass(frozen=True)
class Model:
    """Facts about the model, from its configuration."""

    path: str
    rows: Mapping[str, CapturedRows]  # captured layers, by point
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str  # of the states, as vLLM will choose it: bfloat16, float16 or float32
    max_tokens: int
    tokenizer_sha256: str
    #: SHA-256 of the template that renders chats. None if there is none.
    chat_template_sha256: str | None = None
    #: Hash (``models.weights.folder_weights``) of the model's folder and of folders in engine arguments, by path. A
    #: model of the hub has none: its revision is a commit.
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> str | None:
        """Hash of the model's folder. None for a model of the hub."""
        return self.files.get(self.path)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the states."""
        return 4 if self.dtype == "float32" else 2

    @property
    def token_bytes(self) -> int:
        """Raw bytes of one token's captured states."""
        return token_bytes(self.rows)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer ids of the captured hidden states."""
        found = self.rows.get(HIDDEN_STATES)
        return () if found is None else found.layers


def installed(package: str) -> str:
    """The installed version of vLLM or Ray. For "vllm" also of vLLM's CPU build.

    Raises:
        ConfigError: it is not installed.
    """
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ConfigError(f"expected the package {package}, got none. {install_extra(package)}")


def check_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return versions by package. Logs a warning for a version outside of the tested range.

    Raises:
        ConfigError: a package is missing, or known not to work.
    """
    found = {package: installed(package) for package in packages}
    from packaging.version import Version  # comes with either of them

    for package in packages:
        have = Version(found[package])
        low, below = TESTED[package]
        if have < Version(LOWEST[package]):
            raise ConfigError(
                f"expected {package} >= {LOWEST[package]}, got {have}. Upgrade it (tested: {low} up to {below})"
            )
        if not Version(low) <= have < Version(below):
            log.warning("%s %s is outside of the tested range (%s up to %s)", package, have, low, below)
    return found


def check_engine_arguments(config: ExtractConfig) -> None:
    """Check the names of ``engine_kwargs``, before a run is stored with them.

    The names are read from vLLM's source: its import takes seconds, and chooses a device.

    Raises:
        ConfigError: vLLM has no such argument.
    """
    known = engine_argument_names()
    unknown = sorted(set(config.engine_kwargs) - known) if known else []
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        raise ConfigError(
            f"engine_kwargs: expected arguments of vLLM's EngineArgs, got {hide_secrets(unknown[0])!r}. "
            + (f"Did you mean {near[0]}?" if near else "Correct or remove it")
        )


def engine_argument_names() -> set[str]:
    """The fields of vLLM's ``EngineArgs``. Empty if its source is missing or has another form."""
    spec = importlib.util.find_spec("vllm")
    try:
        source = Path(str(spec and spec.origin)).with_name("engine").joinpath("arg_utils.py").read_text("utf-8")
    except OSError:
        return set()
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (field.target for found in classes for field in found.body if isinstance(field, ast.AnnAssign))
    return {target.id for target in fields if isinstance(target, ast.Name)}


def pin_revision(config: ExtractConfig) -> ExtractConfig:
    """Replace the revisions of model and tokenizer by their commits, so that all replicas load the same files.

    A branch of the hub may move. Folders have no revision.

    Raises:
        ConfigError: there is no such model or tokenizer.
    """
    from hsx_dist.inputs.encode import load_tokenizer

    path, kwargs = resolve_model(config.model), config.engine_kwargs
    if not Path(path).is_dir():
        _load_config(config, path)
        if commit := hub_commit(path, config.revision):
            config = config.model_copy(update={"revision": commit})
    tokenizer = kwargs.get("tokenizer")
    if isinstance(tokenizer, str) and not Path(tokenizer).is_dir():
        load_tokenizer(path, revision=config.revision, engine_kwargs=kwargs)
        if commit := hub_commit(tokenizer, kwargs.get("tokenizer_revision"), "tokenizer_config.json"):
            config = config.model_copy(update={"engine_kwargs": {**kwargs, "tokenizer_revision": commit}})
    return config


def argument_folders(config: ExtractConfig) -> dict[str, str]:
    """The engine arguments that name a folder with files of the model, such as ``tokenizer``: name to folder."""
    given = engine_meaning(config.engine_kwargs).items()
    return {name: value for name, value in given if isinstance(value, str) and Path(value).is_dir()}


def examine_model(config: ExtractConfig) -> Model:
    """Read the model's configuration and tokenizer. Loads no weights.

    Raises:
        ConfigError: there is no such model, a layer id is wrong, or a page or segment cannot hold a token.
    """
    from hsx_dist.inputs.encode import load_tokenizer

    path = resolve_model(config.model)
    root = _load_config(config, path)
    text = root.get_text_config()
    dtype = state_dtype(config, root)
    rows = captured_rows(config, text, dtype)
    limit = whole_number(config, "max_model_len", text.max_position_embeddings)
    tokenizer = load_tokenizer(path, revision=config.revision, engine_kwargs=config.engine_kwargs)
    load_format = config.engine_kwargs.get("load_format", "auto")
    model = Model(
        path=path,
        rows=rows,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        dtype=dtype,
        max_tokens=limit - 1,  # vLLM refuses a prompt of max_model_len: there would be no room for an answer
        tokenizer_sha256=tokenizer_hash(tokenizer),
        chat_template_sha256=template_hash(tokenizer),
        files={
            folder: found
            for folder in (path, *argument_folders(config).values())
            if (found := folder_weights(folder, load_format if folder == path else "auto"))
        },
    )
    ranks = whole_number(config, "tensor_parallel_size", 1)
    block = whole_number(config, "block_size", BLOCK_TOKENS) * column_bytes(rows, ranks)
    layers = max(len(r.layers) for r in rows.values())
    if config.layout == "part" and block > config.segment_bytes:
        raise ConfigError(
            f"segment_bytes: expected at least one cache block of {layers} layers ({block} bytes), got "
            f"{int(config.segment_bytes)}. Raise segment_bytes, part_bytes and in_flight_bytes, or capture fewer layers"
        )
    if block > config.in_flight_bytes:
        raise ConfigError(
            f"in_flight_bytes: expected at least one cache block of {layers} layers ({block} bytes), got "
            f"{int(config.in_flight_bytes)}. Raise in_flight_bytes"
        )
    return model


def load_text_config(config: ExtractConfig, path: str) -> Any:
    """The Hugging Face configuration of the model's decoder.

    Raises:
        ConfigError: there is no such model.
    """
    return _load_config(config, path).get_text_config()


def _load_config(config: ExtractConfig, path: str) -> Any:
    from transformers import AutoConfig

    trust = trusts_remote_code(config.engine_kwargs)
    if not Path(path).exists():
        _check_id(path, config.revision)
    check_folder(path)
    try:
        return AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=trust)
    except (OSError, ValueError) as e:
        why = bounded(public_url((str(e).splitlines() or [""])[0]), 200)
        raise ConfigError(
            f"model: expected a Hugging Face id or a folder with a config.json, got {config.model!r}: {why} Check the "
            "name, the access to the hub, or give a folder"
        ) from None


def _check_id(model: str, revision: str | None) -> None:
    """Log that the hub is asked next: for a wrong id, its client retries for half a minute.

    Raises:
        ConfigError: ``model`` cannot be an id.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        raise ConfigError(
            f"model: expected a Hugging Face id or a folder with a config.json, got {public_url(model)!r}, which does "
            "not exist. Check the path"
        ) from None
    if hub_commit(model, revision) is None:
        log.warning("%s is neither a folder nor in Hugging Face's cache: looking it up on the hub", model)


def state_dtype(config: ExtractConfig, model: Any) -> str:
    """The dtype in which vLLM will compute: the configured one, else the checkpoint's. Like vLLM, takes bfloat16 for a
    float32 checkpoint. ``model``: its configuration. A replica refuses to start if vLLM chose another one."""
    asked = str(config.engine_kwargs.get("dtype", "auto")).removeprefix("torch.")
    asked = {"half": "float16", "float": "float32"}.get(asked, asked)
    if asked in ("float32", "float16", "bfloat16"):
        return asked
    parts = (model, model.get_text_config(), getattr(model, "vision_config", None))  # in vLLM's order
    stored = next((str(dtype).removeprefix("torch.") for part in parts if (dtype := getattr(part, "dtype", None))), "")
    return "float16" if stored == "float16" else "bfloat16"


def whole_number(config: ExtractConfig, name: str, default: int) -> int:
    """A number from ``engine_kwargs``. ``default`` if it is absent or leaves the choice to vLLM (-1, "auto").

    Raises:
        ConfigError: it is no whole number from 1 on.
    """
    value = config.engine_kwargs.get(name)
    if value in (None, -1, "-1", "auto"):
        return default
    if isinstance(value, bool) or not isinstance(value, (int, str)) or not str(value).isdecimal() or int(value) < 1:
        raise ConfigError(f"engine_kwargs.{name}: expected a whole number from 1 on, got {value!r}. Set one")
    return int(value)


def captured_note(model: Model) -> str:
    """The captured points and layers, for display."""
    if model.rows.keys() == {HIDDEN_STATES}:
        return f"layers {list(model.layers)} of 0…{model.num_layers}"
    return "points " + ", ".join(f"{name} {_ranges(rows.layers)}" for name, rows in model.rows.items())


def _ranges(layers: tuple[int, ...]) -> str:
    """``[0-29]`` for thirty consecutive layers, ``[2, 15-17]``."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return f"[{', '.join(str(a) if a == b else f'{a}-{b}' for a, b in found)}]"


def partial_note(select: str) -> str:
    """A warning for runs that store a part of each row's tokens."""
    return (
        f"select={select} keeps a part of each row's tokens. A trainer of draft models (EAGLE and similar) attends to "
        "the states of the whole context: it needs select=all, and selects tokens with the loss mask"
    )


def open_output(config: ExtractConfig) -> Store:
    """Open the output's store, and check it by writing, reading and deleting a small object.

    Raises:
        ConfigError: the store cannot be reached, or refuses to write. The message has the store's reason.
    """
    try:
        patient = config.store.retry_seconds
        where: dict[str, Any] = {"storage_options": config.store.storage_options, "backend": config.store.backend}
        name = f"probe-{uuid.uuid4().hex}"
        open_store(config.output, **where, retry_seconds=min(patient, 10.0)).put(name, [b"hsx"])
        # This store object has used the folder: later it takes no other folder for it.
        store = open_store(config.output, **where, retry_seconds=patient)
        if store.get(name) != b"hsx":
            raise StoreError(f"{store.url}: expected the bytes that were written, got others. Use another store")
        store.delete(name)
        return store
    except StoreError as e:
        raise ConfigError(f"output: {e}") from e


def about(config: ExtractConfig, model: Model, versions: dict[str, str]) -> dict[str, Any]:
    """The origin that every part states. Layer id k is the stream that enters layer k; layer N is the last output,
    before the final norm."""
    return {
        "model": public_url(config.model),
        "revision": config.revision,
        **({} if model.weights is None else {"weights": model.weights}),
        "tokenizer_sha256": model.tokenizer_sha256,
        "num_hidden_layers": model.num_layers,
        "norm": "pre",
        "hsx": hsx_dist.__version__,
        **versions,
    }
