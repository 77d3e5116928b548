"""Finds messages that a chat template leaves out, changes, or prints as Python code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from secrets import SystemRandom
from string import ascii_lowercase
from typing import Any

from hsx_dist.errors import InputError
from hsx_dist.inputs.chat_members import require_functions, require_text_and_calls
from hsx_dist.inputs.row_values import kind_of, shown

#: Begins each mark. Random, because a row with a mark could replace what a template leaves out.
_BEGIN = "hsx" + "".join(SystemRandom().choices(ascii_lowercase, k=8))
#: Stands for a text of a message (of the whole content, or of a part), or for a name of a function (call, tool).
#: Short, because some templates cut long texts.
_MARK = _BEGIN + "{}{}{}x"
_FOUND = re.compile(_BEGIN + r"\d+[tpcf]\d+x")
#: A part's mark in the Python code of a list.
_AS_CODE = re.compile(rf"(?:'text': |\[|, )'{_BEGIN}\d+p\d+x'")

#: Thoughts at the beginning of a text: of Qwen3 and DeepSeek, EXAONE Deep, Magistral, Seed-OSS, Reka.
_THOUGHT = re.compile(
    r"\A\s*(?:<think>.*?</think>|<thought>.*?</thought>|\[THINK\].*?\[/THINK\]|<seed:think>.*?</seed:think>"
    r"|<reasoning>.*?</reasoning>)",
    re.DOTALL,
)
#: Switches of Qwen3, SmolLM3, Nemotron and GLM, which templates remove from texts.
_SWITCH = re.compile(r"(?<!\S)/(?:(?:no_?)?think|system_override)(?!\S)")
#: Texts of a chat, its calls and its tools: each gets a mark, which takes several hundred bytes.
_MOST_MARKS = 1 << 16
_WITHOUT_SPACE = dict.fromkeys(i for i in range(0x3001) if chr(i).isspace())
#: Templates write texts of these roles at the beginning of the prompt, also those of later messages.
_SYSTEM = ("system", "developer")

RenderWithTools = Callable[[list[dict[str, Any]], list[Any] | None], str]
#: A message's number and one of its texts.
Text = tuple[int, str]


def texts_of(content: Any) -> list[str]:
    """Return the texts of a message's content: the content itself, or those of its parts. Leaves out blank ones."""
    parts = content if isinstance(content, list) else [content]
    return [text for text in map(_text_of, parts) if text]


@dataclass(frozen=True)
class Marked:
    """A chat and its tools with a mark in place of each text and of each function's name."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    #: Marks of each message's texts, in order.
    texts: list[list[str]]
    #: Marks of the functions that each message calls, in order.
    calls: list[list[str]]
    tool_names: list[str]


def with_marks(messages: list[dict[str, Any]], tools: list[Any] | None) -> Marked:
    """Replace the texts of ``messages``, and the functions' names of calls and ``tools``, by marks."""
    texts = [_marks(i, message.get("content")) for i, message in enumerate(messages)]
    marked = [
        {**m, "content": _marked(m["content"], iter(own))} if own else m for m, own in zip(messages, texts, strict=True)
    ]
    calls = [_with_names(m.get("tool_calls"), f"{i}c") for i, m in enumerate(messages)]
    marked = [{**m, "tool_calls": new} if named else m for m, (new, named) in zip(marked, calls, strict=True)]
    marked_tools, tool_names = _with_names(tools, "0f")
    return Marked(marked, marked_tools, texts, [names for _, names in calls], tool_names)


def marks_in(text: str) -> list[tuple[str, int]]:
    """Return the marks in a rendered chat and their places, in order."""
    return [(match[0], match.start()) for match in _FOUND.finditer(text)]


def _named(i: int, message: dict[str, Any]) -> str:
    return f"message {i} (role {shown(message['role'])}, content: {kind_of(message.get('content'))})"


