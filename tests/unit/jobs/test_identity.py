"""A run recognizes its input in every place, and with any number of its rows."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.config import InputConfig, load_config
from hsx_dist.errors import RunMismatch
from hsx_dist.fleet.replica import row_seed
from hsx_dist.format.manifest import RowFate
from hsx_dist.format.place import Place, start_run
from hsx_dist.format.runs import load_manifest, read_heartbeat
from hsx_dist.inputs.rows import Row, rows_from
from hsx_dist.jobs.extract import account_for
from hsx_dist.jobs.heartbeat import Heartbeat
from hsx_dist.jobs.input_identity import count_rows, run_seed
from hsx_dist.observe.console import Console
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from hsx_dist.testing.stores import MemoryStore
from tests.harness.runs import RunWriter

PROMPTS = [{"id": f"r{i}", "text": f"text {i}"} for i in range(40)]
CORRECTED = [{"id": "r0", "text": "better"}, *PROMPTS[1:]]
OTHERS = [{"id": f"x{i}", "text": "y"} for i in range(40)]
ALL = [p["id"] for p in PROMPTS]


def rows(prompts: list[Any], **settings: Any) -> Any:
    return lambda: rows_from(prompts, InputConfig(**settings))


def contents(prompts: list[Any]) -> dict[str, str]:
    return {row.key: row.content for row in rows(prompts)() if isinstance(row, Row)}


def first_rows() -> dict[str, str]:
    """As an earlier version hashed them."""
    return {row.key: row.old_content for row in rows(PROMPTS[:16])() if isinstance(row, Row)}


def stored_run(*attempts: tuple[list[Any], list[str]], old: bool = False) -> Place:
    """A run of these attempts. Each: its input, and the keys of the rows that it stored.

    ``old``: as an earlier version stored it, with the first rows in ``run.json``, and receipts without contents.
    """
    place = start_run(MemoryStore(), {"first_rows": first_rows()} if old else {})
    for prompts, keys in attempts:
        known = {} if old else contents(prompts)
        writer = RunWriter(place.root)
        made = [random_sample(key, 3) for key in keys]
        if made:
            writer.put([(s, replace(s.segments()[0], content=known.get(s.key, "")), None) for s in made])
    return place


def check(prompts: list[Any], *attempts: tuple[list[Any], list[str]], old: bool = False, **settings: Any) -> None:
    place = stored_run(*attempts, old=old)
    count_rows(place, rows(prompts, **settings), load_manifest(place.store))


@pytest.mark.parametrize("old", [False, True])
def test_the_same_input_grown_shuffled_or_cut(old: bool) -> None:
    check(PROMPTS, (PROMPTS, ALL), old=old)
    check([*PROMPTS, {"id": "new", "text": "x"}], (PROMPTS, ALL), old=old)
    check(PROMPTS[::-1], (PROMPTS, ALL), old=old)
    check(PROMPTS, (PROMPTS, ALL), old=old, limit=1)
    check(PROMPTS, (PROMPTS, ALL), old=old, sample=0.5)


@pytest.mark.parametrize("old", [False, True])
def test_another_input(old: bool) -> None:
    with pytest.raises(RunMismatch, match=r"got other content in row 0 \('r0'\)"):
        check(CORRECTED, (PROMPTS, ALL), old=old)
    for other in (OTHERS, []):
        with pytest.raises(RunMismatch, match="got none of their rows"):
            check(other, (PROMPTS, ALL), old=old)
    check(OTHERS, (PROMPTS, []), old=old)  # nothing is stored yet


def test_a_duplicate_id_of_another_shard_is_an_error_that_names_both_rows() -> None:
    """In one shard the later row is refused. This attempt does not read the row of the sample."""
    prompts = [{"id": "x", "text": "a"}, {"id": "y", "text": "b"}, {"id": "z", "text": "c"}, {"id": "x", "text": "d"}]
    place = start_run(MemoryStore(), {})
    sample, first = random_sample("x", 3), contents(prompts)["x"]
    RunWriter(place.root).put([(sample, replace(sample.segments()[0], content=first), 0)])
    manifest = load_manifest(place.store)
    count_rows(place, rows(prompts), manifest)
    with pytest.raises(
        RunMismatch, match=r"in row 3 \('x'\). The sample is of row 0. If that row has this id too, give "
    ):
        count_rows(place, rows(prompts, num_shards=2, shard_index=1), manifest)


def test_a_stored_row_that_is_refused_now() -> None:
    """Earlier versions accepted some rows that this version refuses: their samples stay."""
    refused = [*PROMPTS[:3], {"id": "r3", "text": "other", "token_ids": [1]}]
    check(refused, (PROMPTS, ALL), old=True)
    with pytest.raises(RunMismatch, match=r"got row 3 \('r3'\), which is refused now: .*exactly one"):
        check(refused, (PROMPTS, ALL))


@pytest.mark.parametrize("key", ["#tag", "a#b", "#1", "rows#0000000x", "#٠٠٠٠٠٠٠٠"])
def test_a_refused_row_may_have_any_id(key: str) -> None:
    refused = RowFate(key, 2, "refused", "expected exactly one of text, messages and token_ids", 0)
    place = start_run(MemoryStore(), {})
    assert count_rows(place, lambda: iter([refused]), load_manifest(place.store)) == (1, 1)


@pytest.mark.parametrize(("label", "key"), [("", "2"), ("rows", "rows:00000002")])
def test_a_stored_row_that_is_unreadable_now(label: str, key: str) -> None:
    """An unreadable row is refused under the key FILE#ROW. The stored row without an id has the key FILE:ROW."""
    place = start_run(MemoryStore(), {})
    sample = random_sample(key, 3)
    RunWriter(place.root).put([(sample, replace(sample.segments()[0], content="0" * 16), None)])
    refused = RowFate(f"{label}#00000002", 2, "refused", "expected a JSON object", 0)
    with pytest.raises(RunMismatch, match=r"got row 2 .* which is refused now: expected a JSON object"):
        count_rows(place, lambda: iter([refused]), load_manifest(place.store))


