"""A row is refused if its chat template changes a text. White space, thoughts and switches are the model's format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import InputError
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs import rendered
from hsx_dist.inputs.encode import RowEncoder, load_tokenizer
from hsx_dist.inputs.rendered import require_texts
from hsx_dist.inputs.rows import Row, rows_from
from hsx_dist.models.builtin import smollm2
from tests.unit.growth import check_linear

#: Rules of stock templates for the text ``c`` of the message ``m``.
EXAONE = "{% if '</thought>' in c %}{% set c = c.split('</thought>')[-1].lstrip('\\n') %}{% endif %}"
DEEPSEEK = EXAONE.replace("thought", "think")
SMOLLM3 = (
    "{% if m.role == 'system' %}{% set c = c.replace('/no_think', '').replace('/think', '').rstrip() %}{% endif %}"
)
FALCON = "{% set c = c.replace('\\r\\n', '\\n').replace('\\n\\n', '\\n') | trim %}"
LLAMA = "{% if m.role == 'tool' %}{% set c = c | tojson %}{% endif %}"
SIMPLE = "{% for m in messages %}{% set c = m.content %}RULE<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT = [{"role": "user", "content": "what?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(smollm2()))


def encode(tokenizer: Any, rule: str, role: str, content: Any) -> None:
    encode_chat(tokenizer, SIMPLE.replace("RULE", rule), [*CHAT, {"role": role, "content": content}, *CHAT])


def encode_chat(tokenizer: Any, template: str, messages: list[dict[str, Any]]) -> None:
    (row,) = rows_from([{"messages": messages}], InputConfig())
    assert isinstance(row, Row)
    RowEncoder(tokenizer, 1000, {"chat_template": template}).encode(row)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("rule", "role", "text"),
    [
        (EXAONE, "user", "What does the tag </thought> mean?"),
        (EXAONE, "assistant", "<thought>a</thought>It is </thought>."),
        (EXAONE, "assistant", "So <thought>a</thought>it is."),
        (DEEPSEEK, "assistant", "They write <think>, then </think>, and then the answer."),
        (DEEPSEEK, "assistant", "<think>a</think>It is </think> 4."),
        (DEEPSEEK, "assistant", "End with </think> always."),
        (SMOLLM3, "system", "Cite https://example.org/thinking-fast."),
        (SMOLLM3, "system", "Read /think/data."),
        ("{% set c = c[:20] %}", "user", "A text of many letters."),
        ("{% set c = c | lower %}", "user", "A Text."),
    ],
)
def test_a_text_that_a_template_changes_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, fast: bool, rule: str, role: str, text: str
) -> None:
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    for content in (text, " \n" + text):
        with pytest.raises(InputError, match=rf"changes or leaves out text of message 1 \(role '{role}'\)"):
            encode(tokenizer, rule, role, content)


@pytest.mark.parametrize(
    ("rule", "role", "text"),
    [
        (DEEPSEEK, "assistant", "<think>two and two</think>It is 4."),
        (DEEPSEEK, "assistant", "\n<think>\n</think>\n\nIt is 4."),
        (DEEPSEEK, "assistant", "<think>a</think>"),
        (EXAONE, "assistant", "<thought>\na\n</thought>\n\nIt is 4."),
        ("{% set c = c.split('[/THINK]')[-1] %}", "assistant", "[THINK]a[/THINK]It is 4."),
        ("{% set c = c.split('</seed:think>')[-1] %}", "assistant", "<seed:think>a</seed:think>It is 4."),
        ("", "assistant", "<think>a</think>It is </think> 4."),
        (SMOLLM3, "system", "/no_think"),
        (SMOLLM3, "system", "Answer in French. /no_think\nBe brief. /think"),
        ("{% set c = c.replace('/nothink', '') %}", "user", "Hello /nothink"),
        (FALCON, "user", "a\r\n\r\nb\n\n\tc\u3000"),
        (LLAMA, "tool", 'a "quoted"\n<text> with é \\ \u2028'),
        (LLAMA.replace("tojson", "tojson(ensure_ascii=True)"), "tool", 'a "quoted" é\U0001f600'),
    ],
)
def test_white_space_thoughts_switches_and_json_are_accepted(tokenizer: Any, rule: str, role: str, text: str) -> None:
    encode(tokenizer, rule, role, text)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CUT = "First I add.</think> It is 4."
ANSWER, QUOTE = ("assistant", CUT), ("user", f"You said: {CUT} Why?")
R1 = DEEPSEEK.replace("{% if ", "{% if m.role == 'assistant' and ")
NOT_LAST = DEEPSEEK.replace("{% if ", "{% if not loop.last and ")
RESULT = ("tool", "a long result of a tool")
PATH = ("system", "Read /think/data first.")
SHORT = "{% if loop.index0 == INDEX %}{% set c = c[:20] %}{% endif %}"
#: Writes the system's texts first. Fails at a mark, if the rule says so.
HOISTS = (
    "{% for m in messages if m.role == 'system' %}{% set c = m.content %}RULE{{ c }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{% set c = m.content %}RULE{{ m.role }}\n{{ c }}\n{% endfor %}"
)
JOINS = "{% if c is not string %}{% set c = c | map(attribute='text') | join(' + ') %}{% endif %}"
NO_MARKS = "{% if c.startswith('hsx') %}{{ raise_exception('a mark') }}{% endif %}"


@pytest.mark.parametrize("mark", ["", NO_MARKS])
@pytest.mark.parametrize(
    ("rule", "chat"),
    [
        (R1, [QUOTE, ANSWER, ("user", "thanks")]),
        (R1, [("user", "what?"), ANSWER, QUOTE]),
        (R1, [("user", parts(CUT, "Repeat it.")), ANSWER, QUOTE]),
        (NOT_LAST, [("user", "q"), ANSWER, ("user", "again"), ANSWER]),
        (SMOLLM3, [PATH, ("user", f"Why must you '{PATH[1]}'?")]),
        (SHORT.replace("INDEX", "0"), [RESULT, RESULT]),
        (SHORT.replace("INDEX", "1"), [RESULT, RESULT]),
        (SHORT.replace("INDEX", "1"), [RESULT] * 5),
    ],
)
def test_a_message_that_repeats_a_cut_text_does_not_hide_it(
    tokenizer: Any, mark: str, rule: str, chat: list[tuple[str, Any]]
) -> None:
    messages = [{"role": role, "content": content} for role, content in chat]
    with pytest.raises(InputError, match="changes or leaves out text of message"):
        encode_chat(tokenizer, SIMPLE.replace("RULE", JOINS + mark + rule), messages)


@pytest.mark.parametrize("rule", ["", NO_MARKS])
@pytest.mark.parametrize("template", [SIMPLE, HOISTS])
def test_equal_texts_and_later_system_texts_are_accepted(tokenizer: Any, template: str, rule: str) -> None:
    roles = ("user", "system", "assistant", "user", "system")
    messages = [{"role": role, "content": content} for role in roles for content in (CUT, parts(CUT, "4."), "4.")]
    encode_chat(tokenizer, template.replace("RULE", JOINS + rule), messages)


def test_a_text_that_a_template_writes_twice_is_accepted(tokenizer: Any) -> None:
    repeats = "{% if m.role == 'user' %}{% set c = messages[0].content ~ c %}{% endif %}"
    chat = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]
    encode_chat(tokenizer, SIMPLE.replace("RULE", repeats), chat)


def test_the_first_form_of_a_text_is_taken(tokenizer: Any) -> None:
    """The second text has the first one without JSON's escapes."""
    chat = [
        {"role": "tool", "content": 'a "b"'},
        {"role": "user", "content": "c"},
        {"role": "user", "content": 'a "b"'},
    ]
    encode_chat(tokenizer, SIMPLE.replace("RULE", LLAMA), chat)


