"""Checks that the members of messages are text and calls, which a chat template can render, or no part of a chat."""

from __future__ import annotations

from typing import Any

from hsx_dist.errors import InputError
from hsx_dist.inputs.row_values import kind_of, shown

#: Thoughts of an answer. Templates leave out those of earlier turns on purpose.
_THOUGHTS = ("reasoning", "reasoning_content", "thinking")
#: Members that describe a message: those of chat APIs, then WildChat's.
_DESCRIBE = frozenset({"name", "tool_call_id", "id", "type", "status", "model", "finish_reason", "annotations"}) | {
    *("timestamp", "language", "country", "state", "hashed_ip", "header")
}
_MESSAGE = frozenset({"role", "content", "tool_calls", *_THOUGHTS}) | _DESCRIBE
_PART = frozenset({"type", "text", "id", "annotations", "cache_control"})
_TEXT_TYPES = (None, "text", "input_text", "output_text")
_CALL = frozenset({"id", "type", "function"})
_FUNCTION = frozenset({"name", "arguments"})


def require_text_and_calls(messages: list[dict[str, Any]]) -> None:
    """Check that ``messages`` have only texts and calls of named functions.

    A template ignores members that it does not know, so a sample would lack them. A member that is empty, a number or
    a boolean has no part of a chat.

    Raises:
        InputError: a message, a part or a call has something else.
    """
    for i, message in enumerate(messages):
        _require_members(message, _MESSAGE, f"message {i}", "Write texts as content and calls as tool_calls")
        for name in _THOUGHTS:
            if not isinstance(message.get(name, ""), str):
                raise InputError(
                    f"expected {name} of message {i} to be a string, got {kind_of(message[name])}. Write it as text"
                )
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            _require_text(part, i)
        calls = message.get("tool_calls")
        if calls and not isinstance(calls, list):
            raise InputError(f"expected tool_calls of message {i} to be a list, got {kind_of(calls)}. Write a list")
        for call in calls or []:
            _require_call(call, i)


def _require_text(part: Any, i: int) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise InputError(f"expected message {i} to have parts of text, got {kind_of(part)}. Write the part as text")
    kind = part.get("type")
    if kind not in _TEXT_TYPES:
        raise InputError(
            f"expected message {i} to have parts of text, got a part of type {shown(kind)}. A job extracts text alone. "
            "Write the part as text or a call, or remove the row"
        )
    _require_members(part, _PART, f"a part of message {i}", "A job extracts text alone. Write it as a part of text")
    if not isinstance(part.get("text"), str):
        raise InputError(
            f"expected a part of message {i} to have a text, got {kind_of(part.get('text'))}. Write the part as text"
        )


def _require_call(call: Any, i: int) -> None:
    function = call.get("function", call) if isinstance(call, dict) else call
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name or call.get("type", "function") != "function":
        got = f"a call of type {shown(call['type'])}" if isinstance(call, dict) and "type" in call else kind_of(call)
        raise InputError(
            f"expected tool_calls of message {i} to be calls of named functions, got {got}. Write each call as an "
            "object of type function, whose function has a name and arguments"
        )
    what, todo = f"a call of message {i}", "Write the function's name and its arguments"
    if function is not call:
        _require_members(call, _CALL, what, todo)
    _require_members(function, _FUNCTION if function is not call else _FUNCTION | _CALL, what, todo)


def _require_members(value: dict[str, Any], known: frozenset[str], what: str, todo: str) -> None:
    for name, item in value.items():
        if name not in known and not isinstance(item, (bool, int, float)) and not _is_empty(item):
            raise InputError(
                f"expected {what} to have members that a template renders, got {shown(name)}, {kind_of(item)}. "
                f"{todo}, or remove {shown(name)}"
            )


def _is_empty(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, str) and not value.strip())
