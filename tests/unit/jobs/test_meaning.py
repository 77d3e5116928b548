"""A run resumes only with the settings, and the weights, with which its samples were computed."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from hsx_dist.config import ExtractConfig, load_config
from hsx_dist.config.engine_arguments import SPEED_ONLY
from hsx_dist.config.secrets import compared_form, hide_secrets
from hsx_dist.errors import ConfigError, EngineError, RunMismatch
from hsx_dist.fleet.replica import Replica
from hsx_dist.fleet.same_model import require_files
from hsx_dist.format.header import Origin
from hsx_dist.format.identity import is_of_another
from hsx_dist.format.place import start_run
from hsx_dist.jobs import preflight
from hsx_dist.jobs.attempt import open_or_start_run
from hsx_dist.jobs.extract import engine_spec, extract
from hsx_dist.jobs.meaning import differences, run_meaning
from hsx_dist.jobs.preflight import check_engine_arguments, engine_argument_names, examine_model, pin_revision
from hsx_dist.models import weights
from hsx_dist.models.tiny import tiny_llama
from hsx_dist.models.weights import folder_weights
from hsx_dist.testing.stores import MemoryStore

COMMITS = "a" * 40, "b" * 40


def config(model: object, **settings: Any) -> ExtractConfig:
    settings = settings if "capture" in settings else {"layers": [1], **settings}
    return load_config(None, (), model=str(model), output="memory://out", pool="threads", **settings)


def resume(store: MemoryStore, written: ExtractConfig) -> dict[str, Any]:
    """Start or resume a run as the driver does. Returns ``run.json``."""
    pinned = pin_revision(written)
    place, _ = open_or_start_run(written, store, run_meaning(pinned, examine_model(pinned)))
    return dict(place.info)


def test_settings_that_differ_are_named_down_to_the_field() -> None:
    before = {"input": {"text": "text", "id": "id"}, "layers": [1], "engine_kwargs": {"dtype": "float32"}}
    now = {"input": {"text": "body", "id": "id"}, "layers": [1], "engine_kwargs": {}, "select": "last"}
    assert differences({"meaning": before}, now, {}) == [
        ("engine_kwargs.dtype", "float32", "(not set)"),
        ("input.text", "text", "body"),
        ("select", None, "last"),
    ]
    assert differences({"meaning": before}, before, {}) == []


def test_the_arguments_of_speed_are_vllms() -> None:
    """All others, also those of later versions, are part of the meaning."""
    from vllm.engine.arg_utils import EngineArgs

    assert not SPEED_ONLY - {f.name for f in dataclasses.fields(EngineArgs)}


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("sampling_params", {"max_tokens": None}, {}),  # to the end; one token
        ("sampling_params", {"seed": 5}, {"seed": 5.0}),  # rows' seeds are made of the text
        ("chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": 0}),  # ``is false``
        ("chat_template_kwargs", {"tools_in_user_message": None}, {}),  # ``is not defined``
        ("chat_template_kwargs", {"documents": [{"a": 1, "b": 2}]}, {"documents": [{"b": 2, "a": 1}]}),  # printed
        ("chat_template_kwargs", {"document": {"a": 1, "b": 2}}, {"document": {"b": 2, "a": 1}}),
        ("engine_kwargs", {"hf_overrides": {"x": None}}, {"hf_overrides": {}}),
        ("engine_kwargs", {"max_model_len": None}, {}),
    ],
)
def test_values_that_python_calls_equal_are_other_settings(
    tmp_path: Path, name: str, first: dict[str, Any], then: dict[str, Any]
) -> None:
    model, store = tiny_llama(tmp_path / "model"), MemoryStore()
    given, changed = (config(model, include_output_tokens=True, **{name: value}) for value in (first, then))
    resume(store, given)
    resume(store, given)
    with pytest.raises(RunMismatch, match=name):
        resume(store, changed)
    other = MemoryStore()
    resume(other, changed)
    with pytest.raises(RunMismatch, match=name):
        resume(other, given)


def test_the_order_of_arguments_is_no_setting(tmp_path: Path) -> None:
    model, store = tiny_llama(tmp_path / "model"), MemoryStore()
    resume(store, config(model, chat_template_kwargs={"a": 1, "b": 2}))
    resume(store, config(model, chat_template_kwargs={"b": 2, "a": 1}))


def test_arguments_that_choose_the_points_of_a_preset_are_settings(tmp_path: Path) -> None:
    """Some of vLLM's MoE kernels return no router choices, and the preset leaves them out."""
    model, store = tiny_llama(tmp_path / "model"), MemoryStore()
    first, then = ({"moe_backend": name} for name in ("triton", "flashinfer_trtllm"))
    info = resume(store, config(model, capture={"preset": "mlp"}, engine_kwargs=first))
    for changed in (then, {}):
        with pytest.raises(RunMismatch, match="moe_backend"):
            resume(store, config(model, capture={"preset": "mlp"}, engine_kwargs=changed))
    # A run of an earlier version has the argument in its settings alone.
    old = dict(info["meaning"])
    assert old.pop("engine_kwargs_of_preset") == first
    assert differences({**info, "meaning": old}, info["meaning"], {}) == []
    named = MemoryStore()
    resume(named, config(model, capture={"points": {"mlp_out": [0]}}, engine_kwargs=first))
    resume(named, config(model, capture={"points": {"mlp_out": [0]}}, engine_kwargs=then))