def require_rendered(
    messages: list[dict[str, Any]], tools: list[Any] | None, render: RenderWithTools
) -> list[Text] | None:
    """Check that a template renders every text and tool call of ``messages``, and every tool.

    Returns the texts of messages without ``tool_calls`` in the prompt's order, for ``require_texts``. None: the
    template renders no marks, so the order is unknown.

    Templates for text alone print a list of parts as ``[{'type': 'text', …``, and a null as ``None``. Others leave out
    parts, tools, or roles that they do not know. Texts and functions' names are replaced by marks, and the marks are
    searched in one pass. A template may leave out the text of a message with ``tool_calls``. ``require_texts`` finds
    texts that the template changes.

    Args:
        render: messages, tools → text.

    Raises:
        InputError: a text, a call or a tool is missing, or Python code is in its place; a message has something else
            than texts and calls. A tool is no named function. Also raises any error of ``render``.
    """
    require_text_and_calls(messages)
    require_functions(tools)
    _require_few(messages, tools)
    if any(message.get("content") is None for message in messages):
        _require_no_none(messages, tools, render)
    marked = with_marks(messages, tools)
    try:
        text = render(marked.messages, marked.tools)
    except MemoryError:
        raise  # not the row's fault
    except Exception:  # noqa: BLE001 - the template needs the texts themselves: what it leaves out is unknown
        return None
    if _AS_CODE.search(text):
        raise InputError(
            "expected the content of messages as text, which is all that the chat template renders, got parts. "
            "Join the texts of the parts"
        )
    found = dict.fromkeys(mark for mark, _ in marks_in(text)).keys()  # in order, each at its first place
    for i, message in enumerate(messages):
        if not message.get("tool_calls") and texts_of(message.get("content")) and not found >= set(marked.texts[i]):
            raise InputError(
                "expected a chat template that renders every message, got a template that leaves out text of "
                f"{_named(i, message)}. Remove the message, correct its role, or join the texts of its parts"
            )
        if not found >= set(marked.calls[i]):
            raise InputError(
                "expected a chat template that renders tool calls, got a template that leaves out a call of "
                f"{_named(i, message)}. Use a chat template with tools, or write the call as text"
            )
    if not found >= set(marked.tool_names):
        raise InputError(
            "expected a chat template that renders tools, got a template that leaves them out. Use a chat template "
            "with tools, or remove the tools"
        )
    # A list of blank parts has a mark and no text.
    texts = dict(
        item
        for own, text in zip(marked.texts, _texts_by_message(messages), strict=True)
        for item in zip(own, text, strict=False)
    )
    return [texts[mark] for mark in found if mark in texts]


def require_texts(messages: list[dict[str, Any]], prompt: str, order: list[Text] | None) -> None:
    """Check that the rendered ``prompt`` has the texts of ``messages`` unchanged, apart from white space.

    A mark in place of a text is not changed: EXAONE Deep's template cuts texts at ``</thought>``, and SmolLM3's removes
    ``/think`` from words. A template may leave out thoughts at the beginning of a text, switches that stand alone, and
    the text of a message with ``tool_calls``. It may write a text as JSON.

    Each text must be after the one before it in ``order``. Otherwise a message that repeats a cut text would hide it.

    Args:
        order: the result of ``require_rendered``. None: the order of the messages, or the same with the system's first.

    Raises:
        InputError: a text is missing.
    """
    prompt = prompt.translate(_WITHOUT_SPACE)
    if order is not None:
        orders = [order]
    else:
        in_order = [item for texts in _texts_by_message(messages) for item in texts]
        orders = [in_order, sorted(in_order, key=lambda item: messages[item[0]]["role"] not in _SYSTEM)]
    for texts in orders:
        missing = _first_missing(texts, prompt)
        if missing < 0:
            return
    raise InputError(
        "expected a chat template that renders texts as they are, got a template that changes or leaves out text of "
        f"message {missing} (role {shown(messages[missing]['role'])}), or of a message before it in the prompt. Write "
        "thoughts at the beginning of the content or as reasoning, remove the model's control words, or use another "
        "chat template"
    )


def _texts_by_message(messages: list[dict[str, Any]]) -> list[list[Text]]:
    """Return the texts of each message that a template must render: none for a message with calls."""
    return [
        [] if message.get("tool_calls") else [(i, text) for text in texts_of(message.get("content"))]
        for i, message in enumerate(messages)
    ]


