"""Captured states never change after the capture. Layer 0 is refused where that is not certain."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import SpeculativeConfig
from vllm.model_executor.models import interfaces
from vllm.model_executor.models.interfaces import EagleModelMixin

from hsx_dist.errors import ConfigError
from hsx_dist.vllm_patches import captures
from tests.unit.vllm_patches.engine_config import engine_config


@pytest.fixture(autouse=True)
def patched() -> None:
    """Apply the patch as the plugin does. It stays in the process."""
    captures.install()
    captures.install()


class Model(nn.Module, EagleModelMixin):
    """A model of one attention layer that captures like most vLLM models."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Identity()

    def forward(self, states: torch.Tensor) -> Any:
        return self._maybe_add_hidden_state([], 0, states, None)


class OwnCapture(Model):
    """A model that appends the tensor itself, as vLLM's DeepSeek V2 does."""

    def forward(self, states: torch.Tensor) -> Any:
        captured = []
        if 0 in self.aux_hidden_state_layers:
            captured.append(states)
        return captured


class NoCapture(nn.Module, EagleModelMixin):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Identity()


def made(kind: type, layers: tuple[int, ...] = (0, 1)) -> Any:
    model = kind()
    model._set_aux_hidden_state_layers(layers)
    return model


def check(model: Any, layers: tuple[int, ...] = (0, 1)) -> None:
    captures.check_layer_zero(layers, [model.attention], "some/model")


def test_embeddings_are_copied_and_sums_are_not():
    model = made(Model)
    embeddings = torch.ones(3, 4)
    captured = model._maybe_add_hidden_state([], 0, embeddings, None)
    captured = model._maybe_add_hidden_state(captured, 1, torch.ones(3, 4), embeddings)
    assert model._maybe_add_hidden_state(captured, 2, embeddings, embeddings) is captured  # not requested
    embeddings.add_(10)  # as a norm in place changes its residual
    assert [float(c[0, 0]) for c in captured] == [1, 2]


def test_a_model_that_captures_through_the_mixin_is_accepted():
    check(made(Model))


def test_a_model_that_sets_its_layers_without_the_mixin_is_accepted():
    """As vLLM's ``Qwen3_5ForCausalLM`` does."""
    model = Model()
    model.aux_hidden_state_layers = (0, 1)
    check(model)


@pytest.mark.parametrize(("kind", "where"), [(OwnCapture, "OwnCapture.forward"), (NoCapture, "NoCapture")])
def test_a_model_with_custom_capture_code_is_refused_for_layer_0_alone(kind, where):
    model = made(kind)
    with pytest.raises(ConfigError, match=rf"layer 0 of some/model: .*{kind.__name__}.*code in {where}.*layers from 1"):
        check(model)
    check(model, (1, 2))


def test_a_model_that_was_built_without_the_plugin_is_refused():
    """Other engines' models in the process do not count."""
    other = made(Model)
    with pytest.raises(ConfigError, match=r"built after the plugin of hsx_dist was loaded, got none\..*VLLM_PLUGINS"):
        check(Model())
    check(other)
    captures._models.discard(other)  # as if built before the patch
    with pytest.raises(ConfigError, match=r"got none\."):
        check(other)


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("llama:LlamaModel", None),
        ("qwen3_moe:Qwen3MoeModel", None),
        ("gpt_oss:GptOssModel", None),
        ("deepseek_v2:DeepseekV2Model", "DeepseekV2Model.forward"),
        ("qwen3_next:Qwen3NextModel", None),
    ],
)
def test_vllms_own_models(name: str, refused: str | None):
    module, _, cls = name.partition(":")
    model = getattr(__import__(f"vllm.model_executor.models.{module}", fromlist=[cls]), cls)
    assert captures._own_capture(model) == refused


@pytest.mark.parametrize(("inlined", "refused"), [(captures.__name__, False), (interfaces.__name__, True)])
def test_a_cached_graph_without_the_copy_is_refused(inlined: str, refused: bool):
    model = made(Model)
    sources = [SimpleNamespace(module="vllm.model_executor.models.llama"), SimpleNamespace(module=inlined)]
    model.aot_compiled_fn = SimpleNamespace(source_info=lambda: SimpleNamespace(inlined_sources=sources))
    if refused:
        with pytest.raises(ConfigError, match=r"cached without hsx_dist\. Set VLLM_DISABLE_COMPILE_CACHE=1"):
            check(model)
    else:
        check(model)


def test_dynamo_reports_the_copy_as_a_source_of_the_graph(tmp_path: Path):
    """The graph that the check of a compiled graph reads, from real ahead-of-time compilation by torch."""
    model = made(Model)
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True).aot_compile(((torch.ones(3, 4),), {}))
    model.aot_compiled_fn = compiled
    check(model)
    assert {s.module for s in compiled.source_info().inlined_sources} >= {captures.__name__, interfaces.__name__}


def test_the_key_of_the_compile_cache_says_that_captures_are_copied(tiny_model_path: Path, monkeypatch):
    from vllm.compilation.caching import aot_compile_hash_factors

    config = engine_config(tiny_model_path, (0, 4))
    patched = aot_compile_hash_factors(config)
    assert aot_compile_hash_factors(config) == patched
    with monkeypatch.context() as patch:
        patch.setattr(captures, "CACHE_KEY", "another")
        assert aot_compile_hash_factors(config) != patched
    monkeypatch.setattr(SpeculativeConfig, "compute_hash", SpeculativeConfig.compute_hash.__wrapped__)
    assert aot_compile_hash_factors(config) != patched


class Renamed:
    pass


class MadeOtherwise:
    _maybe_add_hidden_state = inspect.unwrap(EagleModelMixin._maybe_add_hidden_state)

    def __new__(cls) -> Any:
        return object.__new__(cls)


@pytest.mark.parametrize("Other", [Renamed, MadeOtherwise])
def test_a_vllm_whose_models_capture_in_another_way_is_warned_of(monkeypatch, caplog, Other):  # noqa: N803
    monkeypatch.setattr(interfaces, "EagleModelMixin", Other)
    before = dict(vars(Other))
    captures.install()
    assert "captures are not copied" in caplog.text
    assert dict(vars(Other)) == before


def test_the_package_loads_nothing_of_vllm():
    code = "import hsx_dist.vllm_patches.captures, sys; print({'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
