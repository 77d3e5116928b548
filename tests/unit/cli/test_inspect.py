"""``hsx ls``, ``show`` and ``verify`` on a run stored by the real writer."""

from __future__ import annotations

import io
import json
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.cli import inspect, main, tables, verify
from hsx_dist.cli.tables import print_table
from hsx_dist.format.codecs import Codec, NoneCodec, SplitCodec, resolve_codec
from hsx_dist.format.manifest import Receipt, RowFate
from hsx_dist.format.names import receipt_name
from hsx_dist.format.runs import load_manifest, take_attempt, write_complete
from hsx_dist.observe.console import print_json, print_json_rows
from hsx_dist.page import HIDDEN_STATES, Page, Segment
from hsx_dist.reading import Run, verify_report
from hsx_dist.reading.sample import columns_of
from hsx_dist.store import Store, open_store
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from hsx_dist.writers.sink import PartSink, SinkOptions
from tests.harness.runs import store_run, write_v1_run
from tests.harness.traced_memory import trace_memory

LAYERS, HIDDEN = (2, 5, 6), 16
TOKENS = {"row:00000000": 7, "a/b c": 12, "[bold]x\x1b": 1}


def page(key: str, states: np.ndarray[Any, Any]) -> Page:
    layers, tokens, _ = states.shape
    return Page(
        segment=Segment(key, 0, 0, tokens, tokens),
        start=0,
        stop=tokens,
        chunk_tokens=tokens,
        layer_ids=LAYERS[:layers],
        dtype="float32",
        shape=states.shape,
        order="LTH",
        token_ids=np.arange(tokens, dtype=np.int64),
        data=states.astype(np.float32).view(np.uint32),
    )


def write_samples(store: Store, attempt: int) -> None:
    events: list[object] = []
    options = SinkOptions(codec=resolve_codec("split"), about={"model": "tiny"}, writer="w", attempt=attempt)
    sink = PartSink(store, options, events.append)
    for n, (key, tokens) in enumerate(TOKENS.items()):
        states = np.ones((len(LAYERS), tokens, HIDDEN)) * np.array([1, 2, 3])[:, None, None]
        if n == 1:
            states[2, 4, 0] = np.nan
            states[1, 3] = 0
        sink.add(page(key, states))
    sink.flush()
    sink.close()
    assert all(isinstance(e, Receipt) for e in events), events


@pytest.fixture
def run(tmp_path: Path) -> str:
    path = str(tmp_path / "run")
    store = open_store(path)
    meaning = {"model": "tiny", "revision": None, "layers": list(LAYERS)}
    write_v1_run(store, {"meaning": meaning, "settings": {"codec": "split"}, "created": "2026-01-01T00:00:00+00:00"})
    attempt = take_attempt(store, {})
    write_samples(store, attempt)
    rows = (RowFate("row:00000003", 3, "refused", "text: expected text, got an empty string", 0),)
    receipt = Receipt(attempt, "driver", 1, None, 0, "00000000", 0, 0, (), rows, "2026-01-01T00:00:00+00:00")
    store.put_if_absent(receipt_name(attempt, "driver", 1), receipt.to_json())
    write_complete(store, attempt, load_manifest(store), {"rows": 4})
    return path


