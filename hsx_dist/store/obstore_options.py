"""Translation of fsspec's storage options and credentials into obstore's.

botocore (below s3fs) and gcsfs resolve the credentials, so that installing obstore cannot change which are used.
Options without a counterpart raise ``NotTranslated``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hsx_dist.errors import ConfigError, install_extra
from hsx_dist.store.faults import looking_up
from hsx_dist.store.obstore_connection import KEEP, Connection, NotTranslated, only
from hsx_dist.store.obstore_s3 import s3_connection


def connect(scheme: str, bucket: str, options: Mapping[str, Any], region: str | None = None) -> Connection:
    """Return the connection to ``bucket``. ``region`` overrides options and environment.

    Raises:
        NotTranslated: obstore has no counterpart of an option or of a source of credentials.
        ConfigError: obstore, botocore or gcsfs is missing, or an option has a wrong type.
    """
    try:
        import obstore  # noqa: F401
    except ImportError as e:
        raise ConfigError(
            "store.backend obstore: expected the package obstore, got none. Run pip install obstore"
        ) from e
    if scheme in ("s3", "s3a"):
        return s3_connection(bucket, options, region)
    if scheme in ("gs", "gcs"):
        return _gcs(bucket, options)
    if scheme in ("az", "abfs", "abfss"):
        return _azure(bucket, options)
    if scheme == "file":
        return _files(bucket, options)
    raise NotTranslated(f"expected scheme s3, gs, az or file for obstore, got {scheme}")


# -- files ---------------------------------------------------------------------------------------------------------


def _files(folder: str, options: Mapping[str, Any]) -> Connection:
    from obstore.store import LocalStore

    only(options, frozenset(["auto_mkdir"]), "storage_options")
    return Connection(make=lambda *_: LocalStore(folder, mkdir=True), renewable=False)


# -- GCS -----------------------------------------------------------------------------------------------------------

_GCS_OPTIONS = frozenset(["token", "project", "access", "endpoint_url", "requests_timeout", "timeout"])

_OBSTORE_ONLY_ENV = (
    "GOOGLE_BASE_URL",
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
)


class GcsfsCredentials:
    """An obstore credential provider that returns gcsfs's token, refreshed by gcsfs."""

    def __init__(self, credentials: Any):
        self._credentials = credentials
        self.secrets: set[str] = set()  # every token returned

    def __call__(self) -> dict[str, Any]:
        with looking_up():
            self._credentials.maybe_refresh()
        self.secrets.add(self._credentials.credentials.token)
        return {"token": self._credentials.credentials.token, "expires_at": datetime.now(UTC) + KEEP}


def _gcs(bucket: str, options: Mapping[str, Any]) -> Connection:
    from obstore.store import GCSStore

    only(options, _GCS_OPTIONS, "storage_options")
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    if endpoint:
        raise NotTranslated("GCS emulators have the JSON API, and obstore uses the XML API")
    for name in _OBSTORE_ONLY_ENV:
        if name in os.environ:
            raise NotTranslated(f"only obstore reads the environment variable {name}")
    try:
        from gcsfs.core import GCSFileSystem
    except ImportError as e:
        raise ConfigError(f"store.backend obstore: expected the package gcsfs, got none. {install_extra('gcs')}") from e
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

    secrets = provider.secrets if provider is not None else ()
    return Connection(make=make, secrets=secrets, renewable="token" not in options)


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
#: Beginnings of the variables of Azure's command line tool. obstore reads none of them.
_AZURE_TOOL = ("AZURE_CONFIG_DIR", "AZURE_CORE_", "AZURE_DEFAULTS_", "AZURE_EXTENSION_DIR", "AZURE_HTTP_USER_AGENT")


def _azure(bucket: str, options: Mapping[str, Any]) -> Connection:
    from obstore.store import AzureStore

    only(options, frozenset(name for name, _, _ in _AZURE), "storage_options")
    if "@" in bucket:
        raise NotTranslated("only adlfs takes container@account urls")
    # obstore reads some thirty variables, such as an endpoint and other credentials. adlfs reads others.
    known = {env for _, env, _ in _AZURE}
    for name in sorted(os.environ.keys() - known):
        if name.startswith(("AZURE_", "AZURITE_")) and not name.startswith(_AZURE_TOOL):
            raise NotTranslated(f"obstore does not read the environment variable {name} as adlfs does")
    config = {theirs: options.get(name) or os.environ.get(env) for name, env, theirs in _AZURE}
    config = {name: value for name, value in config.items() if value}
    if "account_name" not in config:
        raise ConfigError("storage_options.account_name: expected the Azure storage account, got none. Set it")
    if not ({"account_key", "sas_token", "client_secret"} & set(config)):
        raise NotTranslated("only adlfs finds credentials other than an account key, SAS token or client secret")

    def make(client_config: dict[str, Any], retry_config: dict[str, Any]) -> Any:
        return AzureStore(
            bucket,
            config=config,  # type: ignore[arg-type]
            client_options=client_config,  # type: ignore[arg-type]
            retry_config=retry_config,  # type: ignore[arg-type]
        )

    return Connection(make=make, renewable=False)
