"""``hsx gc``: only what says that it expires goes, and only once it has."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hsx_dist.cli import main
from hsx_dist.errors import ConfigError
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.page import Page, Segment
from hsx_dist.reading.expiry import expired
from hsx_dist.store import open_store
from hsx_dist.testing.runs import write_v1_run
from hsx_dist.writers.sink import PartSink, SinkOptions


def put(store, key, meta):
    data = np.ones((1, 4, 8), np.uint32)
    segment = Segment(key, 0, 0, 4, 4, meta=meta)
    page = Page(segment, 0, 4, 4, (1,), "float32", 8, "LTH", np.arange(4, dtype=np.int64), data)
    sink = PartSink(store, SinkOptions(resolve_codec("none"), {"model": "m"}, "w", layout="sample"), lambda _: None)
    sink.add(page)
    sink.close()


@pytest.fixture
def prefix(tmp_path):
    store = open_store(str(tmp_path))
    put(store, "old", {"expires": 1000})
    put(store, "new", {"expires": 4e9})
    put(store, "kept", {})
    (tmp_path / "old.safetensors.lock").touch()
    (tmp_path / "bad.error.json").write_text(json.dumps({"key": "bad", "error": "x", "expires": 1000}))
    (tmp_path / "odd.bin.failed.json").write_text(json.dumps({"key": "odd", "error": "x", "expires": 1000}))
    (tmp_path / "told.error.json").write_text(json.dumps({"key": "told", "error": "x"}))
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "odd.safetensors").write_bytes(b"\x00" * 100)
    return tmp_path


def test_what_has_expired_is_found_and_nothing_else(prefix):
    store = open_store(str(prefix))
    assert sorted(name for name, _ in expired(store)) == ["bad.error.json", "odd.bin.failed.json", "old.safetensors"]
    assert [name for name, _ in expired(store, now=999)] == []


def test_the_command_only_lists_until_it_is_told_to_delete(prefix, capsys):
    before = sorted(p.name for p in prefix.iterdir())
    for arguments, left in ((["--json"], before), (["--delete"], None)):
        with pytest.raises(SystemExit) as end:
            main(["gc", str(prefix), *arguments])
        assert end.value.code == 0
        if left is not None:
            found = json.loads(capsys.readouterr().out)
            assert found["deleted"] is False
            assert sorted(found["expired"]) == ["bad.error.json", "odd.bin.failed.json", "old.safetensors"]
            assert sorted(p.name for p in prefix.iterdir()) == left
    gone = {"old.safetensors", "old.safetensors.lock", "bad.error.json", "odd.bin.failed.json"}
    assert sorted(p.name for p in prefix.iterdir()) == sorted(set(before) - gone)


def test_a_run_is_refused(tmp_path):
    store = open_store(str(tmp_path))
    write_v1_run(store, {"meaning": {}})
    with pytest.raises(ConfigError, match="came a run"):
        list(expired(store))
