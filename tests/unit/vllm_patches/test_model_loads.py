"""A loaded model gets taps once, a drafter gets none, and a model without taps is detected."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.model_loader import base_loader

from hsx_dist.errors import ConfigError
from hsx_dist.vllm_patches import model_loads


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    class Loader:
        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            return SimpleNamespace(name=f"{prefix}{model_config}", config=vllm_config)

    monkeypatch.setattr(base_loader, "BaseModelLoader", Loader)
    return Loader


def test_the_engines_own_model_is_tapped_once(loader: Any) -> None:
    tapped: list[Any] = []
    for _ in range(2):  # vLLM may call a plugin more than once
        model_loads.install(lambda model, config: tapped.append((model.name, config)))
    config = SimpleNamespace(model_config="model")
    loader().load_model(config, "model", prefix="the ")
    loader().load_model(vllm_config=config, model_config="draft")
    assert tapped == [("the model", config)]


def test_an_unknown_loader_is_reported(loader: Any, caplog: pytest.LogCaptureFixture) -> None:
    del loader.load_model
    model_loads.install(lambda *_: None)
    assert "taps cannot be installed" in caplog.text


def test_a_model_without_taps_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a model with taps, got none"):
        model_loads.taps_of(SimpleNamespace())
    assert model_loads.taps_of(SimpleNamespace(hsx_taps=1)) == 1


def test_this_vllm_has_the_method() -> None:
    assert callable(base_loader.BaseModelLoader.load_model)
