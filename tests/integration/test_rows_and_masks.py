"""Data of rows through a real engine: loss masks, metadata, selections, generated answers.

The exact-number model's states contain their token, so that every selection is checked number by number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hsx_dist
from hsx_dist.errors import RunMismatch
from hsx_dist.fleet.replica import row_seed
from hsx_dist.format.json_objects import dump_json
from hsx_dist.reading import open_run
from tests.harness.exact_model import exact_model, expected_states, next_tokens, registered

CAPTURED = (0, 2, 4)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "enforce_eager": True,
    "max_num_batched_tokens": 64,
    "block_size": 32,
}
SIZES = {"page_bytes": "40KiB", "segment_bytes": "100KiB", "part_bytes": "200KiB", "in_flight_bytes": "200KiB"}
LENGTHS = (1, 31, 64, 65, 200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("exact")
    with registered(folder / "plugin"):
        yield str(exact_model(folder / "model", layers=4))


def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(11)
    return [
        {
            "id": f"r{n}",
            "token_ids": rng.integers(3, 400, n).tolist(),
            "loss_mask": [1, *rng.integers(0, 2, n - 1).tolist()],
            "source": f"shard {n}",
        }
        for n in LENGTHS
    ]


def extract(model: str, output: Path, prompts: list[Any], **settings: Any) -> Any:
    return hsx_dist.extract(
        prompts, model=model, output=output, layers=list(CAPTURED), engine_kwargs=ENGINE, **SIZES, **settings
    )


def positions(select: str, row: dict[str, Any]) -> list[int]:
    n = len(row["token_ids"])
    if select == "loss_mask":
        return [i for i, counts in enumerate(row["loss_mask"]) if counts]
    return {"all": list(range(n)), "last": [n - 1], "stride:7": list(range(0, n, 7))}[select]


# test_connector_bare.py has a request with a stride.
@pytest.mark.parametrize("select", ["all", "last", pytest.param("stride:7", marks=pytest.mark.soak), "loss_mask"])
def test_exactly_the_selected_tokens_with_their_mask_and_metadata(model, tmp_path, select):
    settings = {"select": select, "input": {"metadata": ["source"]}}
    run = extract(model, tmp_path / "run", rows(), **settings)
    assert not run.refused
    for row in rows():
        sample = run[row["id"]]
        data = sample.load(framework="numpy")
        at = positions(select, row)
        whole = expected_states(row["token_ids"], CAPTURED, sample.hidden_size)
        np.testing.assert_array_equal(data["hidden_states"], whole[at])
        assert data["token_ids"].tolist() == [row["token_ids"][i] for i in at]
        assert data["loss_mask"].tolist() == [row["loss_mask"][i] for i in at]
        assert sample.metadata == {"source": row["source"]}
        if select == "loss_mask":
            assert sample.attached()["positions"].tolist() == at
    if select == "all":
        (long,) = (run.manifest.samples["r200"],)
        assert len(long.segments) > 1  # the mask belongs to the sample, not to its first segment
        with pytest.raises(RunMismatch, match="select"):
            extract(model, tmp_path / "run", rows(), **settings | {"select": "last"})
        changed = [{**r, "loss_mask": [1] * len(r["token_ids"])} for r in rows()[1:]]
        with pytest.raises(RunMismatch, match="expected the input of the stored samples, got other content"):
            extract(model, tmp_path / "run", changed, **settings)


def test_the_mean_is_exact(model, tmp_path):
    run = extract(model, tmp_path / "run", rows(), select="mean")
    for row in rows():
        sample = run[row["id"]]
        data = sample.load(framework="numpy")
        whole = expected_states(row["token_ids"], CAPTURED, sample.hidden_size).astype(np.float64)
        np.testing.assert_array_equal(data["hidden_states"], whole.mean(axis=0, keepdims=True).astype(np.float32))
        assert data["token_ids"].tolist() == [-1]
        assert sample.attached()["request_token_ids"].tolist() == row["token_ids"]
        assert data["meta"]["tokens"] == {"mean": True, "of": len(row["token_ids"])}


def test_chats_with_tools_truncated_and_masked_by_role(tiny_model_path, tmp_path):
    """Templated by the model's own template, from a Parquet file, as a job reads it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hsx_dist.config import load_config
    from hsx_dist.jobs.extract import run_extract

    def chat(i: int, words: int) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"Question {i}?"},
            {"role": "assistant", "content": "word " * words + "end"},
        ]

    chats = [chat(0, 2), chat(1, 60), chat(2, 1)[:2]]
    pq.write_table(pa.table({"uid": ["short", "long", "unanswered"], "chat": chats}), tmp_path / "chats.parquet")
    config = load_config(
        None,
        model=str(tiny_model_path),
        output=str(tmp_path / "run"),
        layers=[4],
        pool="threads",
        engine_kwargs=ENGINE,
        input={
            "path": str(tmp_path / "*.parquet"), "id": "uid", "messages": "chat", "loss_roles": ["assistant"],
            "max_length": 80, "too_long": "truncate",
        },
    )  # fmt: skip
    run_extract(config)
    from hsx_dist.inputs.encode import load_tokenizer

    run = open_run(str(tmp_path / "run"))
    tokenizer = load_tokenizer(str(tiny_model_path))
    data = run["short"].load(framework="numpy")
    answer = [t for t, m in zip(data["token_ids"], data["loss_mask"], strict=True) if m]
    assert tokenizer.decode(answer) == "word word end</s>"
    assert data["token_ids"].tolist() == tokenizer.apply_chat_template(chats[0], tokenize=True, return_dict=False)
    data = run["long"].load(framework="numpy")
    assert len(data["token_ids"]) == 80
    assert data["loss_mask"][-1] == 1
    assert "zeros" in run.refused["unanswered"].reason


