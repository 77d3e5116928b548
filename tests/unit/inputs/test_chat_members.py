"""Messages whose parts a template would ignore are refused, and calls are rendered as vLLM's server renders them."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from hsx_dist.config import InputConfig
from hsx_dist.errors import InputError
from hsx_dist.format.manifest import RowFate
from hsx_dist.inputs.encode import RowEncoder, load_tokenizer
from hsx_dist.inputs.rows import Row, rows_from
from hsx_dist.models.builtin import smollm2

CONFIG = InputConfig()
USER: dict[str, Any] = {"role": "user", "content": "hello"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "fine"}
#: The styles of Gemma 3 and Qwen2.5: parts of text and media, and calls.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}{% if 'image' in part %}"
    "<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% if m.tool_calls is defined %}<tool_calls>"
    "{% for call in m.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}"
    '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}{% endfor %}{% endif %}<|im_end|>\n'
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = load_tokenizer(str(smollm2()))
    found.chat_template = TEMPLATE
    return found


def row_of(*messages: dict[str, Any]) -> Any:
    (row,) = rows_from([{"messages": deepcopy(list(messages))}], InputConfig())
    return row


def prompt(tokenizer: Any, *messages: dict[str, Any]) -> str:
    row = row_of(*messages)
    assert isinstance(row, Row), row
    return str(tokenizer.decode(RowEncoder(tokenizer, 1000).encode(row).token_ids))


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", **({} if arguments is ... else {"arguments": arguments})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("message", "got"),
    [
        ({"role": "user", "value": "a"}, "got 'value', a string"),
        ({"role": "user", "text": "a"}, "got 'text', a string"),
        ({"role": "user", "parts": [{"text": "a"}]}, "got 'parts', a list"),
        ({"from": "human", "text": "a"}, "got 'text', a string"),
        ({"from": "human", "value": "a", "content": "b"}, "got 'value', a string"),
        ({**ANSWER, "function_call": {"name": "f", "arguments": "{}"}}, "got 'function_call', an object"),
        ({**ANSWER, "audio": {"id": "a"}}, "got 'audio', an object"),
        ({**ANSWER, "audio": [0.5, 0.25]}, "got 'audio', a list"),
        ({**ANSWER, "refusal": "no"}, "got 'refusal', a string"),
        ({**ANSWER, "reasoning": ["a"]}, "expected reasoning of message 1 to be a string, got a list"),
        ({**ANSWER, "reasoning": "a", "reasoning_content": "b"}, "of message 1 to be the same text, got two texts"),
        ({**ANSWER, "tool_calls": {"name": "f"}}, "expected tool_calls of message 1 to be a list, got an object"),
        ({**ANSWER, "tool_calls": '[{"name": "f"}]'}, "expected tool_calls of message 1 to be a list, got a string"),
        (
            {**ANSWER, "tool_calls": ["f"]},
            "expected each of tool_calls of message 1 to be a call of a named function, got a string",
        ),
        ({**ANSWER, "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}, "got a call of type 'custom'"),
        ({**ANSWER, "tool_calls": [{"name": "f", "parameters": {"a": 1}}]}, "got 'parameters', an object"),
        ({**ANSWER, "tool_calls": [{"function": {"name": "f"}, "output": "a"}]}, "got 'output', a string"),
    ],
)
def test_a_member_that_a_template_would_ignore_is_refused(tokenizer: Any, message: dict[str, Any], got: str) -> None:
    with pytest.raises(InputError) as error:
        prompt(tokenizer, USER, message, ANSWER)
    assert got in str(error.value)


FUNCTION = {"name": "f", "description": "finds", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("tool", "got"),
    [
        ({"type": "web_search"}, "got a tool of type 'web_search'"),
        ({"type": "custom", "name": "f"}, "got a tool of type 'custom'"),
        ({"type": "function", "function": {**FUNCTION, "name": None}}, "got a tool whose function has no name"),
        ({"type": "function", "function": {**FUNCTION, "name": " "}}, "got a tool whose function has no name"),
        ({"type": "function", "function": {}}, "got a tool whose function has no name"),
        ({"type": "function", "function": "f"}, "got a string"),
        ({"name": "f", "function": {"parameters": {}}}, "got a tool whose function has no name"),
        ({"toolSpec": FUNCTION}, "got a tool whose function has no name"),
        ({"function_declarations": [FUNCTION]}, "got a tool whose function has no name"),
        ({"type": "function", "function": {"name": "f"}, "description": "finds"}, "got 'description', a string"),
    ],
)
def test_a_tool_that_is_no_named_function_is_refused(tokenizer: Any, tool: dict[str, Any], got: str) -> None:
    """Templates without tools print nothing for a tool, and its name shows that it is missing."""
    (row,) = rows_from(
        [{"messages": [USER, ANSWER], "tools": [{"type": "function", "function": FUNCTION}, tool]}], CONFIG
    )
    assert isinstance(row, Row)
    tools = "{% for tool in tools %}{% set f = tool.function or tool %}{{ f.name }} {{ f.description }}{% endfor %}"
    with pytest.raises(InputError) as error:
        RowEncoder(tokenizer, 1000, {"chat_template": tools + TEMPLATE}).encode(row)
    assert str(error.value).startswith("expected tool 1 to ")
    assert got in str(error.value)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": FUNCTION},
        {"type": "function", "function": {**FUNCTION, "strict": True}, "cache_control": {"type": "ephemeral"}},
        FUNCTION,
        {"type": "function", **FUNCTION},
        {"name": "f", "input_schema": {"type": "object"}},
    ],
)
@pytest.mark.parametrize("form", [list, json.dumps])
def test_tools_of_public_data_are_rendered(tokenizer: Any, tool: dict[str, Any], form: Any) -> None:
    """Hermes and Toucan have OpenAI's form, xLAM and ToolACE functions alone. Some have them as a JSON text."""
    (row,) = rows_from([{"messages": [USER, ANSWER], "tools": form([tool])}], CONFIG)
    assert isinstance(row, Row)
    template = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}" + TEMPLATE
    ids = RowEncoder(tokenizer, 1000, {"chat_template": template}).encode(row).token_ids
    assert tokenizer.decode(ids).startswith(json.dumps(tool))


