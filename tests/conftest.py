"""What tests share: models and servers are made once a session, and only when a test asks for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read by vLLM when it is imported: small caches (GiB), few lines.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Nothing here may ask a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in bf16, from the user's cache."""
    from hsx_dist.testing.models import smollm2

    return smollm2()


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers, hidden size 64, two heads, 512 positions, in float32."""
    from hsx_dist.testing.models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", kv_heads=2)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A real S3 server (SeaweedFS) on loopback, with the bucket ``hsx``."""
    from hsx_dist.testing.servers import seaweedfs

    with seaweedfs(tmp_path_factory.mktemp("s3")) as server:
        yield server
