from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.config import ExtractConfig, load_config, parse_storage_options
from hsx_dist.config.engine_arguments import trusts_remote_code
from hsx_dist.errors import ConfigError
from tests.unit.growth import check_linear

LEAST: dict[str, Any] = {"output": "runs/x", "model": "m"}
#: Each line has ten aliases of the line before.
ALIASES = "a0: &a0 {k: value}\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8))


def refusal(*overrides: str, **direct: Any) -> str:
    with pytest.raises(ConfigError) as e:
        load_config(None, overrides, **{**LEAST, **direct})
    assert e.value.__cause__ is None
    return str(e.value)


def test_defaults() -> None:
    config = load_config(None, **LEAST)
    assert (config.codec, config.layout, config.layers, config.pool) == ("split", "part", "eagle3", "ray")
    assert config.part_bytes == 256 << 20
    assert config.writers.credit_bytes == 256 << 20
    assert (config.input.id, config.input.limit, config.replica.num_gpus) == ("id", None, None)


def test_every_field_says_what_it_does() -> None:
    def walk(model: type[Any]) -> None:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                walk(field.annotation)

    walk(ExtractConfig)


def test_file_then_direct_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "output: a\nmodel: m\npart_bytes: 128MiB\nengine_kwargs: {dtype: auto, seed: 1}\ninput: {path: p}\n"
    )
    config = load_config(str(path), ["engine_kwargs.dtype=float32", "layers=[2, last]", "input.id="], model="n")
    assert config.model == "n"
    assert config.part_bytes == 128 << 20
    assert config.engine_kwargs == {"dtype": "float32", "seed": 1}
    assert config.layers == [2, "last"]
    assert config.input.path == "p"
    assert config.input.id is None


