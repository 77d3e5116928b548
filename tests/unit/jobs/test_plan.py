"""The numbers of a plan, for a tiny model and a small input with known numbers."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hsx_dist.cli import main
from hsx_dist.config import ExtractConfig, load_config
from hsx_dist.inputs.rows import rows_from
from hsx_dist.jobs.cache_share import cache_share
from hsx_dist.jobs.plan import RATIOS, RunPlan, make_plan
from hsx_dist.models.tiny import write_tiny_tokenizer
from tests.harness.hooked_model import tiny_model


def config(model: Path, **settings: Any) -> ExtractConfig:
    settings.setdefault("layers", [0, 2, 4])
    return load_config(None, output="runs/x", model=str(model), pool="threads", **settings)


def plan(model: Path, rows: Iterable[Any], sample_rows: int = 1000, rate: float = 100.0, **settings: Any) -> RunPlan:
    made = config(model, **settings)
    return make_plan(made, lambda: rows_from(rows, made.input), sample_rows=sample_rows, tokens_per_second=rate)


ROWS = [{"token_ids": [5] * n} for n in (10, 20, 30)]
FLOAT32 = {"engine_kwargs": {"dtype": "float32"}}


def test_tokens_bytes_time_and_network(tiny_model_path: Path) -> None:
    found = plan(tiny_model_path, [*ROWS, {"text": ""}], **FLOAT32)
    assert (found.rows, found.unreadable, found.sampled, found.tokens) == (4, 1, 3, 60)
    assert found.token_bytes == 3 * 64 * 4
    assert found.raw_bytes == 60 * found.token_bytes
    assert found.margin == 0
    assert found.seconds == pytest.approx(0.6)
    beside = found.stored["none"] - found.raw_bytes
    assert 60 * 8 < beside < 60 * 8 + 3 * 1000
    assert found.stored["split"] == pytest.approx(found.raw_bytes / RATIOS["float32"]["split"] + beside, abs=1)
    assert found.node_bytes_per_second == pytest.approx(100 * found.stored["split"] / 60)
    assert found.parts == 1
    json.dumps(found.to_dict())


@pytest.mark.parametrize(("select", "q", "ids", "total"), [("all", 256, 8, 2 * 256 + 4 * 8), ("mean", 512, 0, 2 * 512)])
def test_points_are_counted_one_by_one(
    select: str, q: int, ids: int, total: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four heads of 32 in bf16, and two int32 ids. Layer 1 of the five has no experts. Ids have no mean."""
    write_tiny_tokenizer(tiny_model("qwen3_moe", tmp_path), 512, 512)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"token_ids": [1] * 10}))
    settings = [f"model={tmp_path}", f"input.path={tmp_path}/rows.jsonl", "output=x", "source=taps", f"select={select}"]
    capture = "capture={points: {q: [1, 2], topk_ids: all}}"
    with pytest.raises(SystemExit, match="0"):
        main(["plan", *settings, capture, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["point_bytes"] == {"q": [2, 2 * q], "topk_ids": [4, 4 * ids]}
    assert found["token_bytes"] == total
    with pytest.raises(SystemExit, match="0"):
        main(["plan", *settings, capture])
    assert f"{total:,} bytes of states" in capsys.readouterr().out


def test_dtypes_as_vllm_chooses_them(tiny_model_path: Path) -> None:
    for dtype, size in (("auto", 2), ("bfloat16", 2), ("half", 2), ("float", 4)):
        assert plan(tiny_model_path, ROWS, engine_kwargs={"dtype": dtype}).token_bytes == 3 * 64 * size


@pytest.mark.parametrize(("select", "kept"), [("last", 3), ("stride:7", 2 + 3 + 5), ("mean", 3), ("loss_mask", 6)])
def test_selections(tiny_model_path: Path, select: str, kept: int) -> None:
    rows = [{**r, "loss_mask": [1, 1] + [0] * (len(r["token_ids"]) - 2)} for r in ROWS]
    found = plan(tiny_model_path, rows, select=select)
    assert (found.tokens, found.stored_tokens) == (60, kept)
    assert found.token_bytes == 3 * 64 * (4 if select == "mean" else 2)
    assert any("EAGLE" in note for note in found.notes)


def test_answers_at_their_longest(tiny_model_path: Path) -> None:
    found = plan(tiny_model_path, ROWS, include_output_tokens=True, sampling_params={"max_tokens": 9})
    assert found.tokens == 60 + 3 * 8
    assert plan(tiny_model_path, ROWS, sampling_params={"max_tokens": 9}).stored_tokens == 60


def test_a_sample_is_scaled_and_says_how_sure_it_is(tiny_model_path: Path) -> None:
    rows = [{"token_ids": [5] * (1 + i % 50)} for i in range(2000)]
    found = plan(tiny_model_path, rows, sample_rows=200)
    true = sum(1 + i % 50 for i in range(2000))
    assert found.sampled == 200
    assert 0.02 < found.margin < 0.15
    assert abs(found.tokens - true) / true < 2 * found.margin
    assert plan(tiny_model_path, rows, sample_rows=200).tokens == found.tokens


def test_rows_that_would_be_refused(tiny_model_path: Path) -> None:
    rows = [*ROWS, {"token_ids": [5] * 600}, {"token_ids": [511 + 600]}]
    found = plan(tiny_model_path, rows)
    assert found.tokens == 60
    assert sum(found.refused.values()) == 2
    assert any("at most 511 tokens" in reason for reason in found.refused)


def test_a_plan_keeps_no_rows(tiny_model_path: Path) -> None:
    class Text(str):
        """A text that can be referenced weakly."""

    texts: list[weakref.ref[Text]] = []

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(20):
            assert sum(text() is not None for text in texts) <= 2
            text = Text(f"a {number}")
            texts.append(weakref.ref(text))
            yield {"text": text}

    assert plan(tiny_model_path, rows()).sampled == 20


def test_parts(tiny_model_path: Path) -> None:
    assert plan(tiny_model_path, ROWS, layout="sample").parts == 3
    small = {"part_bytes": "4KiB", "segment_bytes": "4KiB", "page_bytes": "2KiB", "engine_kwargs": {"block_size": 8}}
    found = plan(tiny_model_path, ROWS, **small)
    assert found.parts == -(-found.stored_bytes // 4096)
    assert found.requests > 3 * found.parts


TEXT = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("config", "ranks", "kv"),
    [
        ({"num_key_value_heads": 2}, 1, 2 * 4 * 2 * 8 * 2),
        ({"num_key_value_heads": 2}, 4, 2 * 4 * 1 * 8 * 2),  # each rank holds a head, some ranks the same
        ({"head_dim": 32}, 2, 2 * 4 * 4 * 32 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 8, 4 * 576 * 2),
    ],
)
def test_the_share_of_the_cache(config: dict[str, Any], ranks: int, kv: int) -> None:
    share = cache_share(SimpleNamespace(**TEXT, **config), states=1000, tensor_parallel=ranks)
    assert share.kv == kv
    assert share.share == pytest.approx(1000 / (1000 + kv))
    assert share.warning is None


def test_hybrids_are_warned_of() -> None:
    text = SimpleNamespace(**TEXT, layer_types=["sliding_attention", "full_attention"] * 2)
    assert "full_attention, sliding_attention" in str(cache_share(text, states=10).warning)
    assert cache_share(SimpleNamespace(**TEXT, layer_types=["full_attention"] * 4), states=10).warning is None


@pytest.mark.parametrize(("pool", "writers"), [("ray", 3), ("threads", 1)])
def test_the_host_memory_of_a_replica_and_its_writers(
    pool: str, writers: int, tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]))
    settings = [f"model={tiny_model_path}", f"input.path={tmp_path}/in.jsonl", "output=s3://bucket/x", f"pool={pool}"]
    settings += [
        "layers=1",
        "in_flight_bytes=300MB",
        "writers.credit_bytes=50MB",
        "part_bytes=200MB",
        "writers.per_node=3",
    ]
    for last in (["engine_kwargs.tensor_parallel_size=2"], ["engine_kwargs.tensor_parallel_size=2", "--json"]):
        with pytest.raises(SystemExit, match="0"):
            main(["plan", *settings, *last])
    text, _, document = capsys.readouterr().out.partition("{")
    assert json.loads("{" + document)["host"] == {"ring": 600_000_000, "writer": 250_000_000, "writers": writers}
    assert "600.0 MB in the rings of a replica" in text
    assert f"250.0 MB in each writer ({writers} per node)" in text


def test_the_command(tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    (tmp_path / "c.yaml").write_text(f"model: {tiny_model_path}\noutput: {tmp_path}/run\nlayers: [1]\npool: threads\n")
    arguments = ["plan", "--config", str(tmp_path / "c.yaml"), f"input.path={tmp_path}/in.jsonl"]
    alone = ["plan", f"model={tiny_model_path}", "layers=1", f"output={tmp_path}/run", arguments[-1]]
    for line in (arguments, [*alone, "--tokens-per-second", "5000", "--json"]):
        with pytest.raises(SystemExit) as e:
            main(line)
        assert e.value.code == 0
    text, _, document = capsys.readouterr().out.partition("{")
    assert "60" in text
    assert "split" in text
    assert "1 replica of 10,000 tokens/s (a guess" in text
    assert json.loads("{" + document)["tokens"] == 60
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit):
        main(["plan"])
    assert "--config FILE" in capsys.readouterr().err