def test_a_model_that_is_not_here_is_announced_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a wrong id, the hub's client prints warnings for half a minute before it raises."""
    from transformers import AutoConfig

    asked: list[str] = []

    def from_pretrained(model: str, **_: Any) -> Any:
        asked.append(caplog.text)
        raise OSError(f"{model} is no model")

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(ConfigError, match="'org/absent': org/absent is no model Check the name"):
        examine_model(config("org/absent"))
    assert "org/absent is neither a folder nor in Hugging Face's cache: looking it up on the hub" in asked.pop()
    with pytest.raises(ConfigError, match=r"got '\./absent/model', which does not exist\. Check the path$"):
        examine_model(config("./absent/model"))
    assert not asked


def test_an_argument_that_vllm_does_not_have_is_refused_before_a_run_is_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stored run with a misspelt argument would refuse the corrected command."""
    from vllm.engine.arg_utils import EngineArgs

    assert engine_argument_names() == {f.name for f in dataclasses.fields(EngineArgs)}
    check_engine_arguments(config("m", engine_kwargs={"enforce_eager": True}))
    with pytest.raises(ConfigError, match=r"got 'enforce_eagr'\. Did you mean enforce_eager"):
        check_engine_arguments(config("m", engine_kwargs={"enforce_eagr": True}))
    with pytest.raises(ConfigError, match=r"got 'zzzzzzzz'\. Correct or remove it"):
        extract(["a"], model="m", output=tmp_path / "run", engine_kwargs={"zzzzzzzz": 1})
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_engine_arguments(config("m", engine_kwargs={"unknown_without_vllms_source": 1}))


@pytest.mark.parametrize("prompts", ["Hello.", b"Hello.", {"text": "Hello."}])
def test_one_prompt_is_not_a_list(prompts: Any, tmp_path: Path) -> None:
    """The characters of a text would be prompts."""
    with pytest.raises(ConfigError, match=r"expected a list of prompts, got one (str|bytes|dict)\. Pass \[prompt\]"):
        extract(prompts, model="m", output=tmp_path / "run")


def test_a_table_is_not_a_list(tmp_path: Path) -> None:
    """A loop over a pandas data frame gives the names of its columns, and one over an Arrow table its columns."""
    rows = {"text": ["Hello."]}
    for table in (pd.DataFrame(rows), pa.table(rows)):
        with pytest.raises(
            ConfigError, match=r"expected a list of prompts, got a table \((DataFrame|Table)\)\. Pass its"
        ):
            extract(table, model="m", output=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argument",
    [
        {"quantization_config": {"linear": "fp8"}},
        {"kv_cache_dtype": "fp8"},
        {"attention_config": {"use_trtllm_attention": True}},
        {"additional_config": {"x": 1}},
        {"an_argument_of_a_later_version": 1},
    ],
)
def test_an_engine_argument_that_may_change_samples_is_compared(argument: dict[str, Any]) -> None:
    without, given = (config("m", engine_kwargs=kwargs) for kwargs in ({}, {**argument, "max_num_seqs": 4}))
    for one, other in ((without, given), (given, without)):
        assert differences({"meaning": one.meaning(), "settings": one.public()}, other.meaning(), {})
    # An earlier version recorded all arguments, but compared only some of them.
    old = {"meaning": without.meaning(), "settings": given.public()}
    assert not differences(old, given.meaning(), {})
    assert differences(old, without.meaning(), {})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"system": "See https://a.org/x. Questions? Be brief."}, {"system": "See https://a.org/x. Questions? Swear."}),
        ({"bos_token": "<a>"}, {"bos_token": "<b>"}),
        ({"persona_key": ["kind"]}, {"persona_key": ["rude"]}),
        ({"key_multiplier": 0.5}, {"key_multiplier": 0.25}),
        ({"x": {"num_key_value_heads": 8}}, {"x": {"num_key_value_heads": 4}}),
        ({"url": "https://user:SECRET1@host/x"}, {"url": "https://user:SECRET2@host/x"}),
        ({"x": {"sliding_window": None}}, {"x": {}}),
    ],
)
def test_hidden_values_are_compared(one: dict[str, Any], other: dict[str, Any]) -> None:
    for given in ({"chat_template_kwargs": one}, {"engine_kwargs": {"hf_overrides": one}}):
        [name] = given
        changed = other if name == "chat_template_kwargs" else {"hf_overrides": other}
        before, now = config("m", **given), config("m", **{name: changed})
        stored = json.loads(json.dumps({"meaning": {**before.meaning(), "weights": None}, "settings": before.public()}))
        assert "SECRET" not in json.dumps(stored)
        assert not differences(stored, {**before.meaning(), "weights": None}, {})
        assert differences(stored, {**now.meaning(), "weights": None}, {})
        # An earlier version hid the values.
        old = {"meaning": hide_secrets(before.meaning()) | {name: hide_secrets(given[name])}}
        assert not differences(old, before.meaning(), {})


@pytest.mark.parametrize("value", ["b", {"c": "d"}, ["e", "f"], {"g": None, "h": 1}])
@pytest.mark.parametrize("name", ["chat_template_kwargs", "engine_kwargs"])
def test_a_pair_within_a_secret_that_an_earlier_version_took_for_two_texts_resumes(name: str, value: object) -> None:
    """It took ``apitoken`` for no secret's name."""
    now = config("m", **{name: {"x": {"credentials": [["apitoken", value], ["token", "a"]]}}}).meaning()
    [pair, _] = now[name]["x"]["credentials"]
    assert set(pair) == {"apitoken"}
    before = json.loads(json.dumps(now))
    before[name]["x"]["credentials"][0] = compared_form(["apitoken", value], within=True)
    assert before != now
    assert not differences({"meaning": {**before, "weights": None}}, {**now, "weights": None}, {})
    before[name]["x"]["credentials"][0][1] = "(not shown) 00000000"
    assert differences({"meaning": {**before, "weights": None}}, {**now, "weights": None}, {})


