from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hsx_dist.config import (
    ExtractConfig,
    InputConfig,
    load_config,
    looks_secret,
    parse_storage_options,
    public_url,
    secret_names,
)
from hsx_dist.config.redaction import redact_text
from hsx_dist.config.secret_names import parameter_looks_secret
from hsx_dist.config.secrets import compared_form, hide_options, hide_secrets, secret_paths
from hsx_dist.config.urls import (
    check_endpoint,
    check_no_credentials,
    check_place_of_credentials,
    check_url,
    has_credentials,
    url_secrets,
)
from hsx_dist.connector.connector_config import read_connector_config
from hsx_dist.errors import ConfigError
from hsx_dist.inputs.reader import read_in_child
from hsx_dist.jobs import preflight
from hsx_dist.jobs.meaning import differences
from hsx_dist.reading import open_run
from hsx_dist.store import open_store
from hsx_dist.store.within import open_within
from tests.unit.growth import check_linear

SECRET = "hunter2-not-to-be-seen"
#: Proxies and endpoints without ``scheme://``.
ADDRESSES = [
    *(f"{before}:{SECRET}@proxy:3128" for before in ("u", "//u", "http:u", "redis:", "me@corp", "")),
    f"u:{SECRET}/x@proxy/y",
    f"u:{SECRET}@a,http://b@c",
]


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
        f"output=s3://user:{SECRET}/with/slashes@bucket/x",
        f"input.path=https://{SECRET}@host/x",
        f"input.path=zip://a.jsonl::https://user:{SECRET}@host/x.zip",
        f"input.path=https://host/x?sig={SECRET}",
        f"chat_template_kwargs.note=see https://a:{SECRET}@host/x",
        f"store.storage_options.secret=x${{env:HOME}}{SECRET}",
        f"store.storage_options.client_kwargs.headers.Cookie=session={SECRET}",
        f"store.storage_options.client_kwargs.cookies.sid={SECRET}",
        f"store.storage_options.sessiontoken={SECRET}",
        f"store.storage_options.accountkey={SECRET}",
        f"store.storage_options.conn_str={SECRET}",
        f"store.storage_options.pass={SECRET}",
        f"store.storage_options.x=Bearer {SECRET}",
        f"engine_kwargs.x=Authorization: Basic {SECRET}",
        f"engine_kwargs.x=Bearer sk-{SECRET}",
        f"engine_kwargs.x=the token ghp_{SECRET.replace('-', '_')}",
        f"store.storage_options.x=AccountName=a;AccountKey={SECRET}",
        f'store.storage_options.service_account=\'{{"private_key": "{SECRET}"}}\'',
        f"store.storage_options.x=-----BEGIN PRIVATE KEY----- {SECRET}",
        f"input.path=https://host/x?authkey={SECRET}",
        f"input.path=https://host/x?rlkey={SECRET}&dl=1",
        f"input.path=https://host/x?tempauth={SECRET}",
        f"input.path=https://host/x;token={SECRET}",
        *(f"engine_kwargs.x={{proxy: '{address}'}}" for address in ADDRESSES),
        f"chat_template_kwargs.x=['{ADDRESSES[0]} ']",
        f"engine_kwargs.x={{'{ADDRESSES[0]}': 1}}",
        f"store.storage_options.headers=[[Accept, json], [Authorization, {SECRET}]]",
        f"store.storage_options.headers=[[Accept, json], [Authorization, [{SECRET}]]]",
        f"engine_kwargs.x={{api_tokens: [{SECRET}]}}",
        f"store.storage_options.pass_phrase={SECRET}",
        f"store.storage_options.conn_string={SECRET}",
        f"store.storage_options.creds={{a: {SECRET}}}",
        f"input.limit=5 # https://user:{SECRET}@host/x",
        f"input.limit=&hf_{'a1' * 17} 5",
        f"input.limit=&a 5 # ${{env:HOME}} Bearer {SECRET}",
        f"engine_kwargs.x=| # https://user:{SECRET}@host/x\n text",
    ],
)
def test_a_credential_is_no_override(override: str) -> None:
    with pytest.raises(ConfigError) as e:
        load_config(None, [override], model="m")
    assert "no credential on a command line" in str(e.value)
    assert "${env:NAME}" in str(e.value)
    assert SECRET not in str(e.value)
    assert "12345" not in str(e.value)


@pytest.mark.parametrize("settings", [{"codec": ADDRESSES[0]}, {"task_rows": ADDRESSES[0]}])
def test_an_error_for_a_wrong_value_shows_no_credential(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="that is not shown here") as e:
        load_config(None, model="m", output="o", **settings)
    assert SECRET not in str(e.value)


