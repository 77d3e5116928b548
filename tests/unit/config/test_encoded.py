"""Credentials in texts of which percent-encoding or wide punctuation hides the form."""

from __future__ import annotations

import json
from urllib.parse import quote, urlencode

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hsx_dist.config import load_config, public_url, urls
from hsx_dist.config.encoded import word_forms
from hsx_dist.config.redaction import redact_text
from hsx_dist.config.secrets import compared_form, hide_secrets, secret_paths
from hsx_dist.config.urls import check_place_of_credentials, has_credentials, url_secrets, web_path
from hsx_dist.errors import ConfigError
from hsx_dist.store import open_store
from hsx_dist.text import bounded
from tests.unit.config.test_compositions import PIECES, shows_a_part

SECRET = "hunter2NotToBeSeen9"
ME = f"https://me:{SECRET}@host/rows.jsonl"


def encoded(text: str, times: int = 1) -> str:
    for _ in range(times):
        text = quote(text, safe="")
    return text


#: URL of a web server → its redacted form. Each encodes a credential.
WEB = {
    **{f"https://proxy/get/{encoded(ME, times)}": "https://proxy/get/https://host/rows.jsonl" for times in (1, 2, 4)},
    f"https://proxy/{encoded('https:')}//me:{SECRET}%40host/x": "https://proxy/https://host/x",
    f"https://proxy/{encoded(ME, 9)}": "https://(not shown)",
    f"http://proxy:80/a%40b/{encoded(ME)}": "http://(not shown)https://host/rows.jsonl",
    f"http://proxy:80/{encoded(ME)}": "http://proxy:80/https://host/rows.jsonl",
    f"https://host/rows.jsonl%3FX-Amz-Signature%3D{SECRET}": "https://host/rows.jsonl",
    f"https://host/rows.jsonl%3Fn=1%26sig={SECRET}": "https://host/rows.jsonl",
    f"https://host/rows.jsonl%23access_token={SECRET}": "https://host/rows.jsonl",
    f"https://proxy/a%0Ab/{encoded(ME)}": "https://proxy/ab/https://host/rows.jsonl",
    f"https://proxy/https\uff1a\uff0f\uff0fme\uff1a{SECRET}\uff20host/x": "https://proxy/https://host/x",
    f"https://proxy/https%EF%BC%9A//me:{SECRET}@host/x": "https://proxy/https://host/x",
}
#: Other texts → their redacted form.
OTHER = {
    f"s3://b/{encoded(f's3://KEY:{SECRET}@x')}": "s3://b/s3://x",
    f"zip://{encoded(ME)}::https://h/x.zip": "zip://https://host/rows.jsonl::https://h/x.zip",
    f"zip://x::me%3A{SECRET}%40host/y.zip": "zip://x::(not shown)",
    f"sftp:///{encoded(f'me:{SECRET}@host', 2)}": "sftp://(not shown)",
    f"https://{encoded(f'me:{SECRET}', 2)}%2540host/x": "https://host/x",
    encoded(ME): "https://host/rows.jsonl",
    f"me%3A{SECRET}%40host/x": "(not shown)",
    f"user\uff1a{SECRET}@host": "(not shown)",
    f"user\ufe55{SECRET}\ufe6bhost": "(not shown)",
    encoded(ME, 9): "(not shown)",
}


