"""fsspec's storage options, and the credentials that its libraries would find, in obstore's terms.

Who is asking is never decided here: botocore (below s3fs) and gcsfs themselves are asked, so that installing obstore
cannot change whose credentials are used. What has no counterpart raises ``NotTranslated``.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hsx_dist.errors import ConfigError

#: Options that mean nothing to whole objects: how fsspec reads files, caches and names.
_FILES_ONLY = frozenset(
    {
        "asynchronous",
        "cache_regions",
        "consistency",
        "cache_timeout",
        "check_connection",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "default_location",
        "fixed_upload_size",
        "listings_expiry_time",
        "local_expiry_check",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
_S3_OPTIONS = frozenset(
    {
        "anon",
        "client_kwargs",
        "config_kwargs",
        "endpoint_url",
        "key",
        "password",
        "profile",
        "requester_pays",
        "s3_additional_kwargs",
        "secret",
        "token",
        "use_ssl",
        "username",
        "version_aware",
    }
)
_CLIENT_KWARGS = frozenset(
    {
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "endpoint_url",
        "region_name",
        "use_ssl",
        "verify",
    }
)
_CONFIG_KWARGS = frozenset(
    {
        "connect_timeout",
        "max_pool_connections",
        "read_timeout",
        "region_name",
        "request_checksum_calculation",
        "response_checksum_validation",
        "retries",
        "s3",
        "signature_version",
        "tcp_keepalive",
        "user_agent_extra",
    }
)
_PUT_KWARGS = frozenset(
    {
        "BucketKeyEnabled",
        "SSECustomerAlgorithm",
        "SSECustomerKey",
        "SSECustomerKeyMD5",
        "SSEKMSKeyId",
        "ServerSideEncryption",
        "StorageClass",
        "Tagging",
    }
)
#: obstore reads these by itself and botocore does not: with one of them set, the two would not do the same.
_OBSTORE_ONLY_ENV = (
    "AWS_ALLOW_HTTP",
    "AWS_CHECKSUM_ALGORITHM",
    "AWS_CONDITIONAL_PUT",
    "AWS_DISABLE_TAGGING",
    "AWS_ENDPOINT",
    "AWS_REQUEST_PAYER",
    "AWS_S3_EXPRESS",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SKIP_SIGNATURE",
    "AWS_SSE_BUCKET_KEY_ENABLED",
    "AWS_SSE_CUSTOMER_KEY_BASE64",
    "AWS_SSE_KMS_KEY_ID",
    "AWS_TOKEN",
    "AWS_UNSIGNED_PAYLOAD",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
)
#: How long obstore keeps what a provider gave: asking botocore again is cheap, and it knows when to refresh.
_KEEP = timedelta(seconds=60)


class NotTranslated(Exception):
    """An option, or a place for credentials, that obstore cannot be given as fsspec understands it."""


@dataclass(frozen=True)
class Connection:
    """How obstore reaches a bucket, as fsspec would with the same options and environment.

    ``make(client_options, retry_config)`` gives obstore's own store for the whole bucket. ``renewable``: credentials
    that ran out may be there anew when they are looked up again. ``region()``: where the service says the bucket lies.
    """

    make: Callable[[dict[str, Any], dict[str, Any]], Any]
    renewable: bool
    client_options: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, str] | None = None
    tags: Mapping[str, str] | None = None
    max_retries: int = 2
    sorts: bool = False
    region: Callable[[], str | None] = lambda: None


def connect(scheme: str, bucket: str, options: Mapping[str, Any], region: str | None = None) -> Connection:
    """How to reach ``bucket``; ``region`` overrules what options and environment say.

    Raises:
        NotTranslated: see there.
        ConfigError: obstore, botocore or gcsfs is missing, or an option has a wrong type.
    """
    try:
        import obstore  # noqa: F401
    except ImportError as e:
        raise ConfigError("store.backend obstore: the package obstore is missing; pip install obstore") from e
    if scheme in ("s3", "s3a"):
        return _s3(bucket, options, region)
    if scheme in ("gs", "gcs"):
        return _gcs(bucket, options)
    if scheme in ("az", "abfs", "abfss"):
        return _azure(bucket, options)
    raise NotTranslated(f"obstore speaks s3, gs and az here, not {scheme}")


def _only(options: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for name, value in options.items():
        if name not in known and name not in _FILES_ONLY and value is not None:
            raise NotTranslated(f"{where}.{name} has no counterpart in obstore")


# -- S3 ------------------------------------------------------------------------------------------------------------


class BotocoreCredentials:
    """An obstore credential provider that hands out what a botocore session resolved, refreshed by botocore."""

    def __init__(self, credentials: Any):
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        if self._credentials is None:
            # Not before: a store can be opened wherever it is, as fsspec's can.
            from botocore.exceptions import NoCredentialsError

            raise NoCredentialsError
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _KEEP,
        }


def _s3(bucket: str, options: Mapping[str, Any], region: str | None) -> Connection:
    from obstore.store import S3Store

    _only(options, _S3_OPTIONS, "storage_options")
    client_kwargs = dict(_mapping(options, "client_kwargs"))
    config_kwargs = dict(_mapping(options, "config_kwargs"))
    put_kwargs = _mapping(options, "s3_additional_kwargs")
    _only(client_kwargs, _CLIENT_KWARGS, "storage_options.client_kwargs")
    _only(config_kwargs, _CONFIG_KWARGS, "storage_options.config_kwargs")
    _only(put_kwargs, _PUT_KWARGS, "storage_options.s3_additional_kwargs")
    for name in _OBSTORE_ONLY_ENV:
        if name in os.environ:
            raise NotTranslated(f"the environment variable {name} means something to obstore alone")
    if options.get("version_aware") or bucket.endswith("--x-s3") or ":" in bucket:
        raise NotTranslated("versions, directory buckets and access points are left to s3fs")
    client = _botocore_client(options, client_kwargs, config_kwargs, region)
    anonymous = bool(options.get("anon"))
    credentials = None if anonymous else client._request_signer._credentials
    endpoint = str(client.meta.endpoint_url)
    aws = (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    s3 = _mapping(config_kwargs, "s3")
    style = s3.get("addressing_style", "auto")
    virtual = aws and "." not in bucket and style != "path"
    if style == "virtual" and not virtual:
        raise NotTranslated("config_kwargs.s3.addressing_style virtual with an endpoint of its own is left to s3fs")
    if set(s3) - {"addressing_style", "payload_signing_enabled"}:
        raise NotTranslated("storage_options.config_kwargs.s3 has what obstore has not")
    # As botocore does: over TLS the payload is not hashed once more. Without TLS it is, unless the user says otherwise.
    unsigned = not s3.get("payload_signing_enabled", not endpoint.startswith("https://"))
    config: dict[str, Any] = {
        "region": region or _region(client),
        "endpoint": _virtual_endpoint(endpoint, bucket) if virtual else endpoint,
        "virtual_hosted_style_request": virtual,
        "unsigned_payload": unsigned,
        "skip_signature": anonymous,
        "disable_bulk_delete": True,
        **_encryption(put_kwargs),
    }
    if options.get("requester_pays"):
        config["request_payer"] = True
    if config_kwargs.get("request_checksum_calculation") == "when_supported":
        config["checksum_algorithm"] = "CRC64NVME"
    client_options = _http_options(endpoint, client_kwargs.get("verify"), client, config_kwargs)

    provider: Any = None if anonymous else BotocoreCredentials(credentials)

    def make(client_config: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        return S3Store(
            bucket,
            config=config,  # type: ignore[arg-type]
            client_options=client_config,  # type: ignore[arg-type]
            retry_config=retry_config,  # type: ignore[arg-type]
            credential_provider=provider,
        )

    def true_region() -> str | None:
        # botocore follows the redirect by itself, and is told.
        found = client.head_bucket(Bucket=bucket)
        headers = found["ResponseMetadata"]["HTTPHeaders"]
        told = found.get("BucketRegion") or headers.get("x-amz-bucket-region")
        return str(told) if told and told != config["region"] else None

    retries = _mapping(config_kwargs, "retries")
    attempts = retries.get("total_max_attempts") or retries.get("max_attempts", 2) + 1
    storage_class = put_kwargs.get("StorageClass")
    return Connection(
        make=make,
        renewable=not any(options.get(name) for name in ("token", "anon")) and "aws_session_token" not in client_kwargs,
        client_options=client_options,
        attributes={"Storage-Class": str(storage_class)} if storage_class else None,
        tags=dict(parse_qsl(str(put_kwargs["Tagging"]))) if put_kwargs.get("Tagging") else None,
        max_retries=max(int(attempts) - 1, 0),
        # AWS promises it; SeaweedFS walks folders, "a/b" before "a-b".
        sorts=aws,
        region=true_region,
    )


def _botocore_client(
    options: Mapping[str, Any], client_kwargs: Mapping[str, Any], config_kwargs: Mapping[str, Any], region: str | None
) -> Any:
    """The client that s3fs would make, of which only the settings are used."""
    try:
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.session import Session
    except ImportError as e:
        raise ConfigError("store.backend obstore: the package botocore is missing; pip install 'hsx-dist[s3]'") from e
    kwargs: dict[str, Any] = {
        "aws_access_key_id": options.get("key") or options.get("username"),
        "aws_secret_access_key": options.get("secret") or options.get("password"),
        "aws_session_token": options.get("token"),
        "endpoint_url": options.get("endpoint_url"),
        "use_ssl": options.get("use_ssl", True),
        "region_name": region,
    }
    kwargs = {**{k: v for k, v in kwargs.items() if v is not None}, **client_kwargs}
    config = dict(config_kwargs)
    if options.get("anon"):
        config["signature_version"] = UNSIGNED
        kwargs = {k: v for k, v in kwargs.items() if not k.startswith("aws_")}
    session = Session(profile=options["profile"]) if options.get("profile") else Session()
    return session.create_client("s3", config=Config(**config), **kwargs)


def _region(client: Any) -> str:
    region = str(client.meta.region_name or "us-east-1")
    return "us-east-1" if region == "aws-global" else region


def _virtual_endpoint(endpoint: str, bucket: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{bucket}.{parts.netloc}"


def _encryption(put_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Server-side encryption of every put (and, with a customer's key, of every get)."""
    found: dict[str, Any] = {}
    if put_kwargs.get("SSECustomerKey"):
        key = put_kwargs["SSECustomerKey"]
        raw = key.encode() if isinstance(key, str) else bytes(key)
        found["server_side_encryption"] = "sse-c"
        found["sse_customer_key_base64"] = base64.b64encode(raw).decode()
        return found
    if put_kwargs.get("ServerSideEncryption"):
        found["server_side_encryption"] = str(put_kwargs["ServerSideEncryption"])
    if put_kwargs.get("SSEKMSKeyId"):
        found["sse_kms_key_id"] = str(put_kwargs["SSEKMSKeyId"])
    if put_kwargs.get("BucketKeyEnabled") is not None:
        found["sse_bucket_key_enabled"] = bool(put_kwargs["BucketKeyEnabled"])
    return found


