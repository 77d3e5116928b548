"""Finds messages that a chat template leaves out, or prints as Python code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from hsx_dist.errors import InputError
from hsx_dist.inputs.row_values import kind_of, shown

#: Stands for a text of a message: of the whole content, or of a part.
_MARK = "hsx{}{}{}mark"
_FOUND = re.compile(r"hsx\d+(?:text|part)\d+mark")
#: A part's mark in the Python code of a list.
_AS_CODE = re.compile(r"(?:'text': |\[|, )'hsx\d+part\d+mark'")


def texts_of(content: Any) -> list[str]:
    """Return the texts of a message's content: the content itself, or those of its parts. Leaves out blank ones."""
    parts = content if isinstance(content, list) else [content]
    return [text for text in map(_text_of, parts) if text]


def require_rendered(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> None:
    """Check that a template renders every text of ``messages``. ``render``: messages → text.

    Templates for text alone print a list of parts as ``[{'type': 'text', …``, and a null as ``None``. Others leave out
    parts, or roles that they do not know. Texts are replaced by marks, and the marks are searched in one pass. A
    template may leave out the text of a message with ``tool_calls``.

    Raises:
        InputError: a text is missing, or Python code is in its place. Also raises any error of ``render``.
    """
    if any(message.get("content") is None for message in messages):
        _require_no_none(messages, render)
    marks = [_marks(i, message.get("content")) for i, message in enumerate(messages)]
    marked = [
        {**m, "content": _marked(m["content"], iter(own))} if own else m for m, own in zip(messages, marks, strict=True)
    ]
    try:
        text = render(marked)
    except Exception:  # noqa: BLE001 - the template needs the texts themselves: what it leaves out is unknown
        return
    if _AS_CODE.search(text):
        raise InputError(
            "expected the content of messages as text, which is all that the chat template renders, got parts. "
            "Join the texts of the parts"
        )
    found = set(_FOUND.findall(text))
    for i, message in enumerate(messages):
        required = texts_of(message.get("content")) and not message.get("tool_calls")
        if required and not found.issuperset(marks[i]):
            raise InputError(
                f"expected a chat template that renders every message, got a template that leaves out text of message "
                f"{i} (role {shown(message['role'])}, content: {kind_of(message['content'])}). Remove the message, "
                "correct its role, or join the texts of its parts"
            )


def _require_no_none(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> None:
    printed = render(messages).count("None")
    if not printed:
        return
    empty = [m if m.get("content") is not None else {**m, "content": ""} for m in messages]
    if printed > render(empty).count("None"):
        raise InputError(
            "expected the content of messages as text, got null, which the chat template renders as None. "
            "Write an empty text"
        )


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) and text.strip() else ""


def _marks(i: int, content: Any) -> list[str]:
    """Return a mark for each text. Parts without a text get one mark too, to find whether they are printed as code."""
    kind = "part" if isinstance(content, list) else "text"
    return [_MARK.format(i, kind, n) for n in range(len(texts_of(content)) or (kind == "part" and len(content) > 0))]


def _marked(content: Any, marks: Iterator[str]) -> Any:
    """Return ``content`` with the next of ``marks`` in place of each text."""
    if isinstance(content, list):
        parts = [_marked(part, marks) if _text_of(part) else part for part in content]
        return [*parts, *({"type": "text", "text": mark} for mark in marks)]
    return {**content, "text": next(marks)} if isinstance(content, dict) else next(marks)