@pytest.mark.parametrize(
    ("part", "got"),
    [
        *(({"type": kind}, f"got a part of type '{kind}'") for kind in ("image", "image_url", "input_audio")),
        *(({"type": kind, kind: "a"}, f"got a part of type '{kind}'") for kind in ("image_embeds", "image_pil")),
        ({"type": "tool_use", "name": "f", "input": {}}, "got a part of type 'tool_use'"),
        ({"type": "tool_result", "content": "a"}, "got a part of type 'tool_result'"),
        ({"type": "refusal", "refusal": "a"}, "got a part of type 'refusal'"),
        ({"type": "text", "content": "a"}, "got 'content', a string"),
        ({"type": "text"}, "expected a part of message 1 to have a text, got null"),
        ({"image": "cat.png"}, "got 'image', a string"),
        ({"text": "a", "image_url": {"url": "cat.png"}}, "got 'image_url', an object"),
        (["a"], "expected message 1 to have parts of text, got a list"),
    ],
)
def test_a_part_that_is_no_text_is_refused(tokenizer: Any, part: Any, got: str) -> None:
    with pytest.raises(InputError) as error:
        prompt(tokenizer, USER, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}, ANSWER)
    assert got in str(error.value)


def test_members_that_are_empty_or_describe_a_message_are_accepted(tokenizer: Any) -> None:
    """OpenAI's files for fine-tuning, tables with null members, WildChat, and axolotl's flags."""
    plain = prompt(tokenizer, USER, ANSWER)
    for more in (
        {"weight": 1, "name": "Ann"},
        {"refusal": None, "audio": None, "annotations": [], "function_call": None, "tool_calls": None},
        {"function_call": {"name": None, "arguments": ""}, "tool_calls": []},
        {"toxic": False, "language": "English", "header": {"user-agent": "x"}, "turn_identifier": 1},
        {"train": True, "score": 0.5},
    ):
        assert prompt(tokenizer, {**USER, **more}, {**ANSWER, **more}) == plain
    shared = {"from": "human", "value": "hello", "weight": None, "role": None, "content": None}
    assert prompt(tokenizer, shared, {"from": "gpt", "value": "fine", "weight": 1}) == plain
    parts = [{"type": "text", "text": "hello", "image_url": None, "cache_control": {"type": "ephemeral"}}]
    assert prompt(tokenizer, {"role": "user", "content": parts}, ANSWER) == plain


