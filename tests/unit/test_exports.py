from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hsx_dist
from hsx_dist import errors

ROOT = Path(hsx_dist.__file__).parent.parent


@pytest.mark.parametrize("name", hsx_dist.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(hsx_dist, name) is not None
    assert name in dir(hsx_dist)


def test_every_error_is_public() -> None:
    classes = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.HsxError)}
    assert classes <= set(hsx_dist.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hsx_dist.nonsense


def test_the_version_is_the_packages() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == hsx_dist.__version__


@pytest.mark.parametrize(
    "code",
    [
        "import hsx_dist",
        "from hsx_dist import open_run, load_hidden_states, load_config, HsxError",
        "import hsx_dist.cli.app",
    ],
)
def test_reading_imports_nothing_heavy(code: str) -> None:
    heavy = "{'ray', 'vllm', 'torch', 'transformers'}"
    code += f"; import sys; heavy = {heavy} & set(sys.modules); sys.exit(f'imported: {{heavy}}' if heavy else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
