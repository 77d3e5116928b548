"""Installing obstore changes no credentials: with the same options and environment both back ends sign alike.

Compared are a server's requests: access key, region, session token, and the requested address.
"""

from __future__ import annotations

import json
import re

import pytest

from hsx_dist.errors import ConfigError, Denied, StoreError
from hsx_dist.store import open_store
from tests.harness.discard import Answer, discard_server
from tests.harness.http_server import Answers, served

_SIGNED = re.compile(r"Credential=(?P<key>[^/]+)/\d{8}/(?P<region>[^/]+)/s3/")
_STS = """<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>ASIAWEB</AccessKeyId><SecretAccessKey>web-secret</SecretAccessKey><SessionToken>web-token</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


@pytest.fixture
def server():
    with discard_server() as found:
        yield found


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """Remove all credentials except those that a test sets."""
    import os

    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@pytest.fixture
def issuer():
    """Replaces the cloud services that issue credentials: container, instance, STS."""
    temporary = {"Token": "role-token", "Expiration": "2099-01-01T00:00:00Z", "Code": "Success", "Type": "AWS-HMAC"}

    class Handler(Answers):
        def _say(self, text: str) -> None:
            kind = "text/xml" if text.startswith("<") else "application/json"
            self.answer(200, text.encode(), Content_Type=kind)

        def do_GET(self):
            if self.path.rstrip("/").endswith("security-credentials"):
                self._say("the-role")
            elif self.path.endswith("/container"):
                self._say(json.dumps({"AccessKeyId": "ASIACONTAINER", "SecretAccessKey": "s", **temporary}))
            else:
                self._say(json.dumps({"AccessKeyId": "ASIAINSTANCE", "SecretAccessKey": "s", **temporary}))

        def do_PUT(self):  # the instance service's session token
            self._say("imds-token")

        def do_POST(self):
            self.received()
            self._say(_STS)

    with served(Handler) as url:
        yield url


def environment(patch, server, issuer, tmp_path):
    for name, value in {"ACCESS_KEY_ID": "AKIAENV", "SECRET_ACCESS_KEY": "s", "SESSION_TOKEN": "env-token"}.items():
        patch.setenv(f"AWS_{name}", value)
    patch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    patch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
    return {}, ("AKIAENV", "eu-central-1", "env-token")


def options(patch, server, issuer, tmp_path):
    environment(patch, server, issuer, tmp_path)
    given = {"key": "AKIAOPTION", "secret": "s", "client_kwargs": {"region_name": "eu-west-3"}}
    return given, ("AKIAOPTION", "eu-west-3", None)


def options_with_token(patch, server, issuer, tmp_path):
    given = {"key": "AKIAOPTION", "secret": "s", "token": "given-token", "endpoint_url": server.endpoint_url}
    return given, ("AKIAOPTION", "us-east-1", "given-token")


def profiles(server, tmp_path):
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id=AKIADEFAULT\naws_secret_access_key=s\n"
        "[mine]\naws_access_key_id=AKIAMINE\naws_secret_access_key=s\naws_session_token=my-token\n"
    )
    (tmp_path / "config").write_text(f"[profile mine]\nregion=ap-south-1\nendpoint_url={server.endpoint_url}\n")


def profile_option(patch, server, issuer, tmp_path):
    profiles(server, tmp_path)
    return {"profile": "mine"}, ("AKIAMINE", "ap-south-1", "my-token")


def profile_variable(patch, server, issuer, tmp_path):
    profiles(server, tmp_path)
    patch.setenv("AWS_PROFILE", "mine")
    return {}, ("AKIAMINE", "ap-south-1", "my-token")


def default_profile(patch, server, issuer, tmp_path):
    profiles(server, tmp_path)
    return {"endpoint_url": server.endpoint_url}, ("AKIADEFAULT", "us-east-1", None)


def credential_process(patch, server, issuer, tmp_path):
    told = {"Version": 1, "AccessKeyId": "AKIAPROCESS", "SecretAccessKey": "s"}
    (tmp_path / "told.json").write_text(json.dumps(told))
    (tmp_path / "config").write_text(f"[default]\ncredential_process=/bin/cat {tmp_path / 'told.json'}\n")
    return {"endpoint_url": server.endpoint_url}, ("AKIAPROCESS", "us-east-1", None)


def container_role(patch, server, issuer, tmp_path):
    patch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer}/container")
    return {"endpoint_url": server.endpoint_url}, ("ASIACONTAINER", "us-east-1", "role-token")


def instance_role(patch, server, issuer, tmp_path):
    patch.delenv("AWS_EC2_METADATA_DISABLED")
    patch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{issuer}/")
    patch.setenv("AWS_METADATA_SERVICE_TIMEOUT", "30")  # botocore waits a second, which a busy machine may need
    return {"endpoint_url": server.endpoint_url}, ("ASIAINSTANCE", "us-east-1", "role-token")


def web_identity(patch, server, issuer, tmp_path):
    (tmp_path / "jwt").write_text("a.b.c")
    patch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "jwt"))
    patch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/writer")
    patch.setenv("AWS_ENDPOINT_URL_STS", issuer)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return {"endpoint_url": server.endpoint_url}, ("ASIAWEB", "us-east-1", "web-token")


def anonymous(patch, server, issuer, tmp_path):
    environment(patch, server, issuer, tmp_path)
    return {"anon": True}, (None, None, None)


CASES = [
    environment,
    options,
    options_with_token,
    profile_option,
    profile_variable,
    default_profile,
    credential_process,
    container_role,
    instance_role,
    web_identity,
    anonymous,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_both_back_ends_sign_alike(case, clean, server, issuer, tmp_path):
    given, expected = case(clean, server, issuer, tmp_path)
    seen = {}
    for backend in ("fsspec", "obstore"):
        open_store("s3://bucket/run", given, backend=backend, retry_seconds=0).put("a", [b"x"])
        request = server.requests[-1]
        assert (request.method, request.path) == ("PUT", "bucket/run/a")
        signed = _SIGNED.search(request.headers.get("authorization", ""))
        who = (signed["key"], signed["region"]) if signed else (None, None)
        seen[backend] = (*who, request.headers.get("x-amz-security-token"))
    assert seen == {"fsspec": expected, "obstore": expected}


def test_both_back_ends_raise_without_credentials(clean, server):
    for backend in ("fsspec", "obstore"):
        with pytest.raises(Denied, match="Check the credentials"):
            open_store("s3://b/run", {"endpoint_url": server.endpoint_url}, backend=backend, retry_seconds=0).put(
                "a", [b"x"]
            )
    assert server.requests == []


PUT_OPTIONS = {
    "ServerSideEncryption": "aws:kms",
    "SSEKMSKeyId": "arn:aws:kms:us-east-1:123456789012:key/abcd",
    "StorageClass": "STANDARD_IA",
    "Tagging": "team=nlp&run=7",
}


@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
@pytest.mark.parametrize("nbytes", [3, 70 << 20], ids=["one request", "in pieces"])
def test_encryption_storage_class_and_tags_are_on_every_put(backend, nbytes, server):
    store = open_store(
        "s3://b/run", server.storage_options(s3_additional_kwargs=PUT_OPTIONS), backend=backend, retry_seconds=0
    )
    store.put("a", [bytes(nbytes)])
    store.put_if_absent("b", b"1")
    creating = [r for r in server.requests if r.method == "POST" and "uploads" in r.query]
    creating += [r for r in server.requests if r.method == "PUT" and "partNumber" not in r.query]
    assert {r.path for r in creating} == {"b/run/a", "b/run/b"}
    for request in creating:
        headers = request.headers
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == PUT_OPTIONS["SSEKMSKeyId"]
        assert headers["x-amz-storage-class"] == "STANDARD_IA"
        assert sorted(headers["x-amz-tagging"].split("&")) == ["run=7", "team=nlp"]


@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
def test_a_customers_key_goes_with_puts_and_gets(backend, server):
    key = "k" * 32
    kwargs = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
    store = open_store(
        "s3://b/run", server.storage_options(s3_additional_kwargs=kwargs), backend=backend, retry_seconds=0
    )
    store.put("a", [b"123"])
    store.get("a")
    store.head("a")
    assert len(server.requests) == 3
    for request in server.requests:
        assert request.headers["x-amz-server-side-encryption-customer-algorithm"] == "AES256"
        assert request.headers["x-amz-server-side-encryption-customer-key"].startswith("a2tra2tr")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"s3_additional_kwargs": {"ACL": "bucket-owner-full-control"}}, "ACL"),
        ({"config_kwargs": {"proxies": {"http": "http://127.0.0.1:9"}}}, "proxies"),
        ({"session": object()}, "session"),
    ],
)
def test_options_that_obstore_lacks_select_fsspec_and_are_logged(given, says, server, caplog):
    options = server.storage_options(**given)
    with pytest.raises(ConfigError, match=says):
        open_store("s3://b/run", options, backend="obstore")
    assert "FsspecStore" in repr(open_store("s3://b/run", options))
    assert f"uses fsspec, which is slower than obstore: storage_options.{next(iter(given))}" in caplog.text


@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
@pytest.mark.usefixtures("clean")
def test_a_bucket_in_another_region_is_found(backend):
    """As botocore does: the service is asked for the bucket's region, and the call is sent there."""

    def elsewhere(request):
        region = {"x-amz-bucket-region": "eu-north-1"}
        if "/eu-north-1/" in request.headers.get("authorization", ""):
            return Answer(200, headers=region) if request.method == "HEAD" and request.path == "b" else None
        status = 400 if request.method == "HEAD" else 301
        return Answer(status, b"<Error><Code>PermanentRedirect</Code></Error>", headers=region)

    with discard_server(elsewhere) as server:
        store = open_store("s3://b/run", server.storage_options(), backend=backend, retry_seconds=30)
        store.put("a", [b"x"])
        assert store.get("a") == b"x"
        another = open_store("s3://b/run", server.storage_options(), backend=backend, retry_seconds=30)
        assert another.head("a").size == 1


