"""Finds settings, parameters and elements whose names say that they hold credentials."""

from __future__ import annotations

import re

#: Text in place of a value that is not shown.
HIDDEN = "(not shown)"

#: The value of an environment variable, in a setting.
ENV_REFERENCE = re.compile(r"\$\{env:[^{}]*\}")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=Token)")
#: The end of a word such as ``pgpassword`` or ``secret1``.
_SECRET_END = re.compile(r"(?:password|passwd|secret|accesskey|apikeys|sshpass)\d*\Z")
_SECRET_WORDS = frozenset(
    [
        "key",
        "apikey",
        "accesskey",
        "secretkey",
        "accountkey",
        "authkey",
        "privatekey",
        "rlkey",
        "sharedkey",
        "signingkey",
        "secret",
        "secrets",
        "clientsecret",
        "sharedsecret",
        "credential",
        "credentials",
        "creds",
        "token",
        "accesstoken",
        "authtoken",
        "refreshtoken",
        "securitytoken",
        "sessiontoken",
        "bearer",
        "jwt",
        "password",
        "passwd",
        "passphrase",
        "passcode",
        "pwd",
        "auth",
        "authorization",
        "oauth",
        "tempauth",
        "sas",
        "sig",
        "signature",
        "cookie",
        "cookies",
    ]
)
_SECRET_PHRASES = frozenset(
    [
        *((first, last) for first in ("connection", "conn") for last in ("string", "str")),
        # Alone, "tokens" and "keys" are the model's words.
        *(
            (first, last)
            for first in ("access", "account", "api", "auth", "hf", "private", "refresh", "secret", "session", "shared")
            for last in ("tokens", "keys")
        ),
        ("pass", "phrase"),
    ]
)
#: Names that are secret only as a whole: vLLM has a ``pass_config``.
_SECRET_NAMES = frozenset({"pass", "pw", "pat"})
# "token" is also the model's word: token_ids, skip_special_tokens, max_tokens, token_type_ids are no secrets.
_AFTER_TOKEN = frozenset({"id", "ids", "type", "count", "limit"})


def is_env_reference(value: object) -> bool:
    """Whether ``value`` is one ``${env:NAME}`` and nothing else."""
    return isinstance(value, str) and ENV_REFERENCE.fullmatch(value.strip()) is not None


def looks_secret(name: str) -> bool:
    """Whether a setting of this name usually holds a credential.

    >>> looks_secret("aws_secret_access_key"), looks_secret("HF_TOKEN"), looks_secret("token_ids")
    (True, True, False)
    """
    if name.lower().strip("-") in _SECRET_NAMES:  # an option of a command has dashes
        return True
    words = [w for w in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()) if w]
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if word == "token" and following in _AFTER_TOKEN:
            continue
        if word in _SECRET_WORDS and not (word == "signature" and following == "version"):
            return True
        if _SECRET_END.search(word):
            return True
        if (word, following) in _SECRET_PHRASES:
            return True
    return False
