"""Translation of s3fs's storage options and botocore's credentials into obstore's."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hsx_dist.config.urls import PROFILES_ENDPOINT, check_endpoint
from hsx_dist.errors import ConfigError, install_extra
from hsx_dist.regular_files import open_regular
from hsx_dist.store.faults import looking_up
from hsx_dist.store.obstore_connection import KEEP, Connection, NotTranslated, mapping, only

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
#: obstore reads these and botocore does not: with one of them set, the two would behave differently.
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


class BotocoreCredentials:
    """An obstore credential provider that returns a botocore session's credentials, refreshed by botocore.

    ``credentials``: None if none were found. ``look_up()`` may find some later.
    """

    def __init__(self, credentials: Any, look_up: Callable[[], Any]):
        self._credentials = credentials
        self._look_up = look_up
        self.secrets: set[str] = set()  # every secret returned

    def __call__(self) -> dict[str, Any]:
        with looking_up():
            self._credentials = self._credentials or self._look_up()
            if self._credentials is None:
                # Raised here and not in ``__init__``: as with fsspec, opening a store needs no credentials.
                from botocore.exceptions import NoCredentialsError

                raise NoCredentialsError
            frozen = self._credentials.get_frozen_credentials()
        self.secrets |= {secret for secret in (frozen.secret_key, frozen.token) if secret}
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + KEEP,
        }


@dataclass(frozen=True)
class _Given:
    """s3fs's options for a bucket, with its nested mappings as separate fields."""

    bucket: str
    options: Mapping[str, Any]
    client: Mapping[str, Any]
    config: Mapping[str, Any]
    put: Mapping[str, Any]

    @classmethod
    def of(cls, bucket: str, options: Mapping[str, Any]) -> _Given:
        """Check the options. Raises ``NotTranslated`` if obstore would behave differently from s3fs."""
        only(options, _S3_OPTIONS, "storage_options")
        known = {"client_kwargs": _CLIENT_KWARGS, "config_kwargs": _CONFIG_KWARGS, "s3_additional_kwargs": _PUT_KWARGS}
        for name, names in known.items():
            only(mapping(options, name), names, f"storage_options.{name}")
        for name in _OBSTORE_ONLY_ENV:
            if name in os.environ:
                raise NotTranslated(f"only obstore reads the environment variable {name}")
        if options.get("version_aware") or bucket.endswith("--x-s3") or ":" in bucket:
            raise NotTranslated("only s3fs takes versions, directory buckets and access points")
        return cls(bucket, options, *(mapping(options, name) for name in known))


def s3_connection(bucket: str, options: Mapping[str, Any], region: str | None) -> Connection:
    """Return a connection to ``bucket`` equivalent to s3fs's. ``region`` overrides options and environment."""
    from obstore.store import S3Store

    given = _Given.of(bucket, options)
    client, look_up = _botocore_client(options, given.client, given.config, region)
    check_endpoint(str(client.meta.endpoint_url), PROFILES_ENDPOINT)
    config = _s3_config(given, client, region)
    anonymous = bool(options.get("anon"))
    provider: Any = None if anonymous else BotocoreCredentials(client._request_signer._credentials, look_up)
    client_options = _http_options(str(client.meta.endpoint_url), given.client.get("verify"), client, given.config)

    def make(client_config: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        return S3Store(
            bucket,
            config=config,  # type: ignore[arg-type]
            client_options=client_config,  # type: ignore[arg-type]
            retry_config=retry_config,  # type: ignore[arg-type]
            credential_provider=provider,
        )

    retries = mapping(given.config, "retries")
    attempts = retries.get("total_max_attempts") or retries.get("max_attempts", 2) + 1
    storage_class = given.put.get("StorageClass")
    return Connection(
        make=make,
        secrets=provider.secrets if provider is not None else (),
        renewable=not any(options.get(name) for name in ("token", "anon")) and "aws_session_token" not in given.client,
        client_options=client_options,
        attributes={"Storage-Class": str(storage_class)} if storage_class else None,
        tags=dict(parse_qsl(str(given.put["Tagging"]))) if given.put.get("Tagging") else None,
        max_retries=max(int(attempts) - 1, 0),
        region=partial(_true_region, client, bucket, config["region"]),
    )


def _s3_config(given: _Given, client: Any, region: str | None) -> dict[str, Any]:
    """Return the ``S3Config`` equivalent to s3fs with ``client``."""
    endpoint, bucket = str(client.meta.endpoint_url), given.bucket
    s3 = mapping(given.config, "s3")
    style = s3.get("addressing_style", "auto")
    virtual = _of_aws(client) and "." not in bucket and style != "path"
    if style == "virtual" and not virtual:
        raise NotTranslated("only s3fs takes config_kwargs.s3.addressing_style virtual with a custom endpoint")
    if set(s3) - {"addressing_style", "payload_signing_enabled"}:
        raise NotTranslated("storage_options.config_kwargs.s3 has a member without a counterpart in obstore")
    config: dict[str, Any] = {
        "region": region or _region(client),
        "endpoint": _virtual_endpoint(endpoint, bucket) if virtual else endpoint,
        "virtual_hosted_style_request": virtual,
        # Like botocore, hash the payload for the signature only without TLS, unless the user sets the option.
        "unsigned_payload": not s3.get("payload_signing_enabled", not endpoint.startswith("https://")),
        "skip_signature": bool(given.options.get("anon")),
        "disable_bulk_delete": True,
        **_encryption(given.put),
    }
    if given.options.get("requester_pays"):
        config["request_payer"] = True
    if given.config.get("request_checksum_calculation") == "when_supported":
        config["checksum_algorithm"] = "CRC64NVME"
    return config


def _of_aws(client: Any) -> bool:
    return (urlsplit(str(client.meta.endpoint_url)).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _true_region(client: Any, bucket: str, asked: str) -> str | None:
    """Return the bucket's region if it differs from ``asked``.

    botocore follows the redirect, and a response that denies access also names the region.
    """
    try:
        found = client.head_bucket(Bucket=bucket)
    except Exception as e:  # noqa: BLE001 - the caller raises its first error, not this one
        found = getattr(e, "response", None) or {}
    headers = found.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    actual = found.get("BucketRegion") or headers.get("x-amz-bucket-region")
    return str(actual) if actual and actual != asked else None


def _botocore_client(
    options: Mapping[str, Any], client_kwargs: Mapping[str, Any], config_kwargs: Mapping[str, Any], region: str | None
) -> tuple[Any, Callable[[], Any]]:
    """Make the same client as s3fs, and a function that looks up its credentials again. Only its settings are used."""
    try:
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.session import Session
    except ImportError as e:
        raise ConfigError(
            f"store.backend obstore: expected the package botocore, got none. {install_extra('s3')}"
        ) from e
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
    return session.create_client("s3", config=Config(**config), **kwargs), session.get_credentials


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
        with open(verify, "rb", opener=open_regular) as file:
            found["root_certificate"] = file.read()
    return found