@pytest.mark.parametrize("name", ["chat_template_kwargs", "engine_kwargs"])
def test_a_text_that_an_earlier_version_took_for_no_credential_is_compared(name: str) -> None:
    def given(token: str) -> ExtractConfig:
        return config("m", **{name: {"additional_config": {"note": f"Bearer {token}", "api_key": "x", "n": [1]}}})

    now = given("hf_one").meaning()
    assert "hf_one" not in json.dumps(now)
    text = json.dumps({**now, "weights": None})
    stored = text.replace(now[name]["additional_config"]["note"], "Bearer hf_one")
    assert "hf_one" in stored
    for before in (text, stored):
        assert not differences({"meaning": json.loads(before)}, {**now, "weights": None}, {})
        found = differences({"meaning": json.loads(before)}, {**given("hf_two").meaning(), "weights": None}, {})
        assert len(found) == 1
        assert "hf_" not in str(found)


@pytest.mark.parametrize("argument", ["tokenizer", "generation_config", "hf_config_path"])
def test_folders_in_engine_arguments_are_compared(argument: str, tmp_path: Path) -> None:
    store, model, other = MemoryStore(), tiny_llama(tmp_path / "model"), tiny_llama(tmp_path / "other")
    given = config(model, engine_kwargs={argument: str(other), "download_dir": str(tmp_path)})
    resume(store, given)
    assert set(engine_spec(given, examine_model(given)).files) == {str(model), str(other)}
    (other / "generation_config.json").write_text("{}")
    with pytest.raises(RunMismatch, match=rf"folders\.{argument}="):
        resume(store, given)