def plain_answers(
    model: str, prompts: dict[str, list[int]], seeds: dict[str, int], monkeypatch
) -> dict[str, list[int]]:
    """The answers of the same vLLM without extraction: prompt and eleven tokens."""
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(model, disable_log_stats=True, **ENGINE)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts.values()],
        [SamplingParams(max_tokens=11, temperature=1.0, ignore_eos=True, seed=seeds[k]) for k in prompts],
        use_tqdm=False,
    )
    llm.llm_engine.engine_core.shutdown()
    return {k: [*ids, *o.outputs[0].token_ids] for (k, ids), o in zip(prompts.items(), outputs, strict=True)}


def test_sampled_answers_are_vllms_own_and_the_same_in_a_resumed_run(tiny_model_path, tmp_path, monkeypatch):
    """The missing half is generated in a batch with other rows than in the whole run. The answers are equal."""
    prompts = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"Say {i}"}]} for i in range(6)]
    settings: dict[str, Any] = {
        "include_output_tokens": True,
        "sampling_params": {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True},
        "input": {"loss_roles": ["assistant"]},
        "layers": [4],
        "engine_kwargs": ENGINE,
    }
    model = str(tiny_model_path)
    whole = hsx_dist.extract(prompts, model=model, output=tmp_path / "whole", layout="sample", **settings)
    answers = {}
    for sample in whole:
        data = sample.load(framework="numpy")
        split = data["meta"]["prompt_tokens"]
        assert data["loss_mask"].tolist() == [0] * split + [1] * (len(data["token_ids"]) - split)
        answers[sample.key] = data["token_ids"].tolist()
    # Sampled, but not by vLLM's rejection sampler, which repeats a token (vllm_patches/no_drafts.py).
    assert len({tuple(a[-11:]) for a in answers.values()}) == 6
    assert all(len(set(a[-11:])) > 5 for a in answers.values())
    info = json.loads((tmp_path / "whole" / "run.json").read_text())
    seeds = {key: row_seed(info["id"], key) for key in answers}
    assert plain_answers(model, {k: answers[k][:-11] for k in answers}, seeds, monkeypatch) == answers
    # As if the run had been killed after three rows: the other rows have no receipts.
    first = tmp_path / "half"
    half = hsx_dist.extract(prompts[:3], model=model, output=first, layout="sample", **settings)
    assert all(sample.token_ids("numpy").tolist() != answers[sample.key] for sample in half)  # other run, other seeds
    of_half = json.loads((first / "run.json").read_text())
    del of_half["crc32c"]
    (first / "run.json").write_bytes(dump_json({**of_half, "id": info["id"]}))
    (first / f"run-{of_half['id']}").rename(first / f"run-{info['id']}")
    resumed = hsx_dist.extract(prompts, model=model, output=first, layout="sample", **settings)
    for key in ("p3", "p4", "p5"):
        assert resumed[key].token_ids("numpy").tolist() == answers[key]


def test_generated_tokens_are_selected_by_their_mask(model, tmp_path):
    prompts = [{"id": "a", "token_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}, {"id": "long", "token_ids": [5] * 9}]
    run = extract(
        model,
        tmp_path / "run",
        prompts,
        select="loss_mask",
        include_output_tokens=True,
        sampling_params={"max_tokens": 5, "ignore_eos": True},
        input={"max_length": 8, "too_long": "fail"},
    )
    assert "at most 8 tokens, got 9" in run.failed["long"].reason
    data = run["a"].load(framework="numpy")
    assert data["token_ids"].tolist() == next_tokens(7, 4)
    whole = expected_states([5, 6, 7, *next_tokens(7, 4)], CAPTURED, run["a"].hidden_size)
    np.testing.assert_array_equal(data["hidden_states"], whole[3:])


def test_an_input_in_a_bucket_by_folder_and_by_glob(s3, monkeypatch, tmp_path):
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hsx_dist.config import InputConfig
    from hsx_dist.errors import ConfigError
    from hsx_dist.inputs.rows import read_rows

    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    options = {"client_kwargs": {"endpoint_url": s3.endpoint_url}}
    base = f"{s3.url}/rows"
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(1000)]}), tmp_path / "b.parquet")
    fs, path = fsspec.core.url_to_fs(base, **options)
    fs.pipe({f"{path}/a/x.jsonl": b'{"text": "one"}\n{"text": "two"}\n', f"{path}/_SUCCESS": b""})
    fs.pipe(f"{path}/b.parquet", (tmp_path / "b.parquet").read_bytes())

    def keys(url: str, **settings: Any) -> list[str]:
        return [row.key for row in read_rows(InputConfig(path=url, storage_options=options, **settings))]

    everything = keys(base)
    assert everything[:3] == ["a/x:00000000", "a/x:00000001", "b:00000000"]
    assert len(everything) == 1002
    assert keys(f"{base}/**/*.jsonl") == everything[:2]
    assert keys(f"{base}/b.parquet", limit=3) == everything[2:5]
    with pytest.raises(ConfigError, match="no such file or bucket"):
        keys(f"{base}/nothing.jsonl")