def test_a_mark_in_a_row_does_not_change_the_order(tokenizer: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"a": f"{rendered._BEGIN}9t9x"}}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}, *CHAT]
    encode_chat(tokenizer, SIMPLE.replace("RULE", "{% set c = c ~ m.tool_calls %}"), chat)


def test_a_row_cannot_have_the_marks_of_what_a_template_leaves_out() -> None:
    def render(messages: list[dict[str, Any]], _: list[Any] | None) -> str:
        return "".join(m["role"] + m.get("reasoning", "") + m["content"] for m in messages)

    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    # Marks are random: these have the form of earlier ones.
    chat = [*CHAT, {"role": "assistant", "content": "a", "reasoning": "hsx1call0mark hsx0tool0mark hsx1c0x hsx0f0x"}]
    with pytest.raises(InputError, match="leaves out a call of message 1"):
        rendered.require_rendered([chat[0], {**chat[1], "tool_calls": [call]}], None, render)
    with pytest.raises(InputError, match="renders tools, got a template that leaves them out"):
        rendered.require_rendered(chat, TOOLS, render)


def test_a_tokenizer_that_renders_no_text_is_not_judged(tokenizer: Any) -> None:
    """Mistral's own tokenizer has no template. Its text has other characters for blanks."""

    class Mistral:
        is_fast = False

        def apply_chat_template(self, messages: Any, tokenize: bool, **_: Any) -> Any:
            return [1] if tokenize else "".join(m["content"].replace(" ", "▁").replace("é", "<0xC3>") for m in messages)

    class Failing(Mistral):
        chat_template = "a"

        def apply_chat_template(self, messages: Any, tokenize: bool, **_: Any) -> Any:
            return [1] if tokenize else messages.missing

    row = Row("k", 0, messages=[{"role": "user", "content": "a cafés b"}])
    for kind in (Mistral, Failing):
        assert RowEncoder(kind(), 10, vocab_size=9).encode(row).token_ids == [1]