def test_a_trainers_own_files_may_change(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    before = folder_weights(str(model))
    for name in ("optimizer.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json", "pytorch_model.bin"):
        (model / name).write_bytes(b"x")
    assert folder_weights(str(model)) == before  # vLLM loads safetensors if there are any
    (model / "model.safetensors").unlink()
    pickled = folder_weights(str(model))
    (model / "optimizer.pt").write_bytes(b"y")
    assert folder_weights(str(model)) == pickled
    (model / "pytorch_model.bin").write_bytes(b"y")
    assert folder_weights(str(model)) != pickled


def test_names_that_are_numbers_resume(tmp_path: Path) -> None:
    store, model = MemoryStore(), tiny_llama(tmp_path / "model")
    settings = {"engine_kwargs": {"hf_overrides": {"id2label": {0: "a", 1: "b"}}}}
    resume(store, config(model, **settings))
    resume(store, config(model, **settings))


def test_a_run_becomes_neither_lossy_nor_lossless(tmp_path: Path) -> None:
    store, model = MemoryStore(), tiny_llama(tmp_path / "model")
    resume(store, config(model, codec="split"))
    resume(store, config(model, codec="zstd"))
    with pytest.raises(RunMismatch, match="codec='fp8-token'"):
        resume(store, config(model, codec="fp8-token"))


def test_a_replica_compares_its_tokenizer_and_template(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    facts = examine_model(config(model))
    replica = Replica.__new__(Replica)
    replica._spec = replace(engine_spec(config(model), facts), files={})
    template = model / "chat_template.jinja"
    template.write_text("other" + template.read_text())
    with pytest.raises(EngineError, match="expected the driver's tokenizer and chat template"):
        replica._start()


def started(
    monkeypatch: pytest.MonkeyPatch, spec: Any, load: Any, max_model_len: int, dtype: str = "torch.bfloat16"
) -> None:
    """Start a replica. ``load`` is called while vLLM would load the model."""

    def engine(**_: Any) -> Any:
        load()
        settings = SimpleNamespace(model_config=None, speculative_config=None, structured_outputs_config=None)
        return SimpleNamespace(
            llm_engine=SimpleNamespace(vllm_config=settings, tokenizer=None),
            model_config=SimpleNamespace(max_model_len=max_model_len, dtype=dtype),
        )

    monkeypatch.setattr("vllm.LLM", engine)
    monkeypatch.setattr("vllm.SamplingParams.verify", lambda *_: None)
    replica: Any = Replica.__new__(Replica)
    replica._spec, replica._server, replica._transport, replica._address, replica._name = spec, None, "inline", "", "0"
    replica._core_here = replica._in_process = False
    replica._start()


def test_a_checkpoint_that_is_written_while_vllm_loads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path / "model", seed=0)
    spec = engine_spec(config(model), examine_model(config(model)))
    started(monkeypatch, spec, lambda: None, 512)
    with pytest.raises(EngineError, match="expected the files of the driver's"):
        started(monkeypatch, spec, lambda: tiny_llama(model, seed=1), 512)


def test_a_length_that_depends_on_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path / "model")
    for length, refused in ((-1, True), ("auto", True), (None, False)):
        given = config(model, engine_kwargs={} if length is None else {"max_model_len": length})
        spec = engine_spec(given, examine_model(given))
        started(monkeypatch, spec, lambda: None, 512)
        if refused:
            with pytest.raises(EngineError, match="got memory for 300"):
                started(monkeypatch, spec, lambda: None, 300)
        else:
            started(monkeypatch, spec, lambda: None, 300)


