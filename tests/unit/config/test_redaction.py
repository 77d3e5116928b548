"""Free text without credentials, in time linear in its length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hsx_dist.config import public_url, redaction
from hsx_dist.config.redaction import MOST, redact_text
from hsx_dist.config.secrets import hide_secrets
from hsx_dist.config.urls import has_credentials
from tests.unit.growth import check_linear

SECRET = "hunter2Not-to-be-seen9"
#: Letters only, as the Hugging Face hub makes them.
HUB = "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZabcdefgh"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f'Request: GET http://u:{SECRET}@h:80/x "200 OK"', 'Request: GET http://h:80/x "200 OK"'),
        (f'GET http://h/x?X-Amz-Signature={SECRET}&n=1 "200', 'GET http://h/x?X-Amz-Signature=(not shown)&n=1 "200'),
        (f'https://h:443 "GET /x?n=1&sig={SECRET} HTTP/1.1"', 'https://h:443 "GET /x?n=1&sig=(not shown) HTTP/1.1"'),
        (f"a zip://a::http://u:{SECRET}@h/x.zip ends", "a zip://a::http://h/x.zip ends"),
        (f"('https://u:{SECRET}@h/x', 3)", "('https://h/x', 3)"),
        (f"https://u:{SECRET}%40h/x failed", "https://(not shown) failed"),
        (f"traces to u:{SECRET}@h, retrying", "traces to u:(not shown)@h, retrying"),
        (f"{{'hf_token': '{SECRET}', 'n': 'm'}}", "{'hf_token': '(not shown)', 'n': 'm'}"),
        (f"(b'authorization', b'{SECRET}')", "(b'authorization', b'(not shown)')"),
        (f"<SecretAccessKey>{SECRET}</SecretAccessKey>", "<SecretAccessKey>(not shown)</SecretAccessKey>"),
        (f"/x?page=1;token={SECRET}&n=1", "/x?page=1;token=(not shown)&n=1"),
        (f"/x?url=https://b.h/x?X-Amz-Signature={SECRET}", "/x?url=https://b.h/x?X-Amz-Signature=(not shown)"),
        (
            f"h?a=1#access_token={SECRET} h?a=1\\u0026sig={SECRET}",
            "h?a=1#access_token=(not shown) h?a=1\\u0026sig=(not shown)",
        ),
        *(
            (form.format(SECRET), form.format("(not shown)"))
            for form in (
                r"/x?a\u003db\u0026sig\u003D{}\u0026c=d",
                r"/x\u003fX-Amz-Signature\u003d{}",
                r"/x\x3fa=b\x26sig\x3d{}",
                r"/x\\u003fsig\\u003d{}",
                r"/x;a\u0023token={}",
                r'{{"dsn": "Server=x;Pwd=\"{}\";Encrypt=yes"}}',
                r'{{"dsn": "Server=x;Password=\"{}\""}}',
                r'"{{\"dsn\": \"Server=x;AccountKey=\\\"{}\\\"\"}}"',
                "/x?a=1&token=['{}'], n='m'",
                "a:1;x-api-key=b'{}', n='m'",
                "/x?code=u'{}', n='m'",
                r'"/x?%74oken=\"{}\" failed"',
                r'"/x?token={}\" failed"',
                "/x?access_token={} failed",
            )
        ),
        (f"/x?access_token=Bearer {SECRET} failed", "/x?access_token=(not shown) failed"),
        (f"a=1;Authorization=basic {SECRET}&b", "a=1;Authorization=(not shown)&b"),
        (f"jdbc:sqlserver://h;user=a;password={SECRET}", "jdbc:sqlserver://h;user=a;password=(not shown)"),
        (f"""{{'password': "it's{SECRET}", 'n': 1}}""", """{'password': "(not shown)", 'n': 1}"""),
        (f'{{"password": "a\\"{SECRET}"}}', '{"password": "(not shown)"}'),
        (f'{{"b": "{{\\"password\\": \\"{SECRET}\\"}}"}}', '{"b": "{\\"password\\": \\"(not shown)\\"}"}'),
        (f"['curl', '--password', '{SECRET}']", "['curl', '--password', '(not shown)']"),
        (f"{{'Authorization': ['{SECRET}', '{SECRET}']}}", "{'Authorization': ['(not shown)', '(not shown)']}"),
        (f"'password': {{'v': '{SECRET}'}}, 'n': 'm'", "'password': {'(not shown)': '(not shown)'}, 'n': 'm'"),
        (
            f"'credentials': {{'a': 3, 'b': '{SECRET}', 'c': r'{SECRET}'}}",
            "'credentials': {'(not shown)': 3, '(not shown)': '(not shown)', '(not shown)': r'(not shown)'}",
        ),
        (f"get(auth=(None, '{SECRET}'), n='m')", "get(auth=(None, '(not shown)'), n='m')"),
        (f'"secrets": [null, 1, "{SECRET}"], "n": "m"', '"secrets": [null, 1, "(not shown)"], "n": "m"'),
        (f"'credentials': {{1: b'{SECRET}'}}", "'credentials': {1: b'(not shown)'}"),
        (f"cookies=[{{'value': '{SECRET}'}}], n='m'", "cookies=[{'(not shown)': '(not shown)'}], n='m'"),
        (f'"credentials": [["u", "{SECRET}"]]', '"credentials": [["(not shown)", "(not shown)"]]'),
        (f'\\"auth\\": [\\n null,\\n \\"{SECRET}\\"', '\\"auth\\": [\\n null,\\n \\"(not shown)\\"'),
        (f"('auth', {{'v': '{SECRET}'}})", "('auth', {'(not shown)': '(not shown)'})"),
        (f"secret=['a', '''it's {SECRET}''']", "secret=['(not shown)', '''(not shown)''']"),
        (f"<Token xmlns='{'x' * 300}'>{SECRET}</Token>", f"<Token xmlns='{'x' * 300}'>(not shown)</Token>"),
        (f"password='''it's {SECRET}''', n='m'", "password='''(not shown)''', n='m'"),
        (f"secret=r'{SECRET}', 'token': Rb\"{SECRET}\"", "secret=r'(not shown)', 'token': Rb\"(not shown)\""),
        (f"/x?a%3D{HUB}&b", "/x?a%3D(not shown)&b"),
        (rf"'first\n{HUB}\u0026{HUB}'", r"'first\n(not shown)\u0026(not shown)'"),
        (
            f"pwd=(not{SECRET}; u:(not{SECRET}@h 'auth': '(not {SECRET}'",
            "pwd=(not shown); u:(not shown)@h '(not shown)': '(not shown)'",
        ),
        (f"<Password>(not {SECRET}</Password>", "<Password>(not shown)</Password>"),
        (f"<Password> <![CDATA[{SECRET}]]></Password>", "<Password>(not shown)</Password>"),
        (f"'password':\n    '{SECRET}'", "'password':\n    '(not shown)'"),
        (f"('api key', '{SECRET}')", "('api key', '(not shown)')"),
        (f"[b'private key', b'{SECRET}']", "[b'private key', b'(not shown)']"),
        *(
            (form.format(name, SECRET), form.format(name, "(not shown)"))
            for name in ("a" * 150 + "_token", "x" * 300 + "password")
            for form in ("'{0}': '{1}'", "('{0}', '{1}')", "{0}='{1}'", "<{0}>{1}</{0}>", "/x?{0}={1}&n=1")
        ),
        (f"{'a' * 30}AccountKey={SECRET};y", f"{'a' * 30}AccountKey=(not shown);y"),
        (f"connect(host='h', password='{SECRET}')", "connect(host='h', password='(not shown)')"),
        (f"'n': 'password', 'password': '{SECRET}'", "'n': 'password', 'password': '(not shown)'"),
        (f"ignored key: 'password': '{SECRET}' x", "ignored key: '(not shown)': '(not shown)' x"),
        (f"token= 'credentials': {{'a': '{SECRET}'}}", "token= '(not shown)': {'(not shown)': '(not shown)'}"),
        (f"invalid key: 'a': {{'password': '{SECRET}'}}", "invalid key: '(not shown)': {'password': '(not shown)'}"),
        (f"invalid api_key: '{SECRET}': 'it is too old'", "invalid api_key: '(not shown)': 'it is too old'"),
        (f"unknown key: 'password', '{SECRET}'", "unknown key: '(not shown)', '(not shown)'"),
        (
            f"<n:SecretAccessKey a='b'>{SECRET}</n:SecretAccessKey>",
            "<n:SecretAccessKey a='b'>(not shown)</n:SecretAccessKey>",
        ),
        (
            f"u:{SECRET}@h,https://ok/ https://ok/,u:{SECRET}@h",
            "u:(not shown)@h,https://ok/ https://ok/,u:(not shown)@h",
        ),
        (f"Authorization: Bearer {SECRET} x", "Authorization: Bearer (not shown) x"),
        ('Authorization: Bearer "abc" x', 'Authorization: Bearer "(not shown)" x'),
        ("Proxy-Authorization:Basic abc x", "Proxy-Authorization:Basic (not shown) x"),
        ("authorization=Bearer abc", "authorization=Bearer (not shown)"),
        (f"Illegal header value b'Bearer {HUB}'", "Illegal header value b'Bearer (not shown)'"),
        ("value b'Bearer sk-abc'", "value b'Bearer (not shown)'"),
        (f"the token {HUB}, of {HUB}.", "the token (not shown), of (not shown)."),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln ends", "(not shown) ends"),
        (f"glpat-{SECRET[:20]} ghp_{HUB[3:]} sk-proj-ab-{HUB[3:]}-x", "(not shown) (not shown) (not shown)"),
        (f"AccountKey={SECRET};y", "AccountKey=(not shown);y"),
        (f"SharedAccessKey={SECRET};y", "SharedAccessKey=(not shown);y"),
        (f"Password={SECRET};y", "Password=(not shown);y"),
        (f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n", "-----BEGIN PRIVATE KEY (not shown)"),
        *(
            (
                f"{line} BEGIN {kind} {line}\n{SECRET}\n{line} END {kind} {line}",
                f"{line} BEGIN {kind} (not shown) {line}",
            )
            for line, kind in (("----", "SSH2 ENCRYPTED PRIVATE KEY"), ("-----", "X25519 PRIVATE KEY"))
        ),
    ],
)
def test_credentials_are_hidden(text: str, shown: str) -> None:
    assert redact_text(text) == shown
    assert redact_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'num_layers'",
        "write store.storage_options.secret='${env:NAME}', sk-wikipedia_dump_2023_clean",
        "expected some of ['id', 'key', 'messages'], got 'text'",
        "rank=0 init_method=tcp://127.0.0.1:42000 backend=gloo, num_key_value_heads=8",
        "('tcp://10.0.0.1:1234', 'http://[::1]:80/x'), [http://h:80], {http://{}:{}} http://h:8000\x1b[39m",
        "part s3://bucket/data/a@b.hsx?x=1 at 12:30:00, git@github.com:org/x, mail a@b.c",
        'File "a.py", line 3, in x\n    @property',
        "s3://b: expected http://h:80/x: as in s3://bucket: ... and http://h:80: no",
        "basic internationalization of the tokenizer",
        "hf_hub_download_with_retries, hf_Llama-3.2-1B-Instruct, sk-news-corpus-2020.jsonl, task-sk-learn, ghp_x",
        "the Authorization header has no Bearer token",
        "unexpected token, 'x'; key=[1, None], n='m'; key_states: (8, 128) of 'cpu'",
        "['primary key', 'id'], ('the key', 'b'), (' key', 'b')",
        "for key in ('a', 'b'): token[i] = f(['c'])['d']; ['token', [1, 2], 'n']",
        "<Tokenizer with a vocabulary of 49152>text",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact_text(text) == text


CHAINS = [
    *("s3://b/k", "s3://b", "s3://b/a@b", "zip://x", "zip://", "file:///x", "memory://x", "http://[::1]:80/x"),
    *("zip://x::https://h/a", "simplecache::s3://b/x", "abfs://c@a.net/x"),
]
#: Addresses that may be a link of a chain.
ADDRESSES = [
    f"u:{SECRET}@corp@h",
    f"u:{SECRET}@[::1]:80",
    f"http:u:{SECRET}@h",
    f"me:{SECRET}]@h/y",
    f"u:p%40{SECRET}@h",
]


PIECES = (
    *("%3A%2F%2F", "%253A", "%40", "%0A", "%22", "%25", "\uff1a", "http://h:1/"),
    *("http://", "s3://", "zip://", "abfs://", "a://", "://", "://u:p@", "::", "//", "/", "\\", "\uff20", "@"),
    *(
        "u:p",
        "u@",
        "o:r@x",
        "h",
        "1",
        ":",
        "?",
        "?token=",
        "&sig=",
        ";",
        "#",
        "'",
        '"',
        "(",
        ")",
        "[",
        "=",
        ",",
        "-",
        ".",
    ),
    *(
        " ",
        "\t",
        "\0",
        "\n",
        "(not shown)",
        "Authorization: ",
        "\ufdd0",
        "Bearer ",
        "basic\t",
        "eyJ",
        HUB,
        "sk-ab",
        SECRET,
    ),
    *(
        "<Key>",
        "</Key>",
        "<![CDATA[",
        "]]>",
        "'''",
        "r'",
        "{'a': '",
        "}",
        'Bearer "',
        'Bearer \\"',
        "password",
        "pwd=",
        "AccountKey=",
        "BEGIN PRIVATE KEY",
        "END PRIVATE KEY",
        "auth=(None, ",
        "'key', [[",
        "{1: '",
        "\\n",
        "<Key a='",
    ),
)


_SECRET_NAMES = st.sampled_from(
    ["password", "client_secret", "auth.token", "--api-key", "cookie", "AWS_SECRET_ACCESS_KEY"]
)
_QUOTES = st.sampled_from(["'", '"', '\\"'])
_SEPARATORS = st.sampled_from([": ", ":", "=", " = ", ":\n  "])


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(["key", "a", "token", "auth", ":", "= ", " ", ", ", "\n", "KeyError: "]), max_size=6),
    st.lists(st.tuples(_QUOTES, st.one_of(_SECRET_NAMES, st.just("n")), _SEPARATORS), max_size=3),
    st.tuples(_QUOTES, _SECRET_NAMES, _SEPARATORS, st.sampled_from(["", "b", "{'a': ", "[1, None, "]), _QUOTES),
)
@example(["key", ": "], [], ("'", "password", ": ", "", "'"))
def test_names_before_a_setting_hide_no_credential(
    before: list[str], names: list[tuple[str, str, str]], setting: tuple[str, str, str, str, str]
) -> None:
    """The words before a setting may make its name look like a value."""
    quoted = "".join(f"{quote}{name}{quote}{separator}" for quote, name, separator in names)
    quote, name, separator, opening, value_quote = setting
    text = f"{''.join(before)}{quoted}{quote}{name}{quote}{separator}{opening}{value_quote}{SECRET}{value_quote} x"
    assert SECRET not in redact_text(text)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@example("s3://u@\uff20")
@example("http://,u@//x")
@example("http://u@\\x")
@example("o:r@x&sig=a://")
@example("o:r@xhttp:// @")
@example("o:r@x<Key>s3://")
@example("file://AccountKey=\t'h")
@example("@file://AccountKey=u:p;o:r@x")
@example("BEGIN PRIVATE KEYEND PRIVATE KEY")
@example("u:p@h " * (MOST // 6))
@example("x " * MOST)
def test_a_redacted_text_stays_the_same(text: str) -> None:
    for redact in (redact_text, public_url, hide_secrets):
        once = redact(text)
        assert redact(once) == once


@pytest.mark.parametrize(
    "text",
    [f"u:{SECRET}@h,x=http://h/x", f"u:{SECRET}@h&x=http://h", f"s3://u@k:{SECRET}\uff20b", f"s3://u@/k:{SECRET}%40b"],
)
def test_credentials_next_to_a_link_are_hidden(text: str) -> None:
    assert SECRET not in redact_text(text)


@pytest.mark.parametrize(
    "chain",
    [
        *(f"{begin}::u:{SECRET}@h{end}" for begin in CHAINS for end in ("", "/x.zip", "::zip://y", ":80", "/x?n=1")),
        *(f"{begin}::{address}" for begin in CHAINS for address in ADDRESSES),
        *(f"{scheme}://[::1]:80@{SECRET}/x" for scheme in ("https", "s3", "tcp", "sftp")),
    ],
)
def test_a_credential_in_any_link_of_a_chain_is_hidden(chain: str) -> None:
    for text in ("{}", "error for {} happened", "('{}', 3)", '{{"a": "{}"}}', "<{}>", "[{}]", "x={},y", "{}: failed"):
        shown = redact_text(text.format(chain))
        assert SECRET not in shown
        assert redact_text(shown) == shown
    assert SECRET not in f"{public_url(chain)}{hide_secrets([chain])}"
    assert has_credentials(chain)


def test_a_character_that_libraries_drop_hides_no_credential() -> None:
    assert SECRET not in hide_secrets(f"file://AccountKey=\t{SECRET}")


def test_an_at_sign_in_a_path_hides_no_name_behind_it() -> None:
    assert SECRET not in hide_secrets(f"postgresql/db@password={SECRET};x=1")


def test_nothing_of_a_text_that_never_stays_the_same_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_ROUNDS", 1)
    assert redact_text("o:r@x") == "(not shown)"


def test_a_long_text_is_shortened_and_no_half_credential_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << 11
    monkeypatch.setattr(redaction, "MOST", most)
    for cut in range(most // 2 - 40, most // 2 + 40):
        for text in (
            f"{'x' * (cut - 1)} https://u:{SECRET}@h/x {'y' * most}",
            f"{'x' * most} u:{SECRET}@h {'y' * cut}",
            f"{'x' * most} 'password': '{SECRET}' {'y ' * (cut // 2)}",
            f"{'x' * most} Authorization: Bearer {SECRET} {'y ' * (cut // 2)}",
            f"{'x' * most} Authorization:    Bearer    {SECRET.replace('2', 'x')} {'y ' * (cut // 2)}",
        ):
            shown = redact_text(text)
            assert len(shown) <= most
            assert not any(SECRET[i : i + 8] in shown for i in range(len(SECRET) - 7))


@pytest.mark.parametrize("before", [0, 10, 5000])
def test_a_long_list_behind_a_secrets_name_is_hidden_on_both_sides_of_a_cut(
    monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(redaction, "MOST", most := 1 << 11)
    for count in (most // 16, most // 8, most // 3):
        keys = ", ".join(f'"{SECRET}{i:05}"' for i in range(count))
        shown = redact_text(f'{"x " * before}"api_keys": [{keys}], "n": "m" {"y " * 20}')
        assert SECRET not in shown
        assert len(shown) <= most
        assert shown.endswith(f'"n": "m" {"y " * 20}')


@pytest.mark.parametrize("begin", [0, 300, 600, 900, 1200])
def test_a_cut_separates_no_value_from_its_name(monkeypatch: pytest.MonkeyPatch, begin: int) -> None:
    """A key's lines are indented, and a passphrase has many words. Each begins ``begin`` characters before the cut."""
    monkeypatch.setattr(redaction, "MOST", most := 1 << 12)
    lines = "\n".join(f"    {SECRET}" for _ in range(30))
    for credential in (
        f"    -----BEGIN PRIVATE KEY-----\n{lines}\n    -----END PRIVATE KEY-----",
        f"'passphrase': '{' '.join([SECRET] * 40)}'",
        "\n".join(f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----" for _ in range(most // 20)),
    ):
        for room in range(10):
            after = "y " * (most // 4) + "y" * room
            text = "x " * (2 * most) + credential + after[: max(most // 2 + begin - len(credential), 0)]
            assert SECRET not in redact_text(text)
            assert SECRET not in redact_text(after[: most // 2 - begin] + credential + "x " * (2 * most))


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "a:",
            "http://a:b",
            "a://",
            "?a=",
            "'a':'",
            "<a>",
            "Basic 1",
            "Basic ",
            "Basic hf_",
            "Authorization: ",
            "Authorization:Basic ",
            "sk-",
            "-sk-aaaaaaaaaaaaaaaaaaa",
            "eyJ.",
            "eyJ.a",
            "BEGIN PRIVATE KEY",
            "@",
            "a::http:/",
            "://::a:@",
            "::",
            "\u0301",
        ),
        *("<key><![CDATA[", "'key':{'a':", "key='''", "key=[''''", 'Authorization:Basic "', 'Authorization:Basic \\"'),
        *("'a':['b',", "'key':['b',", "'key',", "?key=?", "?a=?", "a='", "key='", "\\'key':\\'", "key=[", "\\"),
        *("key:'key':", "key='key',"),
        *("a%3A ", "%25", "%2525", "http://a:1/%40", "'a%27:", "\uff1a", "'a key',", "a.", "<a."),
        *("%2520@", "?key=\\", "&key=b'"),
        *("a=[", "key=[a=[\\\\", "key=[\\a", "key=['',[[", "<key a", "<key a='", "'key',{1:'a':", "key=['''"),
    ],
)
@pytest.mark.parametrize("head", ["", "http://", pytest.param("u:", marks=pytest.mark.soak)])
def test_the_time_is_linear(head: str, piece: str) -> None:
    def make(n: int) -> Callable[[], object]:
        return partial(redact_text, head + piece * ((n - len(head)) // len(piece)))

    check_linear(make, MOST // 4)
