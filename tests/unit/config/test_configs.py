"""Every configuration in the repository can be loaded, and has the values that its comments promise."""

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


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("qwen3-8b-eagle3", 36, (2, 18, 33, 36)),
        ("llama-70b-tp4", 80, (2, 40, 77, 80)),
        ("all-layers", 30, (*range(31),)),
    ],
)
def test_layers_are_those_that_the_comments_say(name: str, layers: int, expected: tuple[int, ...]) -> None:
    assert resolve_layers(load_config(str(CONFIGS / f"{name}.yaml")).layers, layers) == expected


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "itemsize"),
    [("qwen3-8b-eagle3", 4, 4096, 2), ("llama-70b-tp4", 4, 8192, 2), ("all-layers", 31, 576, 4), ("s3", 4, 576, 2)],
)
def test_a_cache_block_fits_a_segment(name: str, layers: int, hidden: int, itemsize: int) -> None:
    assert load_config(str(CONFIGS / f"{name}.yaml")).segment_bytes >= 128 * layers * hidden * itemsize


def test_the_shipped_scenarios() -> None:
    names = {p.stem for p in CONFIGS.glob("*.yaml")}
    assert {"demo", "s3", "gcs", "qwen3-8b-eagle3", "llama-70b-tp4", "all-layers", "on-policy"} <= names
    assert load_config(str(CONFIGS / "on-policy.yaml")).include_output_tokens
    assert load_config(str(CONFIGS / "llama-70b-tp4.yaml")).engine_kwargs["tensor_parallel_size"] == 4