def test_an_engine_of_another_dtype_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses float16 for a bfloat16 checkpoint on a GPU without bfloat16. The run would have both."""
    model = tiny_llama(tmp_path / "model")
    for kwargs, dtype in (({}, "bfloat16"), ({"dtype": "half"}, "float16"), ({"dtype": "float32"}, "float32")):
        given = config(model, engine_kwargs=kwargs)
        spec = engine_spec(given, examine_model(given))
        started(monkeypatch, spec, lambda: None, 512, f"torch.{dtype}")
        for other in {"float16", "bfloat16", "float32"} - {dtype}:
            with pytest.raises(EngineError, match=f"expected states in {dtype} .* computes in {other} on"):
                started(monkeypatch, spec, lambda: None, 512, f"torch.{other}")


def test_a_folder_with_other_weights_is_refused_at_resume_and_on_another_node(tmp_path: Path) -> None:
    """A training writes its next checkpoint to the same path: the same names, sizes and headers."""
    store, model = MemoryStore(), tiny_llama(tmp_path / "model", seed=0)
    assert resume(store, config(model))["meaning"]["weights"] == folder_weights(str(model))
    facts = examine_model(config(model))
    assert preflight.about(config(model), facts, {})["weights"] == facts.weights
    resume(store, config(model))
    tiny_llama(model, seed=1)
    with pytest.raises(RunMismatch, match=r"weights='[0-9a-f]{64}' \(stored: '[0-9a-f]{64}'\)"):
        resume(store, config(model))
    replica = Replica.__new__(Replica)
    replica._spec = engine_spec(config(model), facts)
    with pytest.raises(EngineError, match=r"expected the files of the driver's .*, got other files"):
        replica._start()


def test_a_run_of_an_earlier_version_without_weights_resumes(tmp_path: Path) -> None:
    store, model = MemoryStore(), tiny_llama(tmp_path / "model")
    meaning = run_meaning(config(model), examine_model(config(model)))
    start_run(store, {"meaning": {k: v for k, v in meaning.items() if k != "weights"}})
    resume(store, config(model))


def test_a_branch_that_moved_is_refused_and_its_commit_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas load the commit to which the driver resolved the branch."""
    folder = tmp_path / "models--org--name"
    for i, commit in enumerate(COMMITS):
        tiny_llama(folder / "snapshots" / commit, seed=i)
    (folder / "refs").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def move(commit: str) -> None:
        (folder / "refs" / "main").write_text(commit)

    store = MemoryStore()
    tiny_llama(tmp_path / "m")
    move(COMMITS[0])
    info = resume(store, config("org/name"))
    assert info["meaning"]["revision"] == COMMITS[0]
    assert info["meaning"]["weights"] is None
    assert info["settings"]["revision"] is None
    pinned = pin_revision(config("org/name"))
    assert engine_spec(pinned, examine_model(pinned)).revision == COMMITS[0]
    move(COMMITS[1])
    with pytest.raises(RunMismatch, match=rf"revision='{COMMITS[1]}' \(stored: '{COMMITS[0]}'\)"):
        resume(store, config("org/name"))
    resume(store, config("org/name", revision=COMMITS[0]))
    tokenizer = {"engine_kwargs": {"tokenizer": "org/name"}}
    other = MemoryStore()
    assert (
        resume(other, config(tmp_path / "m", **tokenizer))["meaning"]["engine_kwargs"]["tokenizer_revision"]
        == COMMITS[1]
    )
    move(COMMITS[0])
    with pytest.raises(RunMismatch, match=r"engine_kwargs\.tokenizer_revision="):
        resume(other, config(tmp_path / "m", **tokenizer))
    move(COMMITS[1])
    # An earlier version recorded the revision as written.
    for written, fine in ((None, True), ("main", False)):
        old = MemoryStore()
        start_run(old, {"meaning": {k: v for k, v in info["meaning"].items() if k != "weights"} | {"revision": None}})
        if fine:
            resume(old, config("org/name", revision=written))
        else:
            with pytest.raises(RunMismatch, match="revision='main'"):
                resume(old, config("org/name", revision=written))


