"""Every documented form of a credential, with any characters in its value and URLs around it in the same word."""

from __future__ import annotations

import pytest

from hsx_dist.config import public_url
from hsx_dist.config.redaction import redact_text
from hsx_dist.config.secrets import compared_form, hide_secrets
from hsx_dist.text import bounded

PIECES = ("Qz7Kw2Mx", "Vt4Hp9Ls", "Nb3Yd8Rg")
SEPARATORS = ("@", "/", "?", "#", ";", ":", "'", '"', "-")
#: Form → the characters that end its value, and those that make it another form (``https://h/a@b`` has no credential).
FORMS = {
    "https://user:{}@host/x": "",
    "s3://KEY:{}@bucket/x": "",
    "sftp://:{}@host/x": "",
    "redis://:{}@host:80/0": "",
    "https://{}@host/x": "/?#",
    "user:{}@host": ",'\"",
    "https://host/x?n=1&token={}": "'\"",
    "http://minio:9000/x?password={}": "'\"",
    "https://me:pw@host/x?user=me@corp.com&token={}": "'\"",
    "https://host/x;token={}": "'\"",
    "https://host/x#access_token={}": "'\"",
    '"password":"{}"': '"',
    "'password':'{}'": "'",
    "password='{}'": "'",
    "('token','{}')": "'",
    '"secrets":[null,"{}"]': '"',
    "<password>{}</password>": "",
    "Authorization: Bearer {}": "'\"",
    "AccountKey={}": ";'\"",
    "jdbc:sqlserver://h:1433;user=me;password={}": ";'\"",
}
CONTEXTS = (
    "{}",
    'failed: {{"proxy":"http://proxy:80",{}}}',
    '{{"proxy":"http://me:pw@proxy:80",{},"n":1}}',
    "{{'url':'s3://bucket/a@b',{}}}",
    "<url>http://h:80</url>{}",
    "https://h/x,{}",
    "https://u:p@h/x {}",
    "a@b.c,{},http://h:80/x@y",
    "({})",
)


def values(excluded: str) -> list[str]:
    separators = [one for one in SEPARATORS if one not in excluded]
    pairs = [pair for one in separators for pair in ((one, one), (one, "@"), ("@", one))]
    return [f"{PIECES[0]}{a}{PIECES[1]}{b}{PIECES[2]}" for a, b in dict.fromkeys(pairs)]


def shows_a_part(text: str) -> bool:
    return any(piece[i : i + 4] in text for piece in PIECES for i in range(len(piece) - 3))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("form", FORMS)
def test_no_part_of_a_credential_stays(form: str, context: str) -> None:
    for value in values(FORMS[form]):
        text = context.format(form.format(value))
        shown = (redact_text(text), bounded(text), hide_secrets(text), hide_secrets({text: 1}), compared_form(text))
        assert not any(shows_a_part(str(one)) for one in shown), (text, shown)
        assert redact_text(shown[0]) == shown[0]
        assert hide_secrets(shown[2]) == shown[2]


@pytest.mark.parametrize("before", ["", "zip://a::", "simplecache::", "https://proxy/", "s3://b/a@b,"])
@pytest.mark.parametrize("form", [form for form in FORMS if "://" in form and "jdbc" not in form])
def test_a_url_is_shown_without_any_part_of_its_credential(form: str, before: str) -> None:
    for value in values(FORMS[form]):
        text = before + form.format(value)
        shown = public_url(text)
        assert not shows_a_part(shown), (text, shown)
        assert public_url(shown) == shown