@pytest.mark.parametrize(
    "message",
    [
        ANSWER,
        *(
            called(arguments)
            for arguments in ('{"city": "Rome"}', '{"a": null}', {"b": 1, "a": [2]}, {}, "", None, ...)
        ),
        *({**answer, "content": []} for answer in (ANSWER, called({}))),
        {**ANSWER, "tool_calls": []},
        {**ANSWER, "reasoning": "so"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "a"},
    ],
)
def test_the_prompt_is_that_of_vllms_server(tokenizer: Any, message: dict[str, Any]) -> None:
    from vllm.config import ModelConfig
    from vllm.renderers.chat_utils import parse_chat_messages

    messages = deepcopy([USER, message, ANSWER])
    served, _, _ = parse_chat_messages(messages, ModelConfig(model=str(smollm2())), "string")
    assert prompt(tokenizer, USER, message, ANSWER) == tokenizer.apply_chat_template(served, tokenize=False)


def test_an_empty_list_is_an_empty_text(tokenizer: Any) -> None:
    """Llama 3's template joins a list to a text as ``[]``, and finds no call in it."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    empty = {"from": "gpt", "value": []}
    (row,) = rows_from([{"messages": [USER, empty, USER, {**ANSWER, "content": []}]}], CONFIG)
    ids = RowEncoder(tokenizer, 1000, {"chat_template": template}).encode(row).token_ids
    assert tokenizer.decode(ids) == "user: hello\nassistant: \n" * 2


def test_both_names_of_thoughts_reach_the_template(tokenizer: Any) -> None:
    """vLLM's server renames ``reasoning_content`` of a request, and gives a template both names."""
    both = [row_of(USER, {**ANSWER, name: "so"}).messages[1] for name in ("reasoning", "reasoning_content")]
    assert both == [{**ANSWER, "reasoning": "so", "reasoning_content": "so"}] * 2
    for one, other in (("", "so"), ("so", "\n"), ("so", "so")):
        assert row_of(USER, {**ANSWER, "reasoning": one, "reasoning_content": other}).messages[1] == both[0]
    assert "so" in prompt(tokenizer, USER, {**ANSWER, "reasoning": "so"})


def test_a_call_without_a_function_member_has_its_arguments_parsed(tokenizer: Any) -> None:
    bare = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}
    assert prompt(tokenizer, USER, bare) == prompt(tokenizer, USER, called({"a": 1}))


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ("{", "got a text that is not JSON in a call of 'f'"),
        ("[1]", "got a list in a call of 'f'"),
        ([1], "got a list in a call of 'f'"),
        ([], "got an empty list in a call of 'f'"),
        (0, "got an integer in a call of 'f'"),
        (False, "got a boolean in a call of 'f'"),
        ('{"a": 1, "a": 2}', "expected each member of a JSON object once, got 'a' twice"),
        ('{"a": "\\ud800"}', "expected valid Unicode"),
        ('{"a":' + "[" * 70 + "]" * 70 + "}", "nested at most 64 deep"),
    ],
)
def test_arguments_that_are_no_object_are_refused(arguments: Any, got: str) -> None:
    row = row_of(USER, called(arguments))
    assert isinstance(row, RowFate)
    assert got in row.reason


def test_the_arguments_of_all_calls_together_are_bounded() -> None:
    text = json.dumps({"a": [[]] * 20_000})
    chat = [called(text) for _ in range(2)]
    one, two = (next(rows_from([{"messages": m}], InputConfig(max_row_bytes="160KiB"))) for m in (chat[:1], chat))
    assert isinstance(one, Row)
    assert isinstance(two, RowFate)
    assert "messages: arguments of calls: expected a JSON text of at most" in two.reason


def test_a_rows_hash_has_the_arguments_as_they_are_rendered() -> None:
    """A sample that was rendered with the text of its arguments has another hash, so a resume refuses it."""
    text, parsed = row_of(USER, called('{"a": 1}')), row_of(USER, called({"a": 1}))
    assert text.content == parsed.content
    assert text.content != Row(text.key, 0, messages=[USER, called('{"a": 1}')]).content
    assert row_of(USER, ANSWER).content == Row("0", 0, messages=[USER, ANSWER]).content