@pytest.mark.parametrize("text", [*WEB, *OTHER])
def test_an_encoded_credential_is_found_and_not_shown(text: str) -> None:
    assert has_credentials(text)
    shown = public_url(text)
    assert shown == {**WEB, **OTHER}[text]
    assert public_url(shown) == shown
    assert list(secret_paths(text)) == [()]
    line = redact_text(f"GET {text} failed")
    assert line.startswith("GET ")
    assert line.endswith(" failed")
    assert redact_text(line) == line
    for form in (shown, line, hide_secrets([text, f"{text} x"]), hide_secrets({text: 1}), compared_form([text])):
        assert SECRET not in str(form)
    for take in (
        open_store,
        lambda text: load_config(None, output=text, model="m"),
        lambda text: load_config(None, output="o", model=text),
        lambda text: load_config(None, [f"input.path={text}"], output="o", model="m"),
    ):
        with pytest.raises(ConfigError) as e:
            take(text)
        assert SECRET not in str(e.value)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"n": 1, "token": SECRET}),
        json.dumps({"headers": {"Authorization": f"Bearer {SECRET}"}}),
        json.dumps({"api_keys": [None, SECRET]}),
        str({"password": SECRET}),
        str(("password", SECRET)),
    ],
)
def test_a_plus_for_a_blank_hides_no_credential(text: str, times: int) -> None:
    for _ in range(times):
        text = urlencode({"options": text})
    url = f"https://host/rows.jsonl?{text}"
    line = redact_text(f"GET {url} failed")
    assert SECRET not in line
    assert redact_text(line) == line
    assert list(secret_paths(url)) == [()]


@pytest.mark.parametrize("token", ["QWxhZGR+bjpvcGVu%3D", "QW+%2FZGVuOm9wZW4xMjM0"])
def test_a_plus_in_a_token_is_no_blank(token: str) -> None:
    assert redact_text(f"Authorization%3A%20Basic%20{token}") == "Authorization: Basic (not shown)"


