"""Every configuration that the repository ships can be loaded, and its small claims hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsx_dist.config import load_config
from hsx_dist.layers import resolve_layers

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_it_loads(path: Path) -> None:
    load_config(str(path))


def test_the_demo() -> None:
    config = load_config(str(CONFIGS / "demo.yaml"))
    assert resolve_layers(config.layers, 30) == (2, 15, 27, 30)
    assert config.segment_bytes >= 4 * 576 * 2 * config.engine_kwargs["max_model_len"]
    assert config.max_replicas == 2