@pytest.mark.parametrize("value", ["hunter2-correct-horse", "it's \\ a\nhorse"])
@pytest.mark.parametrize(
    "settings",
    [
        {"select": "${env:HSX_TEST_VALUE}"},
        {"codec": "${env:HSX_TEST_VALUE}"},
        {"deadline": "in ${env:HSX_TEST_VALUE}"},
        {"layers": {"a": "${env:HSX_TEST_VALUE}"}},
        {"engine_kwargs": {"pipeline_parallel_size": "${env:HSX_TEST_VALUE}"}},
    ],
)
def test_a_value_of_the_environment_is_in_no_message(
    settings: dict[str, Any], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSX_TEST_VALUE", value)
    with pytest.raises(ConfigError, match=r"expected .*got .*\(not shown\)") as e:
        load_config(None, model="m", output="o", **{"layers": 1, **settings})
    assert "horse" not in str(e.value)


def test_a_short_value_of_the_environment_hides_no_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSX_TEST_VALUE", "2")
    with pytest.raises(ConfigError, match="expected 1, got '2'; vLLM's"):
        load_config(
            None, model="m", output="o", layers=1, engine_kwargs={"pipeline_parallel_size": "${env:HSX_TEST_VALUE}"}
        )


@pytest.mark.parametrize("value", [SECRET.encode(), {SECRET}, frozenset({SECRET}), [(SECRET.encode(),)], Path(SECRET)])
def test_a_value_of_any_type_under_a_secrets_name_is_hidden(value: Any) -> None:
    config = load_config(None, model="m", output="o", layers=1, engine_kwargs={"hf_token": value, "x": {"pw": 1}})
    assert SECRET not in repr(config)
    assert hide_secrets({"password": None, "api_key": True}) == {"password": None, "api_key": True}


def test_a_value_is_redacted_before_it_is_cut() -> None:
    for before in range(80):
        given = f"{'x' * before} Basic dXNlcjpwYXNzd29yZDEyMzQ1Ng=="
        with pytest.raises(ConfigError, match="task_rows: expected") as e:
            load_config(None, model="m", output="o", task_rows=given)
        assert "dXNl" not in str(e.value)


def test_a_credential_in_a_text_is_hidden() -> None:
    for text in (
        f"Authorization: Bearer {SECRET}",
        f"AccountName=a;AccountKey={SECRET}",
        f"SharedAccessKey={SECRET}",
        f"Authorization: Basic {SECRET[:5]}",
        f"'authorization': 'Bearer {SECRET[:5]}'",
        f"Bearer sk-{SECRET}",
        f"see hf_{'abc' * 8}{SECRET}",
    ):
        settings = {"args": ["--header", text]}
        assert SECRET[:5] not in json.dumps([hide_secrets(settings), compared_form(settings)])
    assert public_url(f"https://host/x;token={SECRET}") == "https://host/x"
    for settings in ([["Accept", "json"], ("X-Token", SECRET)], *ADDRESSES, {f"u:{SECRET}@h": 1}):
        for form in (hide_secrets, compared_form):
            assert SECRET not in json.dumps(form({"args": settings}))
            assert form(form({"args": settings})) == form({"args": settings})
    prose = "Bearer authentication, basic responsibilities: a private key."
    harmless = {"pass_config": 1, "prompt": prose, "eos_token_id": 2, "SSEKMSKeyId": "a"}
    assert hide_secrets(harmless) == harmless
    assert public_url("s3://bucket/a;b=c") == "s3://bucket/a;b=c"


@pytest.mark.parametrize(
    "override",
    [
        "input.token_ids=ids",
        "input.id=key",
        "sampling_params.max_tokens=3",
        "sampling_params.skip_special_tokens=false",
        "sampling_params.stop_token_ids=[1, 2]",
        "sampling_params.stop='No'",
        "engine_kwargs.max_num_batched_tokens=64",
        "engine_kwargs.tokenizer=x",
        "engine_kwargs.hf_token=true",
        "store.storage_options.token=anon",
        "store.storage_options.anon=true",
        "store.storage_options.config_kwargs.signature_version=s3v4",
        "store.storage_options.key=${env:HOME}",
        "store={storage_options: {secret: '${env:HOME}'}}",
        "output=s3://${env:HOME}/x",
        "output=s3://bucket/a@b:c",
        "input.path=https://host.example:9000/a@b",
        "chat_template_kwargs.note=at https://host:9000. Or me@host?",
        "engine_kwargs.x='Authorization: Bearer ${env:HOME}'",
        "input.path=data/sk-news-corpus-2020.jsonl",
        "model=org/hf_Llama-3.2-1B-Instruct",
        "engine_kwargs.x={proxy: '${env:HOME}:${env:HOME}@proxy:3128'}",
        "engine_kwargs.x={proxies: ['proxy:3128', 'me@proxy', 'git@github.com:org/x', 'a@b:c']}",
        "chat_template_kwargs.x='{% if a %}u:p@h {{ b }}{% endif %}'",
        "chat_template_kwargs.x='Write to: me@host'",
        "engine_kwargs.download_dir=./a:b@c",
        "input.path=github://org:repo@main/x",
        "store.storage_options.headers=[[Accept, json], [Authorization, '${env:HOME}'], [token, x, y]]",
        "store.storage_options={token: 'anon'}",
        "input.metadata=['token', 'source']",
        "input.limit=&a 5 # at https://${env:HOME}:${env:HOME}@host/x",
    ],
)
def test_overrides_without_a_credential_are_accepted(override: str) -> None:
    load_config(None, [override], model="m", output="o")


@pytest.mark.parametrize(
    "name",
    [
        "key",
        "AWS_SECRET_ACCESS_KEY",
        "sasToken",
        "account-key",
        "Authorization",
        "apikey",
        "--pass",
        "--pw",
        "HFToken",
        "PGPASSWORD",
        "DBPassword",
        "secret1",
        "secretaccesskey",
        "SSHPASS",
        "apikeys",
        "accessTokens",
        "aws_secret_keys",
        *(
            "apitoken",
            "sastoken",
            "usertoken",
            "X-CSRFToken",
            "idtoken2",
            "API_KEY2",
            "masterkey",
            "hostkey",
            "passkey",
        ),
        *("ACCESSTOKENS", "masterkeys", "sas_tokens", "authentication", "oauth2", "awscredentials", "sessioncookie"),
        *("accesstoken_id", "authtokenType"),
        *("DB_PASS", "smtpPass", "GITHUB_PAT", "--redis-pw", "pass"),
        *("passkey", "connectionstring", "passwords", "dbpwd", "userpass", "client_assertion"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name)


def test_the_names_of_the_documentation_are_those_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "SECURITY.md").read_text().partition("## Names of secrets")[2]
    rows = re.findall(r"^\| (.+?) \| (`.*`) \|$", page, re.MULTILINE)
    names = {where: re.findall("`(.+?)`", cells) for where, cells in rows}
    assert [len(found) > 2 for found in names.values()] == [True] * 9
    ends, words, pairs, before, whole, query, *ordinary = names.values()
    assert all(map(looks_secret, [f"my{name}2" for name in ends] + ends + words + pairs))
    assert all(looks_secret(f"{name}{_}{last}") for name in before for last in ("tokens", "keys") for _ in ("", "_"))
    assert all(looks_secret(name) and not looks_secret(f"{name}_x") for name in whole)
    assert all(parameter_looks_secret(name) and not looks_secret(name) for name in query)
    assert not any(map(looks_secret, chain(*ordinary)))
    patterns = f"{secret_names._SECRET_END.pattern}{secret_names._SECRET_PAIR.pattern}"
    documented = " ".join([*ends, *pairs, *before, "tokens", "keys"]).replace("_", "")
    for word in re.findall(r"[a-z]{4,}", re.sub(r"\[sz\]", "s", patterns).replace("?", "")):
        assert word in documented, word


@pytest.mark.parametrize(
    "name",
    [
        *("keyboard", "token_ids", "max_tokens", "tokenizer", "monkey", "region", "token_type_ids", "tokens"),
        *("num_tokens", "eos_token_id", "eostoken", "tiktoken", "maxtokens", "keys", "promptkey", "code_revision"),
        *(
            "code",
            "session_id",
            "pass_config",
            "compass",
            "pass_2",
            "author",
            "image_token_id",
            "skip_tokenizer_init",
            "sortkey2",
        ),
    ],
)
def test_names_of_other_settings_are_not_secret(name: str) -> None:
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


def test_public_settings_hide_secrets_and_keep_names_and_endpoints(config: ExtractConfig) -> None:
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
def test_no_error_message_shows_a_credential(direct: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSX_TEST_SECRET", SECRET)
    with pytest.raises(ConfigError) as e:
        load_config(None, **{"output": "o", "model": "m", **direct})
    assert SECRET not in str(e.value)


@pytest.mark.parametrize("text", [f"me:{SECRET}@host/x", f"Bearer sk-{SECRET}"])
def test_a_credential_in_any_text_of_the_settings_is_not_shown(text: str) -> None:
    config = load_config(
        None, model="m", output="o", layers=text, input={"text": text, "split": text, "id": f"{text}x"}
    )
    assert SECRET not in f"{config!r} {json.dumps([config.public(), config.meaning()])}"
    for take in (
        lambda: load_config(None, model="m", output="o", revision=f"me:{SECRET}@host/x"),
        lambda: load_config(None, model="m", output="o", engine_kwargs={"tokenizer": f"me:{SECRET}@host/x"}),
        lambda: load_config(None, model="m", output="o", input={"path": f"zip://x::me:{SECRET}@host/x"}),
        lambda: read_connector_config({"shared_storage_path": f"me:{SECRET}@host/x"}),
    ):
        with pytest.raises(ConfigError, match="without credentials") as e:
            take()
        assert SECRET not in str(e.value)


#: Texts of settings that have a credential in them.
TEXTS = [
    f'{{"host": "redis", "password": "{SECRET}"}}',
    f"host=db password='{SECRET}'",
    f"password={SECRET};user=x",
    f"Pwd={SECRET}",
    f"db?x=1&api_key={SECRET}",
    f"<password>{SECRET}</password>",
    f"pre me:{SECRET}@host",
    f"{'x ' * 50_000}password={SECRET}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_of_which_redaction_hides_a_part_is_hidden_compared_and_no_override(text: str) -> None:
    config = load_config(None, model="m", output="o", engine_kwargs={"x": text}, chat_template_kwargs={"x": text})
    assert SECRET not in json.dumps([config.public(), config.meaning()])
    assert list(secret_paths(text, ("engine_kwargs", "x")))
    assert not list(secret_paths(text.replace(SECRET, "${env:HOME}"), ("engine_kwargs", "x")))
    assert compared_form(text) != compared_form(text + "2")


def test_a_chat_template_is_accepted_and_compared() -> None:
    template = "{% set eos_token = '</s>' %}{% for m in messages %}{{ m['content'] }} u:p@h{% endfor %}"
    assert not list(secret_paths({"chat_template_kwargs": {"chat_template": template}}))
    assert compared_form(template) not in (compared_form(template + " "), hide_secrets(template))


def test_errors_of_pydantic_show_no_credential() -> None:
    with pytest.raises(ValueError, match="retry_seconds") as e:
        ExtractConfig(output="o", model="m", store={"storage_options": {"key": SECRET}, "retry_seconds": SECRET})  # type: ignore[arg-type]
    assert SECRET not in str(e.value)


#: URL → its redacted form. Each has a credential.
WITH = {
    f"s3://key:{SECRET}@b/x": "s3://b/x",
    f"s3://key:{SECRET}/with/slashes@b/x": "s3://(not shown)",
    f"s3://{SECRET}@b/x": "s3://b/x",
    f"s3://key:{SECRET}": "s3://(not shown)",
    f"s3://key:{SECRET}/x": "s3://(not shown)",
    f"s3://key%3A{SECRET}%2Fa@b/x": "s3://b/x",
    f"S3://key:{SECRET}@b/x": "S3://b/x",
    f"gs://:{SECRET}@b": "gs://b",
    f"https://user:{SECRET}@h/x": "https://h/x",
    f"https://user:{SECRET}/with/slashes@h/x": "https://(not shown)",
    f"https://user:pa@ss/{SECRET}@h/x": "https://(not shown)",
    f"https://user:pa?ss{SECRET}@h/x?y": "https://(not shown)",
    f"https://user:pa#ss{SECRET}@h/x": "https://(not shown)",
    f"https://{SECRET}@h/x": "https://h/x",
    f"https://user:{SECRET}@h/a@b/x": "https://(not shown)",
    f"https://user:pw@h/x?mail=a@b&token={SECRET}": "https://(not shown)",
    f"https://user:/{SECRET}@h/x": "https://(not shown)",
    f"https://user:99999{SECRET}": "https://(not shown)",
    f"http://user:{SECRET}@[::1]:80/x": "http://[::1]:80/x",
    f"sftp://user:{SECRET}@h/x": "sftp://h/x",
    f"abfs://c:{SECRET}@account.dfs.core.windows.net/x": "abfs://account.dfs.core.windows.net/x",
    f"zip://a::https://user:{SECRET}@h/x": "zip://a::https://h/x",
    f"zip://a.jsonl::simplecache::s3://key:{SECRET}/y@b/x": "zip://a.jsonl::simplecache::s3://(not shown)",
    f"https://key:{SECRET}::s3://b/x": "https://(not shown)::s3://b/x",
    f"filecache::gcs://{SECRET}@b/x": "filecache::gcs://b/x",
    f"https://proxy/https://user:{SECRET}@h/x": "https://proxy/https://h/x",
    f"ask https://user:{SECRET}@h/x": "ask https://h/x",
    f"https://h/x?X-Amz-Signature={SECRET}": "https://h/x",
    f"https://h/x?a=b&AWSAccessKeyId={SECRET}": "https://h/x",
    f"https://h/x?sig={SECRET}": "https://h/x",
    f"https://h/x?sv=1&sig={SECRET}#y": "https://h/x",
    f"https://h/x?x=1&token={SECRET}": "https://h/x",
    f"https://h/x?X%2DAmz%2DSignature={SECRET}": "https://h/x",
    f"https://h/x#access_token={SECRET}": "https://h/x",
    f"zip://a::https://h/x?sig={SECRET}": "zip://a::https://h/x",
    f"me:{SECRET}@minio/run": "(not shown)",
    f"me:{SECRET}@h:80": "(not shown)",
    f"zip://x::me:{SECRET}@h/y.zip": "zip://x::(not shown)",
    f"zip://x::https://h/a::me:{SECRET}]@h/y.zip": "zip://x::https://h/a::(not shown)",
    **{
        f"{scheme}://ghp_{SECRET.replace('-', '_')}@h/x": f"{scheme}://h/x" for scheme in ("sftp", "ftp", "hf", "abfss")
    },
}
#: URL → its redacted form. None has a credential.
WITHOUT = {
    "s3://b/x": "s3://b/x",
    "s3://b": "s3://b",
    "s3://b/a@b": "s3://b/a@b",
    "s3://b/a:c@b/d::e": "s3://b/a:c@b/d::e",
    "s3://b.with-dots_1/x y": "s3://b.with-dots_1/x y",
    "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/x": "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/x",
    "gs://b/x@y": "gs://b/x@y",
    "abfs://container@account.dfs.core.windows.net/x": "abfs://container@account.dfs.core.windows.net/x",
    "abfss://container@account.dfs.core.windows.net:443/x@y": "abfss://container@account.dfs.core.windows.net:443/x@y",
    "sftp://user@h:22/x": "sftp://user@h:22/x",
    "hdfs://user@namenode:8020/x": "hdfs://user@namenode:8020/x",
    "hf://datasets/org/name@main/x.parquet": "hf://datasets/org/name@main/x.parquet",
    "hf://gpt2@main/x": "hf://gpt2@main/x",
    "http://127.0.0.1:9000/a@b": "http://127.0.0.1:9000/a@b",
    "http://[::1]:9000/a@b": "http://[::1]:9000/a@b",
    "https://h/x?version=3": "https://h/x",
    "https://h/x?mail=a@b": "https://h/x",
    "file:///home/a@b/c:d": "file:///home/a@b/c:d",
    "memory://a@b:c/d": "memory://a@b:c/d",
    "zip://a@b:c.jsonl::s3://b/x.zip": "zip://a@b:c.jsonl::s3://b/x.zip",
    "simplecache::s3://b/x": "simplecache::s3://b/x",
    "zip://a::http://[fe80::1]:80/a@b": "zip://a::http://[fe80::1]:80/a@b",
    "/data/x::a:b@c": "/data/x::a:b@c",
    "runs/a?b": "runs/a?b",
    "/data/a@b:c::d": "/data/a@b:c::d",
    "org/model@main": "org/model@main",
    "builtin:smollm2-135m-instruct": "builtin:smollm2-135m-instruct",
    "See https://h.org: it is (https://h.org:80), or <https://h.org>.": (
        "See https://h.org: it is (https://h.org:80), or <https://h.org>."
    ),
}


@pytest.mark.parametrize("url", WITH)
def test_a_credential_in_a_url_is_found_and_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_credentials(url)
    assert public_url(url) == WITH[url]
    assert list(secret_paths({"input": {"path": url}})) == [("input", "path")]
    assert SECRET not in str(hide_secrets({"a": [{"b": url}]}))
    for name in ("output", "model"):
        with pytest.raises(ConfigError) as e:
            load_config(None, **{"output": "o", "model": "m", name: url})
        assert SECRET not in str(e.value)
    with pytest.raises(ConfigError) as e:
        open_store(url)
    assert SECRET not in str(e.value)
    # The input may have credentials in places that its library reads. It shows none.
    text = ""
    with suppress(ConfigError):
        config = load_config(None, output="o", model="m", input={"path": url})
        text = f"{config!r} {json.dumps(config.public())}"
    assert SECRET not in text


HIDING = [
    *(f"https://{SECRET[:3]}{c}{SECRET[3:]}@h/x" for c in "\t\n\r\0\x1b\x7f\x85\u2028\u3000\u200b \\"),
    *(f"https://u:{SECRET}{c}@h/x" for c in "\t\n "),
    *(f"{c}https://{SECRET}@h/x" for c in "\t\n \x01"),
    f"h\nttps://{SECRET}@h/x",
    f"https:\t//{SECRET}@h/x",
    f"https:/\n/{SECRET}@h/x",
    f"https:/{SECRET}@h/x",
    f"https:\\\\{SECRET}@h/x",
    f"https:///{SECRET}@h/x",
    f"https://{SECRET}\uff20h/x",
    f"simplecache::https://u:{SECRET}\t@h/x",
    f"zip://a b::https://{SECRET}\n@h/x",
    f"s3://k:{SECRET}\t@b/x",
]


@pytest.mark.parametrize("url", HIDING)
def test_characters_that_libraries_drop_do_not_hide_a_credential(url: str) -> None:
    assert has_credentials(url)
    parts = (SECRET, SECRET[:3] + " ", SECRET[3:] + "@")
    assert not any(part in public_url(url) for part in parts)
    assert list(secret_paths({"input": {"path": url}})) == [("input", "path")]
    for take in (
        lambda: open_store(url),
        lambda: load_config(None, output=url, model="m"),
        lambda: load_config(None, output="o", model=url),
        lambda: load_config(None, output="o", model="m", input={"path": url}),
        lambda: read_connector_config({"shared_storage_path": url}),
    ):
        with pytest.raises(ConfigError) as e:
            take()
        assert not any(part in str(e.value) for part in parts)


@pytest.mark.parametrize(
    "url",
    [
        *(f"s3://b/x{c}y" for c in "\t\n\r\x1b\x7f\x85\u2028\u3000\u200b"),
        *(
            "s3://b b/x",
            "s3://b/x ",
            " s3://b/x",
            "https://evil\\.good.org/x",
            "https:/h/x",
            "http:\\h/x",
            "https:///h/x",
            "zip://a::https:/u:p@h/x",
        ),
    ],
)
def test_a_url_that_libraries_read_in_different_ways_is_refused(url: str) -> None:
    for take in (check_url, check_no_credentials, check_place_of_credentials, open_store):
        with pytest.raises(ConfigError, match="expected scheme://place/path") as e:
            take(url)
        assert str(e.value).isprintable()
    for options in ({"endpoint_url": url}, {"client_kwargs": {"endpoint_url": url}}):
        with pytest.raises(ConfigError, match="expected scheme://place/path"):
            open_store("s3://b/x", options)


@pytest.mark.parametrize(
    "url",
    [
        *(f"{start}{SECRET}@b/x" for start in ("s3:/", "s3//", "hf//k:", "s3::k:", "s3:k:", "zip://a::gs:/k:")),
        *(f"{scheme}k:{SECRET}@b/x" for scheme in ("s3:/", "gs:/", "FTP:/", "az:\\", "s3//", "https//", "s3:/\t")),
        *(f"{odd}://k:{SECRET}@b/x" for odd in ("s3:", "https:", "s3 ", "", "./s3 ", "s3::", "zip://a::", "s3\u200b")),
        *(f"{odd}://k:{SECRET}@b/x" for odd in ("s3\t", "s\n3", "zip://a::s3\t")),
        *(
            f"s3{gap}k:{SECRET}/x@b/x"
            for gap in (":", "::", "::/", ":///", ";//", "\uff1a//", ":/ /", " :: /", "\uff1a")
        ),
        *(f"{scheme}:k:{SECRET}/x@b/x" for scheme in ("https", "sftp", "az", "zip://a::gs", "zip::hf")),
        *(f"s3:k:{SECRET}{at}b/x" for at in ("%40", "\uff20")),
        *(f"sftp{gap}{SECRET}@b/x" for gap in ("://:/", "://:;", "://: ", "://::/ ", "://;:", ":///:")),
        *(f"https{gap}k:{SECRET}@b/x" for gap in (":", "::/", ":/ /", ":////")),
        *(f"s3{gap}k:{SECRET}/b" for gap in (":/", " ://", "::///", ":/ /", ":////")),
    ],
)
def test_a_mistyped_url_is_refused_and_shown_without_credentials(url: str) -> None:
    assert has_credentials(url)
    assert SECRET not in public_url(url)
    entries: list[Callable[[str], object]] = [
        open_store,
        open_run,
        check_place_of_credentials,
        lambda url: open_within(url, f"{url}/x"),
        lambda url: read_connector_config({"shared_storage_path": url}),
        *(
            lambda url, n=name: load_config(None, **{"output": "o", "model": "m", n: url})
            for name in ("output", "model")
        ),
        lambda url: load_config(None, output="o", model="m", input={"path": url}),
    ]
    for entry in entries:
        with pytest.raises(ConfigError) as e:
            entry(url)
        assert SECRET not in str(e.value)
        assert str(e.value).isprintable()


@pytest.mark.parametrize("url", ["s3:/b/x", "gs//b/x", "file:/x", "memory:/x", "s3:://b/x", "a/b://x", "s3\t://b?n=1"])
def test_a_mistyped_url_without_credentials_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected scheme://place/path .* or \./NAME for a folder"):
        open_store(url)


@pytest.mark.parametrize("url", [f"s3\t://b/x;si\tg={SECRET}", f"s3\t://b/{SECRET}/x@y?n=1", f"file:/{SECRET}@b"])
def test_the_error_for_a_wrong_form_shows_no_parameter_and_nothing_before_an_at(url: str) -> None:
    with pytest.raises(ConfigError) as e:
        check_url(url)
    assert SECRET not in str(e.value)


@pytest.mark.parametrize("kind", ["PRIVATE KEY", "SSH2 ENCRYPTED PRIVATE KEY", "X25519 PRIVATE KEY"])
def test_the_text_of_a_private_key_is_a_credential(kind: str) -> None:
    settings = {"a": f"---- BEGIN {kind} ----\n{SECRET}"}
    assert list(secret_paths(settings)) == [("a",)]
    assert SECRET not in json.dumps([hide_secrets(settings), compared_form(settings)])


#: Local paths and ids of models, also of folders with the name of a scheme.
LOCAL = [
    *("./x@y", "/data/a@b:c", "C:\\x", "model@revision", "org/model", "org/model@main", "/data/s3:k@b", "./s3:k@b"),
    *(
        "data",
        "data/a@b",
        "data/a:b@c",
        "data/x:a@b",
        "s3",
        "s3/a@b",
        "s3-x/y:a@b",
        "git@github.com:org/x",
        "hf:x",
        "s3 x@y",
    ),
]


@pytest.mark.parametrize("path", ["./s3:/x", "/a/s3:/x", "data//x", "data:x", "a/s3//x", "zip:x", "./a:b@c", *LOCAL])
def test_a_folder_that_is_no_mistyped_url_is_taken(path: str) -> None:
    check_url(path)
    assert public_url(path) == path


@pytest.mark.parametrize(
    "url",
    ["s3://b/my runs/x", "zip://a b.jsonl::s3://b/x.zip", "memory://a b/c", "/data/a\tb ", "file:///a b/c\\d", "a b"],
)
def test_spaces_in_paths_stay(url: str) -> None:
    check_url(url)
    assert not has_credentials(url)
    assert public_url(url) == url


@pytest.mark.parametrize("url", WITHOUT)
def test_other_urls_are_taken_and_shown(url: str) -> None:
    assert not has_credentials(url)
    assert public_url(url) == WITHOUT[url]
    if ": " not in url:  # prose
        place = url.partition("?")[0] if "://" in url else url
        config = load_config(None, [f"input.path={url}"], output=place, model=place)
        assert (config.output, config.model, config.input.path) == (place, place, url)
    assert list(url_secrets(url)) == []


@pytest.mark.parametrize("name", ["hash", "login", "n", "code", "sessionid", "xtoken", "storagekey", "a/b?c"])
@pytest.mark.parametrize("place", ["https://h/x", "s3://b/x", "memory://x", "simplecache::s3://b/x"])
def test_a_query_is_refused_where_samples_are_stored(place: str, name: str) -> None:
    """obstore drops it, and fsspec takes it for a part of the name. It may be a credential under any name."""
    for take in (
        open_store,
        open_run,
        lambda url: load_config(None, output=url, model="m"),
        lambda url: read_connector_config({"shared_storage_path": url}),
    ):
        with pytest.raises(ConfigError, match=r"expected a URL without (a query|credentials), got ") as e:
            take(f"{place}?{name}={SECRET}")
        assert SECRET not in str(e.value)


def test_a_folder_may_have_a_question_mark_in_its_name(tmp_path: Path) -> None:
    for url in (f"{tmp_path}/a?b=1", f"file://{tmp_path}/a?b=1"):
        assert open_store(url).url == f"{tmp_path}/a?b=1"


@pytest.mark.parametrize("name", ["code", "sid", "session_id", "otp", "apitoken", "masterkey", "authentication"])
def test_a_parameter_that_grants_access_is_a_credential(name: str) -> None:
    url = f"https://h/x?n=1&{name}={SECRET}"
    assert has_credentials(url)
    assert SECRET not in f"{redact_text(f'GET {url} failed')}{hide_secrets([url])}{public_url(url)}"
    assert list(secret_paths(url, ("input", "path")))


@pytest.mark.parametrize("name", ["code", "sid", "session", "pin"])
@pytest.mark.parametrize("place", ["s3://b/day;{}=4/x", "gs://b/day#{}=4", "/data/day;{}=4/x"])
def test_a_part_of_an_objects_name_is_no_query(place: str, name: str) -> None:
    url = place.format(name)
    assert load_config(None, [f"input.path={url}"], output=url, model="m").output == url
    assert (public_url(url), hide_secrets(url), redact_text(f"{url} not found")) == (url, url, f"{url} not found")


def test_a_stored_setting_that_earlier_versions_showed_is_equal_to_itself() -> None:
    """They took ``apitoken`` for no credential, and stored its value as it is."""
    stored = {"engine_kwargs": {"x": {"apitoken": SECRET, "eostoken": "</s>", "monkey": "a"}}}
    now = ExtractConfig(output="o", model="m", **stored).meaning()["engine_kwargs"]  # type: ignore[arg-type]
    assert now["x"] == {**stored["engine_kwargs"]["x"], "apitoken": compared_form(SECRET, within=True)}
    assert not differences({"meaning": {"weights": 1, **stored}}, {"weights": 1, "engine_kwargs": now}, {})
    other = compared_form({"x": {**stored["engine_kwargs"]["x"], "apitoken": "b"}})
    assert differences({"meaning": {"weights": 1, **stored}}, {"weights": 1, "engine_kwargs": other}, {})


@pytest.mark.parametrize(
    "url", [f"s3://k:{SECRET}@b/x", f"s3://{SECRET}@b/x", f"https://k:{SECRET}/x@h/x", f"zip://a::gs://:{SECRET}@b"]
)
def test_an_input_has_no_credentials_where_no_library_looks_for_them(url: str) -> None:
    with pytest.raises(ConfigError, match="URL without credentials") as e:
        load_config(None, output="o", model="m", input={"path": url})
    assert SECRET not in str(e.value)


def test_the_password_of_a_link_with_a_later_at_sign_is_a_secret() -> None:
    assert SECRET in url_secrets(f"https://me:{SECRET}@h/data/train@v2.jsonl?mail=a@b")
    assert f"{SECRET}/x" in url_secrets(f"https://me:{SECRET}/x@h/y")


def test_a_reference_to_the_environment_is_no_credential() -> None:
    for url in (
        "https://${env:A}:${env:B}@h/x",
        "https://${env:A}@h/x",
        "s3://${env:A}/x",
        "https://${env:A}.example:9000/a@b",
    ):
        assert list(secret_paths(url)) == []
    for url in ("https://a:${env:B}@h/x", "https://a${env:B}@h/x", "s3://${env:A}:b/c@b"):
        assert list(secret_paths(url)) == [()]


def test_a_mapping_of_a_secret_name_shows_no_text_and_no_number() -> None:
    shown = hide_secrets({"auth": {"user": SECRET, "level": 3, "more": [{"x": SECRET}]}, "other": {"user": "shown"}})
    assert shown == {
        "auth": {"user": "(not shown)", "level": "(not shown)", "more": [{"x": "(not shown)"}]},
        "other": {"user": "shown"},
    }


@pytest.mark.parametrize("argument", [f"s3://k:{SECRET}@b/x", SECRET, f"s3://k:{SECRET}=x@b"])
def test_an_argument_that_is_no_override_is_not_repeated(argument: str) -> None:
    with pytest.raises(ConfigError) as e:
        load_config(None, [argument], output="o", model="m")
    assert SECRET not in str(e.value)


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


@pytest.mark.parametrize(
    "scheme", ["sftp", "ftp", "hdfs", "webhdfs", "hf", "az", "abfs", "s3", "gs", "github", "other"]
)
def test_a_user_and_password_in_place_of_a_path_are_found(scheme: str) -> None:
    for at in ("@", "%40"):
        url = f"{scheme}:///me:{SECRET}{at}host/run"
        assert has_credentials(url)
        assert SECRET not in public_url(url)
        for check in (check_no_credentials, open_store):
            with pytest.raises(ConfigError) as e:
                check(url)
            assert SECRET not in str(e.value)


@pytest.mark.parametrize("url", ["hdfs:///data/run", "s3:///b/x", "abfs:///c/x", "file:///a/b@c:d"])
def test_a_url_without_a_host_is_taken(url: str) -> None:
    check_no_credentials(url)
    assert public_url(url) == url


def test_a_secret_that_reads_as_a_port_or_behind_no_bucket_is_found() -> None:
    for url in ("https://user:123/4secret@host/x", "ssh://user:0/secret@host", "s3:///KEY:SECRET@bucket/x"):
        assert has_credentials(url)
        assert "ecret" not in public_url(url).lower()


def test_names_with_colons_that_libraries_document_are_no_credentials() -> None:
    arn = "s3://arn:aws:s3-outposts:us-east-1:123456789012:outpost/op-1/accesspoint/x"
    for url in ("github://org:repo@main/data.jsonl", arn):
        assert not has_credentials(url)
        assert public_url(url) == url
    assert has_credentials("github://user:ghp_abc@github/x")


@pytest.mark.parametrize("endpoint", [f"u:{SECRET}@h:1", f"//u:{SECRET}@h:1", f"http://h:1?sig={SECRET}", SECRET])
def test_an_endpoint_of_another_form_may_hold_a_credential(endpoint: str) -> None:
    options = {"endpoint_url": endpoint, "client_kwargs": {"endpoint_url": endpoint}}
    assert len(list(secret_paths(options))) == 2
    assert SECRET not in str(hide_options(options))
    assert not list(secret_paths({"endpoint_url": "http://${env:HOST}:9000"}))


#: Repeated pieces of texts. Each is the start of a pattern of the module, or one of its steps, very often.
REPEATED = [
    *(
        "a",
        "Aa",
        "1.",
        "_",
        " ",
        "@",
        ":",
        "/",
        "::",
        ":1",
        "a: ",
        "a@ ",
        "%40",
        "%25",
        "a%3A",
        "\uff1a",
        "?a=",
        "#",
        "\\",
        "\0",
        "\u0315\u0300",
    ),
    *("bearer ", "bearer x", "BEGIN ", "sk-", "-sk-aaaaaaaaaaaaaaaaaaa", "eyJ.a", "authorization:", "bearer hf_"),
    *("://", "::s3:", "::s3::a", "a://", "://a:/", "${env:", "://${env:", "${env:A}"),
]


@pytest.mark.parametrize(
    "call",
    [
        public_url,
        check_no_credentials,
        check_place_of_credentials,
        looks_secret,
        lambda text: check_endpoint(text, "endpoint_url"),
        lambda text: list(url_secrets(text)),
        lambda text: list(secret_paths({"endpoint_url": text, "a": text})),
        lambda text: hide_options({"region": text, "endpoint_url": text}),
    ],
)
def test_time_grows_with_the_length_of_a_text_and_not_its_square(call: Callable[[str], Any]) -> None:
    """Settings of a run reach these functions. 200 KB of blanks must not stop ``hsx top`` for minutes."""

    def make(first: str, repeated: str, length: int) -> Callable[[], None]:
        text = first + repeated * (length // len(repeated))

        def run() -> None:
            with suppress(ConfigError):
                call(text)

        return run

    for first in ("s3://", "http://h:/", "s3:/"):
        for repeated in REPEATED:
            check_linear(partial(make, first, repeated), 1 << 12, (first, repeated))


@pytest.mark.parametrize("call", [hide_secrets, compared_form, lambda value: list(secret_paths(value))])
def test_the_name_of_a_list_is_searched_once_and_not_for_each_item(call: Callable[[Any], Any]) -> None:
    """A run's settings may have a name of a megabyte, and a list of 100,000 items under it."""

    def make(length: int) -> Callable[[], None]:
        settings = {"a" * length: ["b"] * (length // 8)}
        return lambda: call(settings)

    check_linear(make, 1 << 13)


def test_numbers_are_credentials_only_among_storage_options() -> None:
    assert not list(secret_paths({"sampling_params": {"thinking_token_budget": 16}}))
    assert list(secret_paths({"store": {"storage_options": {"password": 12345678}}}))
    with pytest.raises(ConfigError, match=r"storage_options\.password: expected no credential"):
        parse_storage_options(["password=12345678"])


def test_the_compared_form_of_a_compared_form_is_the_same() -> None:
    settings = {"a": ["Bearer hf_x", 1, None], "token": {"b": SECRET, "n": 3}, f"https://u:{SECRET}@h": "(not shown)"}
    once = compared_form(settings)
    assert compared_form(once) == once
    assert compared_form({"token": "(not shown)"}) == {"token": "(not shown)"}
    assert compared_form({"token": "(not shown) or"}) != {"token": "(not shown) or"}


def test_names_of_settings_show_no_credentials() -> None:
    hidden = {"additional_config": {f"https://user:{SECRET}@host/x": 1}}
    assert SECRET not in json.dumps([hide_secrets(hidden), compared_form(hidden)])


#: Names of settings that hold a credential, such as ``{"Authorization: Bearer TOKEN"}`` with a quote too many.
TOKEN = f"hf_{'abc' * 8}"
NAMES = [
    f"Authorization: Bearer {SECRET}",
    f"https://me:{SECRET}@h/x",
    f"s3://AK:{SECRET}@b/x",
    f"https://h/x?sig={SECRET}",
    TOKEN,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_credential_in_a_name_is_no_override(name: str) -> None:
    value = json.dumps({"headers": [{name: None}]})
    overrides = [f"{setting}={value}" for setting in ("engine_kwargs.x", "input.storage_options", "replica")]
    calls: list[Callable[[], Any]] = [partial(load_config, None, [override], model="m") for override in overrides]
    calls.append(lambda: parse_storage_options([f"client_kwargs={value}"]))
    calls.append(lambda: read_connector_config({"hsx": {"storage_options": {"client_kwargs": {name: 1}}}}))
    for call in calls:
        with pytest.raises(ConfigError, match=r"…: expected no credential") as e:
            call()
        assert SECRET not in str(e.value)
        assert TOKEN not in str(e.value)


@pytest.mark.parametrize(
    "override", [f"engine_kwargs.{TOKEN}=1", f"{TOKEN}=[", f"a.{TOKEN}.b=1", f"Authorization: Basic {SECRET}=x"]
)
def test_a_credential_in_the_name_of_an_override_is_refused(override: str) -> None:
    for call in (partial(load_config, None, [override]), partial(parse_storage_options, [override])):
        with pytest.raises(ConfigError, match=r"…: expected no credential on a command line") as e:
            call()
        assert SECRET not in str(e.value)
        assert TOKEN not in str(e.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_credential_in_a_name_of_the_settings_is_not_shown(name: str) -> None:
    nested = {"client_kwargs": {name: 1, name + "2": {name: 2}}}
    config = load_config(
        None,
        model="m",
        output="o",
        input={"storage_options": nested},
        store={"storage_options": nested},
        replica={"env": {name: "x"}, "resources": {name: 1}},
        engine_kwargs={"additional_config": nested, name: 1},
    )
    assert config.store.storage_options == nested
    for shown in (json.dumps([config.public(), config.meaning()]), repr(config)):
        assert SECRET not in shown
        assert TOKEN not in shown
    assert len(config.public()["store"]["storage_options"]["client_kwargs"]) == 2


def test_members_with_equal_hidden_names_are_all_shown_and_compared() -> None:
    settings = {f"{TOKEN}{i}": i for i in range(3)} | {"(not shown) 2": 3}
    hidden = {"(not shown)": 0, "(not shown) 2": 1, "(not shown) 3": 2, "(not shown) 2 2": 3}
    assert hide_secrets(settings) == hidden
    assert hide_secrets(hidden) == hidden
    assert hide_options({"client_kwargs": settings}) == {"client_kwargs": dict.fromkeys(hidden, "(not shown)")}
    assert sorted(compared_form(settings).values()) == [0, 1, 2, 3]


def test_many_equal_hidden_names_take_linear_time() -> None:
    def make(length: int) -> Callable[[], None]:
        settings = dict.fromkeys(f"{TOKEN}{i}" for i in range(length // 32))
        return lambda: hide_secrets(settings)

    check_linear(make, 1 << 13)


class NoOptions(MemoryFileSystem):
    """A file system that takes no options. Python's error names the option that was given."""

    protocol = "hsxnone"

    def __init__(self) -> None:
        super().__init__()


@pytest.mark.parametrize("name", NAMES)
def test_errors_show_no_credential_in_a_name(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("hsxnone", NoOptions, clobber=True)
    monkeypatch.setattr(preflight, "engine_argument_names", lambda: {"dtype"})
    twice = tmp_path / "twice.yaml"
    twice.write_text(f"{json.dumps(name)}: 1\n" * 2)
    config = load_config(None, model="m", output="o", engine_kwargs={name: 1})
    calls: list[Callable[[], Any]] = [
        lambda: load_config(str(twice)),
        lambda: load_config(None, model="m", output="o", **{name: 1}),
        lambda: load_config(None, model="m", output="o", capture={name: 1}, source="taps"),
        lambda: load_config(None, model="m", output="o", replica={"env": {name: 1}}),
        lambda: load_config(None, model="m", output="o", engine_kwargs={name: "${env:HSX_ABSENT}"}),
        lambda: load_config(None, model="m", output="o", engine_kwargs={name: "${env:HSX"}),
        lambda: load_config(None, model="m", output="o", engine_kwargs={"x": f"${{env:{name}}}"}),
        lambda: preflight.check_engine_arguments(config),
        lambda: read_connector_config({"hsx": {name: 1}}),
        lambda: read_connector_config({name: 1, "hsx": 1}),
        lambda: open_store("s3://bucket/x", {name: 1}, backend="obstore"),
        lambda: open_store("hsxnone://host/x", {name: 1}, backend="fsspec"),
        lambda: list(read_in_child(InputConfig(path="x", storage_options={name: lambda: 0}), [], [], [])),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as e:
            call()
        assert SECRET not in str(e.value)
        assert TOKEN not in str(e.value)
    read_connector_config({name: 1})
    assert "is unknown and ignored" in caplog.text
    assert SECRET not in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"engine_kwargs": f"hf_token={SECRET}"},
        {"store": f"secret={SECRET}"},
        {"store": {"storage_options": f"key={SECRET}"}},
        {"replica": {"env": f"A={SECRET}"}},
        {"codec": f"https://u:{SECRET}@h"},
        {"deadline": f"https://u:{SECRET}@h"},
        {"store": {"retry_seconds": f"https://u:{SECRET}@h"}},
    ],
)
def test_errors_of_wrong_types_show_no_credentials(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r": expected .*, got .*\. ") as e:
        load_config(None, (), **{"model": "m", "output": "o", "layers": [1], **settings})
    assert SECRET not in str(e.value)
