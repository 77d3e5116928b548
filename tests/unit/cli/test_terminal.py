"""No command writes text of stored objects or clients to a terminal unescaped, with and without --json."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from hsx_dist.cli import main
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.runs import beat, load_manifest
from hsx_dist.observe.console import Console
from hsx_dist.observe.summary import RunSummary, print_summary
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import random_sample
from hsx_dist.text import printable
from tests.harness.runs import RunWriter, whole, write_v1_run

HOSTILE = "[bold]\x1b[2J[/x]\r\nfake: ok\x9b31m\u202egnp\u2028\x7f\x07:smile:"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path / "run"))
    meaning = {"model": f"m{HOSTILE}", "layers": [2, 15, 30], "revision": HOSTILE}
    write_v1_run(made, {"meaning": meaning, "settings": {"codec": HOSTILE}, "created": HOSTILE})
    writer = RunWriter(made)
    sample = random_sample(HOSTILE, 9, seed=1, odd=False)
    fates = [RowFate(HOSTILE + str(i), i, "refused" if i else "failed", HOSTILE, 1) for i in range(2)]
    writer.put([whole(sample, 2)], fates)
    progress = {"rows": 3, "paused": HOSTILE, "fates": {"stored": 1}, "seconds": 1.0}
    beat(made, writer.attempt, 1, f"stopped: {HOSTILE}", progress)
    return made


COMMANDS: list[tuple[str, ...]] = [
    ("ls",),
    ("show",),
    ("show", HOSTILE),
    ("show", "no" + HOSTILE),
    ("verify",),
    ("status",),
    ("top", "--once"),
    ("gc", "--watch", "0"),
    ("rm",),
    ("cat", HOSTILE, "-o", "OUT.npz"),
    ("cat", "no" + HOSTILE, "-o", "OUT.npz"),
    ("export", "DEST", "--to", "no" + HOSTILE),
]


WITHOUT_JSON = {"rm", "cat"}
BOTH = [*COMMANDS, *((*command, "--json") for command in COMMANDS if command[0] not in WITHOUT_JSON)]


@pytest.mark.parametrize("command", BOTH, ids=lambda c: printable(" ".join(c), 12))
def test_no_command_prints_what_moves_a_cursor(store, tmp_path, capsys, command):
    name, *rest = command
    rest = [str(tmp_path / r) if r.startswith(("OUT", "DEST")) else r for r in rest]
    with pytest.raises(SystemExit):
        main([name, store.url, *rest])
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert all(line.isprintable() for line in text.split("\n")), ascii(text)
        assert not any(line.startswith("fake: ok") for line in text.split("\n"))
    assert "this should not happen" not in printed.err
    if "--json" in rest and printed.out:
        assert printed.out.isascii()
        json.loads(printed.out)


def test_the_live_view_of_a_run_escapes_its_texts(store, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with pytest.raises(SystemExit):
        main(["top", store.url])
    shown = terminal.getvalue()
    assert f"m{printable(HOSTILE)}" in shown
    assert not re.search("\x1b\\[2J|\x9b31m|\\nfake|[\u202e\u2028\x7f\x07]", shown)


def test_a_damaged_part_is_named_in_one_line(store, capsys):
    part = next(info.name for info in store.list("data/"))
    store.put(part, [b"\x00" * 100])
    with pytest.raises(SystemExit):
        main(["verify", store.url])
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


def test_the_summary_of_an_extraction(store):
    out = io.StringIO()
    manifest = load_manifest(store)
    print_summary(RunSummary.of(f"u{HOSTILE}", manifest), manifest, Console(file=out, width=1000), None)
    text = out.getvalue()
    assert "[bold]" in text  # as text, not as markup
    assert ":smile:" in text
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)


def test_a_server_s_objects_and_markers(tmp_path, capsys):
    states = open_store(str(tmp_path / "states"))
    states.put("a.error.json", [json.dumps({"key": "a", "error": HOSTILE, "expires": 1}).encode()])
    (tmp_path / "states" / "b\x1b[2J.error.json").write_text(json.dumps({"key": "b", "error": HOSTILE, "expires": 1}))
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit):
            main(["gc", states.url, *more])
        out = capsys.readouterr().out
        assert "b\\" in out
        assert all(line.isprintable() for line in out.split("\n")), ascii(out)


def test_the_run_of_these_tests_has_what_would_be_printed(store):
    manifest = load_manifest(store)
    assert list(manifest.samples) == [HOSTILE]
    assert len(manifest.refused) == len(manifest.failed) == 1
