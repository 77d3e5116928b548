from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.config import CODEC_NAMES, load_config, refuse_in_job, resolve_paths
from hsx_dist.config.paths import _form
from hsx_dist.errors import ConfigError
from hsx_dist.inputs.decompress import DECOMPRESSORS
from hsx_dist.inputs.listing import _FORMATS


def make(**direct: Any) -> Any:
    return load_config(None, **{"output": "runs/x", "model": "org/name", **direct})


def test_configurations_can_be_pickled() -> None:
    config = make(store={"storage_options": {"key": "k"}})
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    "direct",
    [
        {"part_bytes": "1GiB"},
        {"output": "elsewhere"},
        {"codec": "none"},
        {"engine_kwargs": {"tensor_parallel_size": 2, "enforce_eager": True}},
        {"sampling_params": {"max_tokens": 7}},
        {"store": {"storage_options": {"key": "k"}}},
        {"input": {"path": "elsewhere", "limit": 3}},
        {"input": {"sample": 0.5, "num_shards": 2, "shard_index": 1, "format": "jsonl"}},
    ],
)
def test_the_runs_meaning_ignores_execution_settings(direct: dict[str, Any]) -> None:
    assert make(**direct).meaning() == make().meaning()


@pytest.mark.parametrize(
    "direct",
    [
        {"model": "org/other"},
        {"revision": "r"},
        {"layers": "all"},
        {"include_output_tokens": True},
        {"engine_kwargs": {"dtype": "float32"}},
        {"engine_kwargs": {"max_model_len": 4}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"input": {"id": "uid"}},
        {"input": {"loss_roles": ["assistant"]}},
        {"input": {"metadata": ["source"]}},
        {"input": {"max_length": 7}},
        {"input": {"too_long": "truncate"}},
        {"select": "last"},
    ],
)
def test_the_runs_meaning_contains_the_stored_values(direct: dict[str, Any]) -> None:
    meaning = make(**direct).meaning()
    assert meaning != make().meaning()
    json.dumps(meaning)


def test_sampling_matters_only_with_output_tokens() -> None:
    one = make(include_output_tokens=True, sampling_params={"max_tokens": 7})
    assert one.meaning() != make(include_output_tokens=True).meaning()


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "models" / "m").mkdir(parents=True)
    config = make(model="models/m", input={"path": "in.jsonl"}, engine_kwargs={"tokenizer": "models/m", "seed": 1})
    resolved = resolve_paths(config, tmp_path)
    assert resolved.output == str(tmp_path / "runs/x")
    assert resolved.input.path == str(tmp_path / "in.jsonl")
    assert resolved.model == str(tmp_path / "models/m")
    assert resolved.engine_kwargs == {"tokenizer": str(tmp_path / "models/m"), "seed": 1}
    assert config.output == "runs/x"
    assert resolve_paths(resolved, Path("/elsewhere")) == resolved


@pytest.mark.parametrize(
    ("link", "target", "name"),
    [
        ("train.parquet", "blobs/0a0b", "train.parquet"),  # as in the cache of the Hugging Face hub
        ("rows.jsonl", "rows.v2.txt", "rows.jsonl"),
        ("rows.jsonl.gz", "0c.gz", "rows.jsonl.gz"),
        ("latest.jsonl", "rows.v2.JSONL", "rows.v2.JSONL"),
        ("latest", "rows.parquet", "rows.parquet"),
        ("llama-3.1.jsonl", "prompts.jsonl", "prompts.jsonl"),
        ("rows.v2.jsonl.gz", "rows.json.gz", "rows.json.gz"),
        ("rows.txt.zst", "rows.zst", "rows.txt.zst"),
    ],
)
def test_a_link_keeps_its_own_name_if_the_target_has_another_ending(
    tmp_path: Path, link: str, target: str, name: str
) -> None:
    """The ending chooses the format. Default keys have the name: those of earlier runs had the target's."""
    (tmp_path / target).parent.mkdir(exist_ok=True)
    (tmp_path / target).touch()
    (tmp_path / link).symlink_to(target)
    resolved = resolve_paths(make(input={"path": link}), tmp_path)
    assert Path(resolved.input.path).name == name
    assert Path(resolved.input.path).samefile(tmp_path / target)
    assert resolve_paths(resolved, Path("/elsewhere")) == resolved


def test_the_endings_of_links_are_those_of_inputs() -> None:
    formats: dict[str, list[bool]] = {}
    for ending, kind in _FORMATS.items():
        assert formats.setdefault(kind, _form(f"a{ending}")) == _form(f"a{ending}")
    for ending, make_decompressor in DECOMPRESSORS.items():
        name = str(make_decompressor)
        assert formats.setdefault(name, _form(f"a{ending}")) == _form(f"a{ending}")
    assert all(map(any, formats.values()))
    assert len({tuple(form) for form in formats.values()}) == len(formats)


def test_names_and_urls_are_not_resolved_as_local_paths(tmp_path: Path) -> None:
    for model in ("org/name", "builtin:smollm2-135m-instruct"):
        config = make(model=model, output="s3://b/x", input={"path": "memory://a/in.jsonl"})
        assert resolve_paths(config, tmp_path) == config
    assert resolve_paths(make(model="./not/there"), tmp_path).model == str(tmp_path / "not/there")
    assert resolve_paths(make(), tmp_path).input.path == ""


def test_codec_names_are_those_of_the_format() -> None:
    from hsx_dist.format.codecs import CODECS

    assert set(CODEC_NAMES) == set(CODECS)


@pytest.mark.parametrize("value", ["first", "stride:0", "stride:-1", "stride:", "mean:2", ""])
def test_select_is_one_of_few_words(value: str) -> None:
    with pytest.raises(ConfigError, match="expected all, last, loss_mask, mean or stride:N"):
        make(select=value)


def test_check_samples_is_refused_with_a_mean() -> None:
    assert make(select="all", check_samples=3).check_samples == 3
    with pytest.raises(ConfigError, match="check_samples: expected 0 with select=mean, got 3"):
        make(select="mean", check_samples=3)


def test_relative_paths_are_refused_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_in_job("output", "runs/here")  # no job
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    for fine in ("/runs/here", "s3://bucket/run"):
        refuse_in_job("output", fine)
    with pytest.raises(ConfigError, match=r"DEST: expected an absolute path or a URL.*\$PWD/out"):
        refuse_in_job("DEST", "out")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["part_seconds", "stop_seconds", "wait_seconds", "deadline"])
def test_numbers_are_finite(name: str, value: float) -> None:
    """JSON has no other numbers, and a thread cannot wait for ever by a time limit."""
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        make(**{name: value})
    for group in ({"store": {"retry_seconds": value}}, {"replica": {"resources": {"a": value}}}):
        with pytest.raises(ConfigError, match=f"^{next(iter(group))}"):
            make(**group)


@pytest.mark.parametrize("resources", [{"CPU": 1}, {"GPU": 1}, {"memory": 1}, {"x": -1}, {"x": 0.00001}])
def test_resources_that_ray_refuses_are_refused_before_the_run_begins(resources: dict[str, float]) -> None:
    assert make(replica={"resources": {"x": 0.5, "y": 2}}).replica.resources["y"] == 2
    with pytest.raises(ConfigError, match=r"replica\.resources: expected (custom resources|amounts)"):
        make(replica={"resources": resources})