def test_the_hash_of_a_folder_is_of_configuration_code_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        return str(folder_weights(str(tmp_path)))

    big = bytearray(5_000_000)
    seen = [put("config.json", b"{}"), put("modeling.py", b"x"), put("a.safetensors", bytes(big))]
    for place in (0, 3000, len(big) - 1):
        big[place] = 1
        seen.append(put("a.safetensors", bytes(big)))
    seen += [put(f"{name}.json", b"{}") for name in ("params", "tokenizer_config", "preprocessor_config", "m.index")]
    seen += [put("a.safetensors", bytes(big) + b"\0"), put("config.json", json.dumps({"rope_theta": 1}).encode())]
    assert len(set(seen)) == len(seen)
    assert put("README.md", b"x") == put("trainer_state.json", b"{}") == seen[-1]
    assert folder_weights("org/name") is None
    (tmp_path / "optimizer.pt").mkdir()
    assert folder_weights(str(tmp_path)) == seen[-1]
    monkeypatch.setattr(weights, "open_regular", lambda *_: os.open("/nowhere", os.O_RDONLY))
    with pytest.raises(ConfigError, match="expected a readable file of the model"):
        folder_weights(str(tmp_path))


@pytest.mark.parametrize(("load_format", "file"), [("pt", "model.pt"), ("npcache", "pytorch_model.bin")])
def test_weights_that_vllm_loads_next_to_safetensors_are_compared(tmp_path: Path, load_format: str, file: str) -> None:
    model, store = tiny_llama(tmp_path / "model"), MemoryStore()
    (model / file).write_bytes(b"one")
    pickled, plain = config(model, engine_kwargs={"load_format": load_format}), config(model)
    resume(store, pickled)
    resume(other := MemoryStore(), plain)
    spec = engine_spec(pickled, examine_model(pickled))
    require_files(spec)
    (model / file).write_bytes(b"two")
    with pytest.raises(RunMismatch, match="weights="):
        resume(store, pickled)
    with pytest.raises(EngineError, match="expected the files of the driver's"):
        require_files(spec)
    resume(other, plain)


@pytest.mark.parametrize(
    ("stored", "now", "another"),
    [
        ({"revision": None}, {"revision": "a"}, False),  # an earlier version recorded no commit
        ({"revision": "b"}, {"revision": "a"}, True),
        ({"weights": "b"}, {"weights": "a"}, True),
        ({}, {"weights": "a"}, False),
    ],
)
def test_samples_of_other_weights_are_other_samples(stored: Any, now: Any, another: bool) -> None:
    about = {"model": "m", "norm": "pre"}
    found = Origin({**about, **stored}, {"identity": {"request": "r"}})
    assert is_of_another(found, "r", {**about, **now}) is another
