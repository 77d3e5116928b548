"""``~`` is the home folder only where the user wrote it at the beginning of a path."""

from __future__ import annotations

import json
import pwd
from pathlib import Path
from typing import Any

import pytest

import hsx_dist
from hsx_dist.config import InputConfig, absolute_path
from hsx_dist.config.loading import read_yaml
from hsx_dist.errors import ConfigError
from hsx_dist.home import with_home
from hsx_dist.inputs.rows import read_rows
from hsx_dist.jobs import decode
from hsx_dist.model_parts.model_files import ModelFiles
from hsx_dist.models.builtin import cache_folder
from hsx_dist.store.opening import open_store
from hsx_dist.store.within import open_within


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder. The working folder is another one, and has a folder ``~`` too."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "work" / "~").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.mark.parametrize("name", ["./~/x", "./~", "~unknown-user.jsonl", "~old/x", "a/~/x", "././~root/x"])
def test_a_name_stays_a_name(home: Path, name: str) -> None:
    assert with_home(name) == Path(name)
    assert not with_home(name).is_absolute()


def test_home_folders_are_expanded(home: Path) -> None:
    assert with_home("~") == home
    assert with_home("~/a/~") == home / "a/~"
    assert with_home(Path("~/a")) == home / "a"
    assert with_home("~root/a") == Path(pwd.getpwnam("root").pw_dir) / "a"


@pytest.mark.parametrize("path", ["~", "~/x"])
def test_a_user_without_home_is_an_error(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Containers run as users that the machine does not know."""

    def unknown(_: int) -> Any:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"expected a home folder for ~, got none\. Set HOME"):
        with_home(path)


@pytest.mark.parametrize(("begin", "is_home"), [("~", True), ("./~", False)])
def test_every_path_is_read_as_written(
    home: Path, monkeypatch: pytest.MonkeyPatch, begin: str, *, is_home: bool
) -> None:
    folder = home if is_home else home.parent / "work" / "~"
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (folder / "settings.yaml").write_text("a: 1\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))

    assert absolute_path(f"{begin}/x", Path.cwd()) == str(folder / "x")
    assert read_yaml(f"{begin}/settings.yaml") == {"a": 1}
    assert [row.key for row in read_rows(InputConfig(path=f"{begin}/rows.jsonl"))] == ["rows:00000000"]
    assert [row.key for row in read_rows(InputConfig(path=f"{begin}/*.jsonl"))] == ["rows:00000000"]
    open_store(f"{begin}/out").put("x", [b"x"])
    assert (folder / "out" / "x").read_bytes() == b"x"
    store, name = open_within(f"{begin}/out", str(folder / "out" / "x"))
    assert (name, store.get(name)) == ("x", b"x")
    monkeypatch.setenv("HSX_CACHE", f"{begin}/cache")
    assert cache_folder() == folder / "cache"
    assert ModelFiles(None, f"{begin}", {})._named(f"{begin}") == (begin, folder if is_home else Path("~"))
    with pytest.raises(ConfigError, match=rf"got '{begin}' \(.*[Nn]o such file"):
        decode.load_decoder(begin)


def test_a_name_that_begins_with_a_tilde_is_read(home: Path) -> None:
    Path("~old.jsonl").write_text('{"text": "a"}\n')
    for path in ("~old.jsonl", "./~old.jsonl", "~old*"):
        assert [row.key for row in read_rows(InputConfig(path=path))] == ["~old:00000000"]


def test_only_one_function_expands_home_folders() -> None:
    package = Path(hsx_dist.__file__).parent
    uses = [path.name for path in package.rglob("*.py") if "expanduser(" in path.read_text()]
    assert uses == ["home.py"]