def chats(kind: str) -> Callable[[int], Callable[[], object]]:
    """Return texts in the order of messages, as JSON, with the system's first, or as one text with many switches.

    Also texts that the template cuts, and that another message repeats.
    """

    def make(n: int) -> Callable[[], object]:
        texts = [f'"{i}" é' for i in range(n)]
        messages = [{"role": ("user", "system")[i % 2], "content": text} for i, text in enumerate(texts)]
        if kind == "system first":
            prompt = "".join(texts[1::2]) + "".join(texts[::2])
        elif kind == "switches":
            messages = [{"role": "user", "content": "/think a " * n}]
            prompt = "a" * n
        elif kind == "unclosed":
            messages = [{"role": "user", "content": " " * n + "<think>" * n}]
            prompt = "<think>" * n
        elif kind == "repeated":
            texts = ["a", *texts, "a" * n]
            messages = [{"role": "user", "content": text} for text in texts]
            prompt = "".join(texts[1:])
        else:
            prompt = "".join(t.replace('"', '\\"') if kind == "json" else t for t in texts)

        def check() -> None:
            known = [(i, message["content"]) for i, message in enumerate(messages)]
            for order in (None, known):
                refuses = kind == "repeated" or (kind == "system first" and order is not None)
                with pytest.raises(InputError) if refuses else nullcontext():
                    require_texts(messages, prompt, order)

        return check

    return make


@pytest.mark.parametrize("kind", ["in order", "json", "system first", "switches", "unclosed", "repeated"])
def test_the_time_is_linear(kind: str) -> None:
    check_linear(chats(kind), 10_000, kind)


def test_tools_of_the_setting_must_be_rendered(tokenizer: Any) -> None:
    row = Row("k", 0, messages=CHAT)
    template = SIMPLE.replace("RULE", "")
    with pytest.raises(InputError, match="expected a chat template that renders tools"):
        RowEncoder(tokenizer, 100, {"chat_template": template, "tools": TOOLS}).encode(row)
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + template
    assert RowEncoder(tokenizer, 100, {"chat_template": template, "tools": TOOLS}).encode(row).token_ids


@pytest.mark.parametrize("content", [{"text": "a"}, {"token_ids": [1]}])
def test_tools_with_text_or_token_ids_are_refused(content: dict[str, Any]) -> None:
    for tools in (TOOLS, '[{"name": "f"}]', {"name": "f"}, "hammer"):
        (fate,) = rows_from([{**content, "tools": tools}], InputConfig())
        assert isinstance(fate, RowFate)
        assert fate.reason.startswith("tools: expected tools only with messages, ")
    for none in (None, [], {}, "", "[]", " null "):
        (row,) = rows_from([{**content, "tools": none}], InputConfig())
        assert isinstance(row, Row)
    for config in (InputConfig(tools="functions"), InputConfig(metadata=["tools"])):
        (row,) = rows_from([{**content, "tools": TOOLS}], config)
        assert isinstance(row, Row)