def test_a_bucket_in_another_region_raises_an_error_that_names_the_region(clean):
    def elsewhere(request):
        if "/eu-north-1/" in request.headers.get("authorization", ""):
            return None
        return Answer(301, b"<Error><Code>PermanentRedirect</Code></Error>")

    with discard_server(elsewhere) as server:
        store = open_store("s3://b/run", server.storage_options(), backend="obstore", retry_seconds=0)
        with pytest.raises(StoreError, match="region"):
            store.put("a", [b"x"])
        right = server.storage_options(client_kwargs={"region_name": "eu-north-1"})
        open_store("s3://b/run", right, backend="obstore", retry_seconds=0).put("a", [b"x"])


def test_no_secret_is_in_the_stores_repr_or_its_errors(clean):
    def refuse(request):
        return Answer(403, f"<Error><Code>AccessDenied</Code><Message>{request.headers}</Message></Error>".encode())

    with discard_server(refuse) as server:
        for backend in ("fsspec", "obstore"):
            given = server.storage_options(secret="very-secret-value", token="very-secret-token")
            store = open_store("s3://b/run", given, backend=backend, retry_seconds=0)
            with pytest.raises(Denied) as told:
                store.put("a", [b"x"])
            for text in (repr(store), str(told.value), repr(told.value.__cause__)):
                assert "very-secret" not in text


@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
@pytest.mark.parametrize(("status", "code"), [(400, "InvalidToken"), (403, "AccessDenied"), (400, "ExpiredToken")])
@pytest.mark.usefixtures("clean")
def test_no_secret_of_a_profile_is_in_an_error(backend, status, code, tmp_path):
    """AWS may repeat a token in its answer, and so does this server."""
    token = "profile-token-" + "0123456789" * 40

    def refuse(request):
        body = f"<Error><Code>{code}</Code><Message>no</Message><Token-0>{token}</Token-0></Error>"
        return Answer(status, body.encode())

    with discard_server(refuse) as server:
        profiles(server, tmp_path)
        text = (tmp_path / "credentials").read_text()
        assert "my-token" in text
        (tmp_path / "credentials").write_text(text.replace("my-token", token))
        store = open_store("s3://b/run", {"profile": "mine"}, backend=backend, retry_seconds=0)
        with pytest.raises(StoreError) as told:
            store.put("a", [b"x"])
        for text in (repr(store), str(told.value), repr(told.value.__cause__)):
            assert "0123456789" not in text
