"""Finds settings, parameters and elements whose names say that they hold credentials."""

from __future__ import annotations

import re

#: Text in place of a value that is not shown.
HIDDEN = "(not shown)"

#: The value of an environment variable, in a setting.
ENV_REFERENCE = re.compile(r"\$\{env:[^{}]*\}")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=Token)")
#: The end of a word, which may follow another word directly: ``apitoken``, ``pgpassword``, ``secret1``.
_SECRET_END = re.compile(
    r"(?:key|token|secrets?|passwords?|passwd|passphrases?|passcode|pwd|(?:ssh|user|db)pass|credentials?|creds|"
    r"auth|authtok|authori[sz]ation|authentication|cookies?|signature)\d*\Z"
)
_SECRET_WORDS = frozenset({"bearer", "jwt", "sas", "sig"})
#: Two words, or the end of one. Alone, "tokens" and "keys" are the model's words.
_SECRET_PAIR = re.compile(
    r"(?:(?:access|account|api|auth|bearer|client|encryption|hf|host|master|private|refresh|sas|secret|service|session|"
    r"shared|signing|ssh)(?:tokens|keys)|conn(?:ection)?str(?:ing)?|passphrase|clientassertion)\d*\Z"
)
#: Words that end like a secret's name. Settings of models and tables have them.
_ORDINARY = re.compile(
    r"(?:(?:don|foreign|group|hash|hoc|joc|kms|mon|primary|prompt|sort|ssekms|sub|tur|turn|whis)key|"
    r"(?:added|audio|bos|cls|eos|image|mask|max|min|multi|new|num|pad|sep|stop|sub|tik|unk|video)token)\d*"
)
#: Words that are secret only at the end, as in ``DB_PASS``: vLLM has a ``pass_config``.
_SECRET_LAST = frozenset({"pass", "pw", "pat"})
# "token" is also the model's word: token_ids, skip_special_tokens, max_tokens, token_type_ids are no secrets.
_AFTER_TOKEN = frozenset({"id", "ids", "type", "count", "limit"})
_MODELS_TOKEN = re.compile(r"(?!access|auth|refresh|security|session).*token")
#: Names that are secret only in the query of a URL. ``?code=`` has a key of Azure or a code of OAuth.
_SECRET_PARAMETERS = frozenset(
    ["authenticate", "code", "hmac", "otp", "pin", "session", "session_id", "sessionid", "sid"]
)


def is_env_reference(value: object) -> bool:
    """Whether ``value`` is one ``${env:NAME}`` and nothing else."""
    return isinstance(value, str) and ENV_REFERENCE.fullmatch(value.strip()) is not None


def looks_secret(name: str) -> bool:
    """Whether a setting of this name usually holds a credential.

    >>> looks_secret("aws_secret_access_key"), looks_secret("HF_TOKEN"), looks_secret("token_ids")
    (True, True, False)
    """
    words = [w for w in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()) if w]
    if words and words[-1] in _SECRET_LAST:
        return True
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if _ORDINARY.fullmatch(word) or (word == "signature" and following == "version"):
            continue
        if following in _AFTER_TOKEN and _MODELS_TOKEN.fullmatch(word):
            continue
        if word in _SECRET_WORDS or _SECRET_END.search(word) or _SECRET_PAIR.search(word):
            return True
        if _SECRET_PAIR.fullmatch(word + following):
            return True
    return False


def parameter_looks_secret(name: str, separator: str = "?") -> bool:
    """Whether a parameter of this name in a URL usually holds a credential. ``separator``: the character before it.

    Names of objects and folders have parts such as ``;session=4`` and ``#code=1``.
    """
    return looks_secret(name) or (separator not in (";", "#") and name.lower() in _SECRET_PARAMETERS)