def _http_options(endpoint: str, verify: Any, client: Any, config_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=float(config_kwargs.get("connect_timeout", 10))),
    }
    if "read_timeout" in config_kwargs:
        found["read_timeout"] = timedelta(seconds=float(config_kwargs["read_timeout"]))
    if verify is None:
        verify = getattr(client._endpoint.http_session, "_verify", True)
    if verify is False:
        found["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        found["root_certificate"] = Path(verify).read_bytes()
    return found


def _mapping(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = options.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"storage_options do not fit: {name}: expected a mapping, came {type(value).__name__}")
    return value


# -- GCS -----------------------------------------------------------------------------------------------------------

_GCS_OPTIONS = frozenset(["token", "project", "access", "endpoint_url", "requests_timeout", "timeout"])


class GcsfsCredentials:
    """An obstore credential provider that hands out gcsfs's own token, refreshed by gcsfs."""

    def __init__(self, credentials: Any):
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        self._credentials.maybe_refresh()
        return {"token": self._credentials.credentials.token, "expires_at": datetime.now(UTC) + _KEEP}


def _gcs(bucket: str, options: Mapping[str, Any]) -> Connection:
    from obstore.store import GCSStore

    _only(options, _GCS_OPTIONS, "storage_options")
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    if endpoint:
        raise NotTranslated("emulators of GCS speak its JSON interface, and obstore the XML one")
    for name in ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN", "GOOGLE_BASE_URL"):
        if name in os.environ:
            raise NotTranslated(f"the environment variable {name} means something to obstore alone")
    try:
        from gcsfs import GCSFileSystem
    except ImportError as e:
        raise ConfigError("store.backend obstore: the package gcsfs is missing; pip install 'hsx-dist[gcs]'") from e
    fs = GCSFileSystem(**{**options, "skip_instance_cache": True})
    credentials = fs.credentials
    anonymous = credentials.credentials is None
    provider: Any = None if anonymous else GcsfsCredentials(credentials)

    def make(client_config: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        return GCSStore(
            bucket,
            config={"skip_signature": anonymous},
            client_options=client_config,  # type: ignore[arg-type]
            retry_config=retry_config,  # type: ignore[arg-type]
            credential_provider=provider,
        )

    return Connection(make=make, renewable="token" not in options, sorts=True)


# -- Azure ---------------------------------------------------------------------------------------------------------

#: adlfs's option, its environment variable, and obstore's name for it.
_AZURE = (
    ("account_name", "AZURE_STORAGE_ACCOUNT_NAME", "account_name"),
    ("account_key", "AZURE_STORAGE_ACCOUNT_KEY", "account_key"),
    ("sas_token", "AZURE_STORAGE_SAS_TOKEN", "sas_token"),
    ("tenant_id", "AZURE_STORAGE_TENANT_ID", "tenant_id"),
    ("client_id", "AZURE_STORAGE_CLIENT_ID", "client_id"),
    ("client_secret", "AZURE_STORAGE_CLIENT_SECRET", "client_secret"),
)


def _azure(bucket: str, options: Mapping[str, Any]) -> Connection:
    from obstore.store import AzureStore

    _only(options, frozenset(name for name, _, _ in _AZURE), "storage_options")
    if "AZURE_STORAGE_CONNECTION_STRING" in os.environ or "@" in bucket:
        raise NotTranslated("connection strings and container@account urls are left to adlfs")
    config = {theirs: options.get(name) or os.environ.get(env) for name, env, theirs in _AZURE}
    config = {name: value for name, value in config.items() if value}
    if "account_name" not in config:
        raise ConfigError("storage_options.account_name: expected the Azure storage account, came none; set it")
    if not ({"account_key", "sas_token", "client_secret"} & set(config)):
        raise NotTranslated("without an account key, SAS token or client secret adlfs looks further than obstore does")

    def make(client_config: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        return AzureStore(
            bucket,
            config=config,  # type: ignore[arg-type]
            client_options=client_config,  # type: ignore[arg-type]
            retry_config=retry_config,  # type: ignore[arg-type]
        )

    return Connection(make=make, renewable=False, sorts=True)
