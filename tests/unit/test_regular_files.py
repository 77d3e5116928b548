"""A FIFO or a device in place of a file that a user names is an error. Reading it may never end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.config import load_config
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.inputs.encode import load_tokenizer
from hsx_dist.jobs.decode import load_decoder
from hsx_dist.jobs.preflight import load_text_config
from hsx_dist.model_parts import model_files
from hsx_dist.models.tiny import tiny_llama
from hsx_dist.regular_files import check_folder, open_regular
from hsx_dist.store import obstore_s3

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("kind", ["file", "link", "fifo", "link to a fifo", "device", "folder", "socket", "absent"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "name"
    target = tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind != "device" and kind != "absent":
        os.mkfifo(target) if kind == "link to a fifo" else target.write_bytes(b"x")
        path.symlink_to(target)
    is_file = kind in ("file", "link")
    expected = nullcontext() if is_file else pytest.raises(OSError, match=str(path))
    with expected, open(path, "rb", opener=open_regular) as file:
        assert file.read() == b"x"


def test_no_library_loads_a_folder_with_a_fifo(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "absent").symlink_to("nothing")
    check_folder(tmp_path)
    check_folder("an-id/of-the-hub")
    check_folder(tmp_path / "absent")
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    (templates / "a.jinja").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"a\.jinja: expected a regular file, got a FIFO, socket or device"):
        check_folder(tmp_path)


def _text_config(folder: Path) -> Any:
    return load_text_config(load_config(None, model=str(folder), output="o"), str(folder))


def _json(folder: Path) -> Any:
    return model_files._read_json(folder / "tokenizer.json", {})


def _weights(folder: Path) -> Any:
    with model_files._opened(folder / "tokenizer.json") as file:
        return file


def _certificate(folder: Path) -> Any:
    return obstore_s3._http_options("https://h", str(folder / "tokenizer.json"), None, {})


READERS: list[Callable[[Path], Any]] = [
    *(lambda folder: load_config(str(folder / "tokenizer.json")), lambda folder: load_decoder(str(folder))),
    *(lambda folder: load_tokenizer(str(folder)), _text_config, _json, _weights, _certificate),
]


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("read", READERS)
def test_readers_do_not_wait(read: Callable[[Path], Any], kind: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((ConfigError, FormatError, OSError), match=r"regular file|Invalid argument"):
        read(tmp_path)


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_a_shell_gives_a_configuration_by_a_pipe(folder: str) -> None:
    """As bash and zsh do for ``hsx extract <(envsubst < c.yaml)``."""
    if not Path(folder).is_dir():
        pytest.skip(f"no {folder}")
    read, write = os.pipe()
    os.write(write, b"{model: m, output: o}")
    os.close(write)
    assert load_config(f"{folder}/{read}").model == "m"
    os.close(read)


def test_a_loop_of_links_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="Too many levels"):
        load_config(str(tmp_path / "loop" / "c.yaml"))