def test_aliases(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("output: a\nmodel: m\nengine_kwargs: {a: &a {seed: 1}, b: *a}\n")
    config = load_config(str(path), ["engine_kwargs.c={d: &d [1], e: *d}"])
    assert config.engine_kwargs == {"a": {"seed": 1}, "b": {"seed": 1}, "c": {"d": [1], "e": [1]}}


def test_an_override_changes_one_setting(tmp_path: Path) -> None:
    """An alias makes one mapping the value of two settings."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "{output: o, model: m, input: {path: i, storage_options: &o {anon: true, client_kwargs: {a: 1}}},"
        " store: {storage_options: *o}}"
    )
    config = load_config(str(path), ["store.storage_options.client_kwargs.a=2", "store.storage_options.anon=false"])
    assert config.input.storage_options == {"anon": True, "client_kwargs": {"a": 1}}
    assert config.store.storage_options == {"anon": False, "client_kwargs": {"a": 2}}


def test_an_override_changes_no_mapping_of_the_caller() -> None:
    given = {"dtype": "float32", "hf_overrides": {"a": 1}}
    config = load_config(
        None, ["engine_kwargs.seed=7", "engine_kwargs.hf_overrides.a=2"], model="m", output="o", engine_kwargs=given
    )
    assert config.engine_kwargs == {"dtype": "float32", "seed": 7, "hf_overrides": {"a": 2}}
    assert given == {"dtype": "float32", "hf_overrides": {"a": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000", 1000),
        ("010", 8),
        ("0x1F", 31),
        ("-0b11", -3),
        (str((1 << 64) - 1), (1 << 64) - 1),
        ("1.5e+3", 1500.0),
        ("-.inf", float("-inf")),
        ("1e-5", "1e-5"),  # PyYAML's rule: a number with an exponent has a point and a sign
        ("12:30", "12:30"),
        ("1:30.5", "1:30.5"),
        ("1" + ":1" * 50_000, "1" + ":1" * 50_000),  # as a number to base 60, it took a second
    ],
)
def test_numbers(text: str, value: object) -> None:
    found = load_config(None, [f"engine_kwargs.x={text}"], **LEAST).engine_kwargs["x"]
    assert found == value
    assert type(found) is type(value)


def test_a_long_integer_of_a_caller_is_refused() -> None:
    assert "max_tries: expected" in refusal(max_tries=-(1 << 20_000))
    assert "got an integer of more than 64 bits" in refusal(model=1 << 20_000)


def test_an_override_creates_missing_parent_mappings() -> None:
    config = load_config(None, ["store.storage_options.client_kwargs.endpoint_url=http://h:1"], **LEAST)
    assert config.store.storage_options == {"client_kwargs": {"endpoint_url": "http://h:1"}}


@pytest.mark.parametrize("value", ["67108864", "64MiB", "64 MiB"])
def test_byte_sizes(value: str) -> None:
    assert load_config(None, [f"segment_bytes={value}"], **LEAST).segment_bytes == 64 << 20


def test_errors_of_unknown_names_suggest_the_nearest_name() -> None:
    message = refusal("part_byte=1", "writers.per_nod=1", "input.pth=x", "zzz=1")
    lines = message.splitlines()
    assert len(lines) == 4
    for near in (
        "part_bytes?",
        "writers.per_nod: ",
        "per_node?",
        "input.pth: ",
        "(did you mean path?)",
        "Known here: output",
    ):
        assert near in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["part_bytes=abc"], ["part_bytes: expected a number of bytes", "'abc'"]),
        (["part_bytes=0"], ["part_bytes: expected greater than 0"]),
        (["part_bytes=1MiB"], ["part_bytes: expected at least segment_bytes (64MiB), got 1MiB"]),
        (["in_flight_bytes=127MiB"], ["in_flight_bytes: expected at least twice segment_bytes (128MiB), got 127MiB"]),
        (["writers.credit_bytes=15MiB"], ["writers.credit_bytes: expected at least twice page_bytes (16MiB)"]),
        (["page_bytes=65MiB"], ["segment_bytes: expected at least page_bytes"]),
        (["min_replicas=2"], ["max_replicas: expected at least min_replicas (2), got 1"]),
        (["max_replicas=0"], ["max_replicas: expected greater than or equal to 1"]),
        (["codec=splt"], ["codec: expected one of the codecs fp8-token, none, split, zstd", "did you mean split?"]),
        (["codec={level: 3}"], ["a mapping without name"]),
        (["codec=3"], ["codec: expected a codec's name", "got 3"]),
        (["layers=[1.5]"], ["layers: expected layer ids", "1.5"]),
        (["layers=[]"], ["layers: expected layer ids"]),
        (["layers=true"], ["layers: expected layer ids"]),
        (["pool=rays"], ["pool: expected 'ray' or 'threads', got 'rays'"]),
        (["revision=123"], ["revision: expected a valid string, got 123. Put it in quotes"]),
        (["input=3"], ["input: expected"]),
        (["store.retry_seconds=.inf"], ["store.retry_seconds: expected a finite number, got inf"]),
        (["replica.resources.tpu=.nan"], ["replica.resources.tpu: expected a finite number"]),
        (["deadline=.inf"], ["deadline: expected seconds from the start (more than 0)"]),
        (["stop_seconds=1e300"], ["stop_seconds: expected"]),
        (["writers.uploads=1000000"], ["writers.uploads: expected less than or equal to 256"]),
        (["engine_kwargs.speculative_config={}"], ["engine_kwargs.speculative_config", "the extraction sets it"]),
        (["engine_kwargs.kv_transfer_config={}"], ["engine_kwargs.kv_transfer_config", "its own connector"]),
        (["engine_kwargs.model=x"], ["engine_kwargs.model", "use model"]),
        (["engine_kwargs.pipeline_parallel_size=2"], ["expected 1, got 2", "tensor_parallel_size"]),
        (["engine_kwargs.runner=pooling"], ["engine_kwargs.runner", "auto or generate, got 'pooling'"]),
        (["engine_kwargs.convert=embed"], ["engine_kwargs.convert", "auto or none, got 'embed'"]),
        (
            ["engine_kwargs.trust_remote_code='false'"],
            ["engine_kwargs.trust_remote_code: expected a boolean"],
        ),
        (["engine_kwargs.trust_remote_code=0"], ["engine_kwargs.trust_remote_code: expected a boolean"]),
        (
            ["engine_kwargs.enforce_eager=' False'"],
            ["engine_kwargs.enforce_eager: expected a boolean"],
        ),
        (["sampling_params.ignore_eos='no'"], ["sampling_params.ignore_eos: expected a boolean"]),
        (
            ["chat_template_kwargs.enable_thinking='false'"],
            ["chat_template_kwargs.enable_thinking: expected a boolean"],
        ),
        (["sampling_params.n=2"], ["sampling_params.n: expected 1, got 2"]),
        (["sampling_params.kv_transfer_params={}"], ["sampling_params.kv_transfer_params"]),
        (["sampling_params.extra_args={kv_transfer_params: {}}"], ["sampling_params.extra_args.kv_transfer_params"]),
        (["chat_template_kwargs.tokenize=false"], ["chat_template_kwargs.tokenize"]),
        (["output="], ["output: expected a valid string, got nothing"]),
        (["nonsense"], ["expected an override as key.sub=value"]),
        (["a..b=1"], ["expected an override as key.sub=value"]),
        (["layers=[1"], ["layers: line 1", "expected YAML"]),
        (["output.x=1"], ["expected output to be a mapping, got a str"]),
    ],
)
def test_errors_name_the_expected_value_and_the_given_value(overrides: list[str], words: list[str]) -> None:
    message = refusal(*overrides)
    for word in ("expected", *words):
        assert word in message
    assert "got" in message
    assert "pydantic" not in message


def test_one_error_lists_all_problems() -> None:
    assert len(refusal("part_bytes=1KiB", "in_flight_bytes=1KiB", "min_replicas=9").splitlines()) == 3


def test_the_models_code_runs_only_for_true(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HSX_TEST_TRUST", "false")
    path = tmp_path / "c.yaml"
    path.write_text("engine_kwargs: {trust_remote_code: '${env:HSX_TEST_TRUST}'}")
    with pytest.raises(ConfigError, match=r"engine_kwargs\.trust_remote_code: expected a boolean or null, got a str"):
        load_config(str(path), **LEAST)
    for value in (True, False, None):
        kwargs = load_config(None, **LEAST, engine_kwargs={"trust_remote_code": value}).engine_kwargs
        assert trusts_remote_code(kwargs) is (value is True)
    # A copy of a configuration is not checked.
    assert not trusts_remote_code({"trust_remote_code": "false"})


def test_keyword_arguments_for_other_libraries_are_not_changed() -> None:
    direct = {
        "engine_kwargs": {"tensor_parallel_size": 2, "hf_overrides": {"a": [1, 2]}, "pipeline_parallel_size": 1},
        "sampling_params": {"max_tokens": 4, "n": 1, "extra_args": {"x": 1}},
        "chat_template_kwargs": {"enable_thinking": False, "reasoning": "off"},
    }
    config = load_config(None, **LEAST, **direct)
    assert {name: getattr(config, name) for name in direct} == direct


#: Values that JSON cannot hold, and lists of pairs, which are no mappings.
TAGGED = ["!!set {x}", "!!binary eA==", "!!omap [{x: y}]", "!!pairs [{x: y}]", "!<https://me:pw@host> x"]


def test_a_date_is_text() -> None:
    assert load_config(None, ["engine_kwargs.x=[2024-01-31, !!timestamp 2024-01-31]"], **LEAST).engine_kwargs == {
        "x": ["2024-01-31", "2024-01-31"]
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("- 1\n", "expected a mapping"),
        ("a: [1\n", "line 2"),
        ("model: a\nmodel: b\n", "is given twice"),
        ("\tx", "expected YAML"),
        ("output: 0x_\n", "expected YAML"),
        (f"task_rows: {'9' * 5000}\n", "line 1, column 12 expected YAML, got: a number of more than 100 characters"),
        (f"task_rows: 0x{'f' * 5000}\n", "a number of more than 100 characters"),
        (f"engine_kwargs: {{a: 1.{'0' * 5000}}}\n", "a number of more than 100 characters"),
        (f"engine_kwargs: {{{1 << 64}: 1}}\n", "an integer of more than 64 bits"),
        ("#" * ((1 << 18) + 1), "expected at most 262,144 characters of YAML, got more"),
        ("[" * 3000, "expected YAML"),
        ("? {a: b}\n: c\n", "expected YAML"),
        (ALIASES, "line 5, column 55 expected YAML, got: aliases of more than 100,000 characters"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n", "line 3, column 3 expected YAML, got: the key <<, which is not supported"),
        ("a: &a [*a]\n", "an alias within its own value"),
        *((f"a: {value}\n", "expected YAML, got: could not determine a constructor for the tag …") for value in TAGGED),
    ],
)
def test_missing_and_malformed_files_are_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as e:
        load_config(str(path))
    assert words.lower() in str(e.value).lower()


def test_an_empty_file_raises_an_error_that_lists_required_settings(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match=r"output: expected a value, got nothing\. Set it\nmodel: "):
        load_config(str(path))


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSX_TEST_BUCKET", "b-1")
    config = load_config(None, ["output=s3://${env:HSX_TEST_BUCKET}/runs/${env:HSX_TEST_BUCKET}"], model="m")
    assert config.output == "s3://b-1/runs/b-1"


@pytest.mark.parametrize(
    ("value", "words"), [("${env:HSX_TEST_UNSET}", "HSX_TEST_UNSET"), ("s3://${env:HOME", "closing brace")]
)
def test_missing_environment_variables_are_refused(value: str, words: str) -> None:
    assert words in refusal(output=value)
    assert "output: " in refusal(output=value)


def test_references_without_their_braces_take_linear_time() -> None:
    def make(n: int) -> Callable[[], object]:
        return lambda: refusal(output="${env:" * n)

    check_linear(make, 1000)


def test_storage_options_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSX_TEST_KEY", "k1")
    options = parse_storage_options(["key=${env:HSX_TEST_KEY}", "client_kwargs.endpoint_url=http://h:1", "anon=false"])
    assert options == {"key": "k1", "client_kwargs": {"endpoint_url": "http://h:1"}, "anon": False}
    with pytest.raises(ConfigError, match="no credential on a command line"):
        parse_storage_options(["secret=abc"])


@pytest.mark.parametrize(
    "value",
    ["!Passw0rd-of-mine", "*Passw0rd", "!Passw0rd!x y", "!'Passw0rd' y", "a\nPassw0rd x: 1\nPassw0rd x: 2"],
)
def test_an_error_in_the_file_does_not_show_its_text(tmp_path: Path, value: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model: m\noutput: o\nlayers: {value}\n")
    with pytest.raises(ConfigError) as e:
        load_config(path)
    assert "Passw0rd" not in str(e.value)


def test_a_file_in_place_of_a_group_names_a_member_to_set() -> None:
    with pytest.raises(ConfigError, match=r"^input: expected a group of settings, got 'rows.jsonl'\. .* input\.path$"):
        load_config(None, ("input=rows.jsonl", "model=m", "output=o"))


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("store.storage_options", "{secret:Hunter2}"),
        ("store.storage_options", "{key: a, secret=Hunter2}"),
        ("store.storage_options", "{client_kwargs: {headers: {Authorization:Hunter2}}}"),
        ("replica.env", "{WANDB_API_KEY:Hunter2}"),
    ],
)
def test_a_value_that_yaml_takes_for_a_name_is_refused_and_not_shown(tmp_path: Path, setting: str, text: str) -> None:
    """Names are stored and shown, also those of settings whose values are not."""
    path = tmp_path / "job.yaml"
    outer, _, inner = setting.partition(".")
    path.write_text(f"model: m\noutput: o\n{outer}: {{{inner}: {text}}}\n")
    for given in ((path, ()), (None, ("model=m", "output=o", f"{setting}={text}"))):
        with pytest.raises(ConfigError, match="needs a blank behind the colon") as told:
            load_config(*given)
        assert "Hunter2" not in str(told.value)