def hsx(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main(args)
    return int(e.value.code or 0)


def hsx_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert hsx(*args, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_ls(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsx("ls", run) == 0
    out = capsys.readouterr().out
    for words in (
        "row:00000000",
        "a/b c",
        "[bold]x\\x1b",
        "2,5,6",
        "data/part-0001-w-",
        "3 samples, 20 tokens, 1 parts",
    ):
        assert words in out
    assert "1 rows refused, 0 failed; complete" in out
    assert "\x1b" not in out


def test_ls_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    listing = hsx_json(capsys, "ls", run)
    assert {s["key"]: s["tokens"] for s in listing["samples"]} == TOKENS
    assert listing["samples"][0]["layers"] == list(LAYERS)
    assert listing["samples"][0]["attempt"] == 1
    assert listing["totals"]["raw_bytes"] == 20 * 3 * HIDDEN * 4
    assert listing["complete"] is True


def test_rows_are_printed_one_at_a_time_as_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    printed = ""

    def rows(count: int) -> Iterator[dict[str, Any]]:
        nonlocal printed
        for i in range(count):
            printed += capsys.readouterr().out
            assert f'"i": {i - 1},' in printed or not i
            yield {"i": i, "text": 'a\n"samples": []'}

    for count in (0, 1, 3):
        printed = ""
        inner = {"samples": [], "failed": []}
        head = {"run": '"samples": []', "info": inner, "samples": [], "totals": {"x": 1}, "failed": [], "end": inner}
        print_json_rows(head, {"samples": rows(count), "failed": iter([2, inner])})
        printed += capsys.readouterr().out
        print_json({**head, "samples": list(rows(count)), "failed": [2, inner]})
        assert printed.endswith(capsys.readouterr().out)


def test_ls_limit(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsx("ls", run, "--limit", "1") == 0
    out = capsys.readouterr().out
    assert "… and 2 more" in out
    assert "3 samples" in out
    assert len(hsx_json(capsys, "ls", run, "--limit", "0")["samples"]) == 3


def test_show_run(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsx("show", run) == 0
    out = capsys.readouterr().out
    for words in ("tiny", "2,5,6", "split", "row:00000003: text: expected text"):
        assert words in out
    assert ["hidden", "size", str(HIDDEN)] in [line.split() for line in out.splitlines()]
    facts = hsx_json(capsys, "show", run)
    assert facts["info"]["meaning"]["model"] == "tiny"
    assert facts["refused"][0]["row"] == 3
    assert facts["totals"]["samples"] == 3


def test_show_hides_credentials_in_every_member_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another version, or another program, may have stored them."""
    store = open_store(str(tmp_path / "run"))
    write_v1_run(store, {"meaning": {"apitoken": "hunter2"}, "created": "x", "other": {"note": "u:hunter2@h", "n": 1}})
    write_samples(store, take_attempt(store, {}))
    info = hsx_json(capsys, "show", str(tmp_path / "run"))["info"]
    assert "hunter2" not in json.dumps(info)
    assert (info["created"], info["other"]["n"]) == ("x", 1)


def test_show_sample(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = hsx_json(capsys, "show", run, "a/b c")
    assert facts["shape"] == [12, 3, HIDDEN]
    assert (facts["dtype"], facts["layer_ids"]) == ("float32", [2, 5, 6])
    assert "data/part-0001-w-" in str(facts["uri"])
    low, middle, high = facts["layers"]
    assert low["mean_norm"] == pytest.approx(np.sqrt(HIDDEN))
    assert (middle["zero_rows"], middle["not_finite"]) == (1, 0)
    assert (high["zero_rows"], high["not_finite"], high["max_norm"]) == (0, 1, pytest.approx(3 * np.sqrt(HIDDEN)))
    assert hsx("show", run, "a/b c") == 0
    assert "[12, 3, 16]" in capsys.readouterr().out


@pytest.mark.traced
def test_all_rows_of_a_run_are_not_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Out(io.StringIO):
        """Keeps no text."""

        lines = 0

        def write(self, text: str) -> int:
            self.lines += text.count("\n")
            return len(text)

    count = 3000
    fates = {f"k{i}": RowFate(f"k{i}", i, "failed", "", 0) for i in range(count)}
    store = MemoryStore()
    store_run(store, [random_sample("a", 2, layer_ids=LAYERS, hidden_size=2)])
    run = Run(store)
    run.index.failed = fates
    monkeypatch.setattr(inspect, "open_run", lambda *_, **__: run)
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 10)

    def peak(command: Callable[[], object]) -> int:
        monkeypatch.setattr("sys.stdout", out := Out())
        command()  # imports
        assert out.lines > count
        trace_memory()
        command()
        return tracemalloc.get_traced_memory()[1]

    assert peak(lambda: inspect.print_run("", (), as_json=True)) < 200 * count
    assert peak(lambda: print_table(("n", "text"), ((i, "a" * 20) for i in range(count)))) < 200 * count


def test_pages_of_a_table_are_one_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[text, i] for i, text in enumerate(["a", "bbbb\n", "\x85c", "d", "e"])]
    printed = []
    for count in (0, 3, 4, 5):
        for at_once in (1000, 2):
            monkeypatch.setattr(tables, "_ROWS_AT_ONCE", at_once)
            print_table(("name", "long name"), rows[:count], numbers=("long name",))
            printed.append(capsys.readouterr().out)
        assert printed[-2] == printed[-1]
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 1)
    print_table(("name", "number"), [("a", 1), ("longer text", 2)], numbers=("number",))
    assert "longer text" in capsys.readouterr().out


def test_show_of_a_missing_or_refused_sample_prints_the_reason(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsx("show", run, "nope") == 2
    assert "nope" in capsys.readouterr().err
    assert hsx("show", run, "row:00000003") == 2
    assert "its row was refused: text: expected text" in capsys.readouterr().err


@pytest.mark.traced
@pytest.mark.parametrize(("codec", "layers"), [(NoneCodec(), 1), (SplitCodec(), 2)])
def test_norms_take_the_memory_of_a_few_rows(codec: Codec, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden = 2048, 4096
    made = random_sample("a", tokens, layer_ids=range(layers), hidden_size=hidden, chunk_tokens=64)
    made.states[3, 0, 5] = 0x7F81  # a signalling NaN
    store = MemoryStore()
    store_run(store, [made], codec=codec)
    sample = Run(store)["a"]
    with np.errstate(invalid="ignore"):
        whole = sample.load(framework="numpy")["hidden_states"][:, 0].astype(np.float64)
    monkeypatch.setattr(inspect, "_BYTES_AT_ONCE", 1 << 20)
    trace_memory()
    with warnings.catch_warnings(action="error"):
        first = inspect._layer_norms(sample, HIDDEN_STATES, columns_of(sample)[HIDDEN_STATES])[0]
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 10 << 20 < made.states.nbytes
    norms = np.linalg.norm(whole, axis=1)
    finite = norms[np.isfinite(norms)]
    assert first["mean_norm"] == pytest.approx(finite.mean())
    assert (first["max_norm"], first["not_finite"]) == (pytest.approx(finite.max()), tokens - len(finite))


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_commands_fail_without_a_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsx(command, str(tmp_path / "nothing")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "run.json" in err
    assert "Traceback" not in err


def test_verify(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsx("verify", run) == 0
    out = capsys.readouterr().out
    assert "\nok: 1 parts, 3 samples" in out
    assert "note: samples with such layers: a/b c\n" in out
    found = hsx_json(capsys, "verify", run)
    assert (found["ok"], found["bad_samples"]) == (True, ["a/b c"])


def test_verify_names_the_part_of_a_flipped_bit(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    (part,) = (Path(run) / "data").iterdir()
    data = bytearray(part.read_bytes())
    data[-5] ^= 4
    part.chmod(0o644)
    part.write_bytes(data)
    assert hsx("verify", run) == 1
    assert part.name in capsys.readouterr().out
    assert hsx("verify", run, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert part.name in report["problems"][0]["part"]


def test_a_secret_storage_option_is_refused(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hsx("ls", run, "--storage-option", "secret=hunter2") == 2
    assert "hunter2" not in capsys.readouterr().err


def test_verify_prints_a_limited_number_of_problems_and_the_number_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (verify, verify_report):
        monkeypatch.setattr(module, "MOST_PROBLEMS", 50)
    path = str(tmp_path / "run")
    samples = [random_sample(f"s{i}", 1, hidden_size=4, odd=False) for i in range(3 * 21)]
    store_run(open_store(path), samples, per_part=21, info={"meaning": {"layers": [4]}})
    assert hsx("verify", path) == 1
    out = capsys.readouterr().out
    assert out.count("BAD ") == 50
    assert "\n… and 13 more problems\n" in out
    assert "\n63 problems: " in out
    assert hsx("verify", path, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (len(found["problems"]), found["unlisted"], found["ok"]) == (50, 13, False)


def test_verify_prints_a_problem_of_a_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "run")
    writer = store_run(open_store(path), [random_sample("a", 1, odd=False)])
    name = next(info.name for info in writer.store.list("manifest/0001/"))
    writer.store.delete(name)
    assert hsx("verify", path) == 1
    assert f"BAD {name}: expected a receipt" in capsys.readouterr().out
