"""Engines that the connector refuses at the start, from vLLM's configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from hsx_dist.connector.connector import HiddenStatesConnector
from hsx_dist.connector.engine_checks import check_engine
from hsx_dist.errors import ConfigError
from tests.unit.vllm_patches.engine_config import engine_config


@pytest.fixture(scope="module")
def config(tiny_model_path: Path) -> Any:
    return engine_config(tiny_model_path, (0, 4))


def with_layers(config: Any, ids: list[int] | None) -> Any:
    """``config`` with other layer ids."""
    hf = SimpleNamespace(eagle_aux_hidden_state_layer_ids=ids)
    spec = SimpleNamespace(method="extract_hidden_states", draft_model_config=SimpleNamespace(hf_config=hf))
    return SimpleNamespace(
        speculative_config=spec,
        model_config=config.model_config,
        device_config=config.device_config,
        additional_config={},
    )


def test_layer_ids_are_in_the_engines_order_which_sorts(config):
    assert check_engine(config) == (0, 4)
    assert check_engine(with_layers(config, [3, 0, 2])) == (0, 2, 3)


@pytest.mark.parametrize("ids", [[99], [1, 5], [-1, 2], [2, 2], [], None])
def test_layers_that_the_model_does_not_have_are_refused(config, ids):
    with pytest.raises(ConfigError, match=r"expected different layer ids from 0 to 4 .*, got \[") as e:
        check_engine(with_layers(config, ids))
    assert str(ids or []) in str(e.value)


def test_a_pooling_engine_is_refused(tiny_model_path):
    with pytest.raises(ConfigError, match="runner: expected 'generate', got 'pooling'"):
        check_engine(engine_config(tiny_model_path, (0, 4), runner="pooling", convert="embed"))


@pytest.mark.parametrize("device", ["xpu", "tpu", ""])
def test_a_device_without_a_copy_path_is_refused(config, device):
    other = with_layers(config, [1])
    other.device_config = SimpleNamespace(device_type=device)
    with pytest.raises(ConfigError, match=f"device: expected one of cpu, cuda, got '{device}'"):
        check_engine(other)


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_an_engine_without_the_method_is_refused(config, method):
    other = with_layers(config, [1])
    other.speculative_config = method and SimpleNamespace(method=method)
    with pytest.raises(ConfigError, match=f"'extract_hidden_states', .*got {method and 'method .eagle3.'}".lower()):
        check_engine(other)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("cpu", [False, True])
def test_the_v1_runner_never_gets_drafts_on_any_device(config, monkeypatch, v2, cpu):
    from vllm.platforms import current_platform

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2)))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: cpu)
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=8), None)
    ours = SimpleNamespace(_scheduler=SimpleNamespace(new_request=lambda _: None), _vllm_config=config, _layer_ids=(1,))
    HiddenStatesConnector.on_new_request(ours, request)
    request.spec_token_ids = [4]
    assert request.spec_token_ids == ([4] if v2 else [])