def test_an_unreadable_row_of_a_file_is_found_after_rows_were_added_before_it() -> None:
    place = start_run(MemoryStore(), {})
    sample = random_sample("b:00000000", 3)
    RunWriter(place.root).put([(sample, replace(sample.segments()[0], content="0" * 16, row=1), None)])
    refused = RowFate("b#00000000", 2, "refused", "expected a JSON object", 0)
    with pytest.raises(RunMismatch, match=r"got row 2 .* which is refused now"):
        count_rows(place, lambda: iter([refused]), load_manifest(place.store))


@pytest.mark.parametrize("bad", [None, {"id": 1, "text": "again"}, {"id": "#00000002", "text": "x"}])
def test_an_unreadable_row_does_not_claim_the_sample_of_another_row_whose_id_is_a_number(bad: Any) -> None:
    prompts = [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}, bad, {"id": 3, "text": "c"}]
    check(prompts, (prompts, ["1", "2"]))
    check(prompts, (prompts, ["1", "2", "3"]), limit=3)
    with pytest.raises(RunMismatch, match=r"got row 2 .* which is refused now"):
        check([prompts[0], bad, bad], (prompts, ["1", "2"]))


@pytest.mark.parametrize(
    "changed",
    [
        {"label": 1},
        {"tools": [{"b": 2, "a": 1}]},
        {"messages": [{"content": "hi", "role": "user"}]},
    ],
)
def test_labels_and_the_order_of_members_are_content(changed: dict[str, Any]) -> None:
    """A chat template may print an object's members in order."""
    row = {"id": "r0", "messages": [{"role": "user", "content": "hi"}], "tools": [{"a": 1, "b": 2}], "label": 0}
    one, other = (next(rows_from([r], InputConfig(metadata=["label"]))) for r in (row, {**row, **changed}))
    assert isinstance(one, Row)
    assert isinstance(other, Row)
    assert one.content != other.content
    assert one.old_content == other.old_content


def test_a_row_without_a_sample_may_be_corrected_and_then_belongs_to_the_input() -> None:
    check(CORRECTED, (PROMPTS, ALL[1:]))
    check(CORRECTED, (PROMPTS, ALL[1:]), (CORRECTED, ["r0"]))
    with pytest.raises(RunMismatch, match="got other content in row 0"):
        check(PROMPTS, (PROMPTS, ALL[1:]), (CORRECTED, ["r0"]))


def test_every_stored_row_counts() -> None:
    """Without ids, keys are numbers. A line inserted into the file moves all rows after it to other keys."""
    texts = [{"text": f"text {i}"} for i in range(40)]
    inserted = [*texts[:30], {"text": "new"}, *texts[30:]]
    keys = list(contents(texts))
    check(texts, (texts, keys))
    check(inserted, (texts, keys[:30]))
    with pytest.raises(RunMismatch, match="got other content in row 30"):
        check(inserted, (texts, keys))


def test_a_driver_sees_the_samples_that_another_one_stored_meanwhile(tmp_path: Path) -> None:
    config = load_config(None, (), model="m", output=str(tmp_path))
    place = start_run(LocalStore(tmp_path), {"meaning": {}})
    early = load_manifest(place.store)
    made = random_sample("r0", 3)
    RunWriter(place.root).put([(made, replace(made.segments()[0], content=contents(CORRECTED)["r0"]), None)])
    with pytest.raises(RunMismatch, match="got other content in row 0"):
        account_for(config, place, early, rows(PROMPTS), Console(file=io.StringIO()), lambda *_: None)
    beat = read_heartbeat(place.store, 2)
    assert beat is not None
    assert beat["state"] == "failed"


def test_the_heartbeat_begins_before_the_input_is_read_again(tmp_path: Path) -> None:
    config = load_config(None, (), model="m", output=str(tmp_path))
    place = start_run(LocalStore(tmp_path), {"meaning": {}})
    states: list[str] = []

    def slow() -> Iterator[Any]:
        beat = read_heartbeat(place.store, 1)
        states.append("" if beat is None else beat["state"])
        yield from rows(PROMPTS)()

    def compute(heart: Heartbeat, *_: Any) -> None:
        heart.state = "stopped: by a limit"

    account_for(config, place, load_manifest(place.store), slow, Console(file=io.StringIO()), compute)
    assert states == ["", "running"]  # before and after the attempt was taken
    beat = read_heartbeat(place.store, 1)
    assert beat is not None
    assert beat["state"] == "stopped: by a limit"


def test_seeds_are_the_runs_and_the_rows_own() -> None:
    run = run_seed({"id": "abc"}, {})
    assert row_seed(run, "a") == row_seed(run, "a")
    assert len({row_seed(run, "a"), row_seed(run, "b"), row_seed(run_seed({"id": "abd"}, {}), "a")}) == 3
    assert run_seed({"id": "abc"}, {"seed": 3}) == run_seed({"id": "abd"}, {"seed": 3}) != run_seed({}, {"seed": 4})
    assert all(0 <= row_seed(run, str(i)) < 1 << 63 for i in range(1000))
