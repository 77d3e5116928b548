from __future__ import annotations

import json
from typing import Any

import pytest

from hsx_dist.config import ExtractConfig, load_config, looks_secret, public_url
from hsx_dist.config.secrets import secret_paths
from hsx_dist.errors import ConfigError

SECRET = "hunter2-not-to-be-seen"


@pytest.mark.parametrize(
    "override",
    [
        f"store.storage_options.key={SECRET}",
        f"store.storage_options.secret={SECRET}",
        f"store.storage_options={{secret: {SECRET}}}",
        f"store={{storage_options: {{token: {SECRET}}}}}",
        f"input.storage_options.client_kwargs.aws_secret_access_key={SECRET}",
        f"input.storage_options.connection_string={SECRET}",
        f"replica.env.HF_TOKEN={SECRET}",
        f"replica.env={{MY_API_KEY: {SECRET}}}",
        f"engine_kwargs.hf_token={SECRET}",
        f"store.storage_options.dbPassword={SECRET}",
        f"store.storage_options.credentials=[{SECRET}]",
        "store.storage_options.password=12345",
        f"output=s3://user:{SECRET}@bucket/x",
        f"store.storage_options.secret=x${{env:HOME}}{SECRET}",
    ],
)
def test_a_credential_is_no_override(override: str) -> None:
    with pytest.raises(ConfigError) as e:
        load_config(None, [override], model="m")
    assert "no credential on a command line" in str(e.value)
    assert "${env:NAME}" in str(e.value)
    assert SECRET not in str(e.value)
    assert "12345" not in str(e.value)


@pytest.mark.parametrize(
    "override",
    [
        "input.token_ids=ids",
        "input.id=key",
        "sampling_params.max_tokens=3",
        "sampling_params.skip_special_tokens=false",
        "sampling_params.stop_token_ids=[1, 2]",
        "engine_kwargs.max_num_batched_tokens=64",
        "engine_kwargs.tokenizer=x",
        "engine_kwargs.hf_token=true",
        "store.storage_options.token=anon",
        "store.storage_options.anon=true",
        "store.storage_options.config_kwargs.signature_version=s3v4",
        "store.storage_options.key=${env:HOME}",
        "store={storage_options: {secret: '${env:HOME}'}}",
    ],
)
def test_what_is_none_passes(override: str) -> None:
    load_config(None, [override], model="m", output="o")


@pytest.mark.parametrize("name", ["key", "AWS_SECRET_ACCESS_KEY", "sasToken", "account-key", "Authorization", "apikey"])
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name", ["keyboard", "token_ids", "max_tokens", "tokenizer", "monkey", "region", "token_type_ids"]
)
def test_names_of_others(name: str) -> None:
    assert not looks_secret(name)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ExtractConfig:
    monkeypatch.setenv("HSX_TEST_SECRET", SECRET)
    options: dict[str, Any] = {
        "key": "${env:HSX_TEST_SECRET}",
        "username": SECRET,
        "client_kwargs": {"endpoint_url": f"http://u:{SECRET}@h:1", "region_name": "eu", "verify": SECRET},
        "endpoint_url": "http://h:1",
    }
    return load_config(
        None,
        output="s3://b/x",
        model="m",
        input={"path": f"https://h/x.jsonl?X-Signature={SECRET}", "storage_options": options},
        store={"storage_options": options},
        replica={"env": {"HF_TOKEN": SECRET, "OMP_NUM_THREADS": SECRET}},
        engine_kwargs={"hf_token": SECRET, "hf_overrides": {"api_key": SECRET}},
    )


def test_no_credential_is_shown(config: ExtractConfig) -> None:
    assert config.store.storage_options["key"] == SECRET
    shown = [repr(config), str(config), repr(config.store), f"{config.input}", repr(config.replica)]
    shown += [json.dumps(config.public()), json.dumps(config.meaning())]
    for text in shown:
        assert SECRET not in text


def test_public_keeps_names_and_what_is_harmless(config: ExtractConfig) -> None:
    public = config.public()
    assert public["store"]["storage_options"] == {
        "key": "(not shown)",
        "username": "(not shown)",
        "client_kwargs": {"endpoint_url": "http://h:1", "region_name": "eu", "verify": "(not shown)"},
        "endpoint_url": "http://h:1",
    }
    assert public["replica"]["env"] == {"HF_TOKEN": "(not shown)", "OMP_NUM_THREADS": "(not shown)"}
    assert public["input"]["path"] == "https://h/x.jsonl"
    assert public["part_bytes"] == 256 << 20
    assert set(public) == set(ExtractConfig.model_fields)


@pytest.mark.parametrize(
    "direct",
    [
        {"min_replicas": "${env:HSX_TEST_SECRET}"},
        {"pool": "x-${env:HSX_TEST_SECRET}"},
        {"store": {"storage_options": "${env:HSX_TEST_SECRET}"}},
        {"replica": {"env": {"A": 3, "B": [SECRET]}}},
        {"output": f"s3://u:{SECRET}@b"},
        {"store": {"secret": SECRET}},
    ],
)
def test_no_error_message_shows_one(direct: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSX_TEST_SECRET", SECRET)
    with pytest.raises(ConfigError) as e:
        load_config(None, **{"output": "o", "model": "m", **direct})
    assert SECRET not in str(e.value)


def test_pydantic_shows_none_either() -> None:
    with pytest.raises(ValueError, match="retry_seconds") as e:
        ExtractConfig(output="o", model="m", store={"storage_options": {"key": SECRET}, "retry_seconds": SECRET})  # type: ignore[arg-type]
    assert SECRET not in str(e.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://b/x", "s3://b/x"),
        ("s3://u:p@b/x", "s3://b/x"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("https://h/x?sig=1", "https://h/x"),
        ("runs/a?b", "runs/a?b"),
    ],
)
def test_public_url(url: str, shown: str) -> None:
    assert public_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "https://b.s3.amazonaws.com/rows.jsonl?X-Amz-Algorithm=A&X-Amz-Signature=abc",
        "https://storage.googleapis.com/b/rows.jsonl?X-Goog-Signature=abc",
        "https://a.blob.core.windows.net/c/rows.jsonl?sv=1&sig=abc",
    ],
)
def test_a_signed_url_is_a_credential(url):
    assert list(secret_paths({"input": {"path": url}})) == [("input", "path")]
    assert list(secret_paths({"input": {"path": url.partition("?")[0] + "?version=3"}})) == []