def test_a_text_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run.json may have very many encoded texts."""
    decoded = []
    monkeypatch.setattr(urls, "word_forms", lambda text: decoded.append(text) or word_forms(text))
    texts = [f"@:http://http://{n}%25252525" for n in range(3)]
    assert hide_secrets(texts) == texts
    assert decoded == texts


@pytest.mark.parametrize("url", WEB)
def test_a_file_of_a_proxy_is_named_without_the_encoded_credential(url: str) -> None:
    assert web_path(url) == WEB[url]
    config = load_config(None, output="o", model="m", input={"path": url})
    assert SECRET not in f"{config!r} {json.dumps([config.public(), config.meaning()])}"


@pytest.mark.parametrize("text", OTHER)
def test_an_encoded_credential_in_another_input_is_refused(text: str) -> None:
    """Rows are named by objects and members of archives as they are."""
    if text.startswith("https://"):
        assert SECRET not in web_path(text)
        return
    with pytest.raises(ConfigError, match="without credentials") as e:
        check_place_of_credentials(text)
    assert SECRET not in str(e.value)


@pytest.mark.parametrize(
    "path",
    [
        "/a%20b.jsonl",
        "/a%2Fb.jsonl",
        "/a%40b.jsonl",
        "/a%3Ab%40c.jsonl",
        "/2026-01-01T00%3A00%3A00/a%2540b@c",
        "/50%25/%E4%BD%A0%E5%A5%BD\uff1a\u4f60.jsonl",
        "/x%3Fversion=3%26mail=a%40b",
        "/" + encoded("https://h.example:8080/x y@z"),
        "/" + encoded("a b", 4),
    ],
)
@pytest.mark.parametrize("host", ["h", "minio:9000", "h.example:9000", "127.0.0.1:80", "[::1]:80"])
def test_encoded_names_without_a_credential_keep_their_names(host: str, path: str) -> None:
    """Keys of stored rows have these names."""
    for scheme in ("http", "https"):
        url = f"{scheme}://{host}{path}"
        assert web_path(url) == url
    if "@" not in path:
        assert not has_credentials(url)
        assert public_url(url) == url
        assert redact_text(f"GET {url} failed") == f"GET {url} failed"
        assert hide_secrets(url) == url
        check_place_of_credentials(url)


@pytest.mark.parametrize("path", ["/data/a%3Ab%40c", "./me%3Aa%40b", "s3://b/a%3Ab%40c", "file:///d/50%25"])
def test_an_encoded_at_sign_in_a_path_is_no_credential(path: str) -> None:
    assert not list(secret_paths(path))
    assert (public_url(path), hide_secrets(path)) == (path, path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"POST %7B%22password%22%3A%22{SECRET}%22%7D", 'POST {"password":"(not shown)"}'),
        (f"to /x?u=%2Fy%3Ftoken%3D{SECRET}%26n=1 again", "to /x?u=/y?token=(not shown)&n=1 again"),
        (f"Authorization%3A%20Bearer%20{SECRET} x", "Authorization: Bearer (not shown) x"),
        (f"a%0Ame:{SECRET}%40host b", "a me:(not shown)@host b"),
        (f"to me\uff1a{SECRET}@host:80", "to me:(not shown)@host:80"),
        (f"see {encoded(ME, 9)} x", "see (not shown) x"),
        (f"GET /a%2Fb?n=1&sig={SECRET} failed", "GET /a%2Fb?n=1&sig=(not shown) failed"),
        (f"by me%2Fx:{SECRET}@host failed", "by me%2Fx:(not shown)@host failed"),
    ],
)
def test_an_encoded_credential_in_a_text_is_hidden(text: str, shown: str) -> None:
    assert redact_text(text) == shown
    assert redact_text(shown) == shown


def test_the_password_of_an_encoded_link_is_a_secret() -> None:
    assert SECRET in url_secrets(f"https://proxy/{encoded(ME)}")
    assert f"a/{SECRET}" in url_secrets(f"https://proxy/{encoded(f'https://a%2F{SECRET}@host/x')}")


#: Texts with a credential → whether it is found with any raw character in it, before the text is encoded.
FORMS = {
    "https://me:{}@host/x": True,
    "s3://KEY:{}@bucket/x": True,
    "https://proxy/?to=https://me:{}@host/x": True,
    "https://token{}@host/x": False,
    "https://host/x?n=1&token={}&z=1": False,
    "https://host/x;token={}": False,
    "https://host/x#access_token={}": False,
    '{{"password":"{}"}}': False,
    "<password>{}</password>": False,
    "AccountKey={};y=1": False,
    "Authorization: Bearer {}": False,
}
CONTEXTS = ("{}", "https://proxy/{}", "https://proxy/x?next={}&a=1", "GET https://proxy/{} failed: 404", "E('{}')")
CHARACTERS = st.one_of(st.characters(max_codepoint=127), st.sampled_from("\u00e9\u00a0\u2028\u3000\uff20\ufdd1"))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(list(FORMS)),
    st.sampled_from(CONTEXTS),
    st.sampled_from(["", "1", "7 "]),
    CHARACTERS,
    CHARACTERS,
    st.integers(0, 1),
    st.integers(1, 5),
)
@example("https://me:{}@host/x", "GET https://proxy/{} failed: 404", "7 ", "a", "b", 1, 1)
@example("https://token{}@host/x", "{}", "", "/", "a", 1, 2)
def test_no_part_of_an_encoded_credential_stays(
    form: str, context: str, before: str, a: str, b: str, inner: int, times: int
) -> None:
    """A client encodes the password, and a proxy's client the whole URL. A careless client encodes the URL only."""
    value = encoded(f"{before}{PIECES[0]}{a}{PIECES[1]}{b}{PIECES[2]}", inner or not FORMS[form])
    text = context.format(encoded(form.format(value), times))
    line = redact_text(text)
    assert redact_text(line) == line
    for shown in (line, bounded(text), hide_secrets([text]), hide_secrets({text: 1}), compared_form({"a": text})):
        assert not shows_a_part(str(shown)), (text, shown)
    if form.startswith("https:") and context in CONTEXTS[:3]:
        assert not shows_a_part(public_url(text))


@pytest.mark.parametrize("end", ["%20", "%09", "%22", "%27", "%3C", "%2C", "\uff02", "%2520"])
def test_a_decoded_character_ends_no_password(end: str) -> None:
    """A part of a password may look like a port."""
    text = f"Use https://proxy/https%3A%2F%2Fme%3A7{end}{SECRET}%40host%2Fx.jsonl for it"
    assert redact_text(text) == "Use https://proxy/https://host/x.jsonl for it"
    assert has_credentials(text)
    for shown in (hide_secrets(text), compared_form(text), public_url(text)):
        assert SECRET not in shown