def _first_missing(texts: list[Text], prompt: str) -> int:
    """Return the message whose text is not in ``prompt`` after the texts before it, or -1."""
    end = 0
    for i, text in texts:
        for piece in _pieces_of(text):
            end = _end_of(_forms_of(piece), prompt, end)
            if end < 0:
                return i
    return -1


def has_end_of(text: str, rendered: str, length: int) -> bool:
    """Whether ``rendered`` has the last ``length`` characters of what a template must keep of ``text``."""
    pieces = _pieces_of(text)
    return not pieces or _end_of(_forms_of(pieces[-1][-length:]), rendered.translate(_WITHOUT_SPACE), 0) >= 0


def _pieces_of(text: str) -> list[str]:
    """Return what a template must keep of a text: no thoughts at its beginning, and no switches."""
    return [piece for piece in map(str.strip, _SWITCH.split(_THOUGHT.sub("", text))) if piece]


def _forms_of(piece: str) -> list[str]:
    """Return the forms of a text in which a prompt may have it, without white space."""
    forms = [piece, *(json.dumps(piece, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))]
    return [form.translate(_WITHOUT_SPACE) for form in dict.fromkeys(forms)]


def _end_of(forms: list[str], prompt: str, start: int) -> int:
    """Return the first end of any of ``forms`` from ``start``, or -1. The time grows with the distance of that end."""
    distance = 2 * max(map(len, forms)) + 256
    while True:
        stop, found = start + distance, -1
        for form in forms:
            if (at := prompt.find(form, start, stop)) >= 0:
                found = stop = at + len(form)
        if found >= 0 or stop >= len(prompt):
            return found
        distance *= 2


def _require_few(messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
    count = len(tools or ())
    for message in messages:
        content = message.get("content")
        count += (len(content) if isinstance(content, list) else 1) + len(message.get("tool_calls") or ())
    if count > _MOST_MARKS:
        raise InputError(
            f"expected at most {_MOST_MARKS} texts, calls and tools in a chat, got {count}. Join texts of parts, or "
            "split the row"
        )


def _require_no_none(messages: list[dict[str, Any]], tools: list[Any] | None, render: RenderWithTools) -> None:
    # Only a null may add ``None``: a template may leave out calls, whose arguments have the word, with an empty text.
    null = [_without_the_word(message) for message in messages]
    printed = render(null, tools).count("None")
    if not printed:
        return
    empty = [m if m.get("content") is not None else {**m, "content": ""} for m in null]
    if printed > render(empty, tools).count("None"):
        raise InputError(
            "expected the content of messages as text, got null, which the chat template renders as None. "
            "Write an empty text"
        )


def _without_the_word(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("None", "hsx")
    if isinstance(value, dict):
        return {name: _without_the_word(item) for name, item in value.items()}
    return [_without_the_word(item) for item in value] if isinstance(value, list) else value


def _with_names(functions: list[Any] | None, prefix: str) -> tuple[list[Any] | None, list[str]]:
    """Return tools or tool calls with a mark as the name of each function, and the marks."""
    if not functions:
        return functions, []
    names = [_MARK.format(prefix, n, "") for n in range(len(functions))]
    found = [
        {**item, "function": {**item["function"], "name": name}} if "function" in item else {**item, "name": name}
        for item, name in zip(functions, names, strict=True)
    ]
    return found, names


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) and text.strip() else ""


def _marks(i: int, content: Any) -> list[str]:
    """Return a mark for each text. Parts of blanks get one mark too, to find whether they are printed as code."""
    kind = "p" if isinstance(content, list) else "t"
    return [_MARK.format(i, kind, n) for n in range(len(texts_of(content)) or (kind == "p" and len(content) > 0))]


def _marked(content: Any, marks: Iterator[str]) -> Any:
    """Return ``content`` with the next of ``marks`` in place of each text."""
    if isinstance(content, list):
        parts = [_marked(part, marks) if _text_of(part) else part for part in content]
        return [*parts, *({"type": "text", "text": mark} for mark in marks)]
    return {**content, "text": next(marks)} if isinstance(content, dict) else next(marks)
