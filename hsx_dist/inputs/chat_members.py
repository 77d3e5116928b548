"""Checks that messages are text and calls, which a chat template can render, and that tools are functions."""

from __future__ import annotations

from typing import Any

from hsx_dist.errors import InputError
from hsx_dist.inputs.row_values import kind_of, shown

#: Thoughts of an answer. Templates leave out those of earlier turns on purpose.
#: The first two are names of the same thoughts.
_THOUGHTS = ("reasoning", "reasoning_content", "thinking")
#: Members that describe a message: those of chat APIs, then WildChat's.
_DESCRIBE = frozenset({"name", "tool_call_id", "id", "type", "status", "model", "finish_reason", "annotations"}) | {
    *("timestamp", "language", "country", "state", "hashed_ip", "header")
}
_MESSAGE = frozenset({"role", "content", "tool_calls", *_THOUGHTS}) | _DESCRIBE
_PART = frozenset({"type", "text", "id", "annotations", "cache_control"})
_TEXT_TYPES = (None, "text", "input_text", "output_text")
_CALL = frozenset({"id", "type", "function"})
_TOOL = _CALL | {"cache_control"}
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
        if len({text for name in _THOUGHTS[:2] if (text := message.get(name, "")).strip()}) > 1:
            raise InputError(
                f"expected reasoning and reasoning_content of message {i} to be the same text, got two texts. Remove "
                "one of them"
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


def require_functions(tools: list[Any] | None) -> None:
    """Check that ``tools`` are named functions. Many templates print nothing for others, or only the function.

    Raises:
        InputError: a tool is something else.
    """
    for i, tool in enumerate(tools or []):
        function = _named_function(tool, f"tool {i}", "a tool", "a name, a description and parameters")
        if function is not tool:
            _require_members(tool, _TOOL, f"tool {i}", "Write the function's name, description and parameters")


def _named_function(item: Any, what: str, kind: str, members: str) -> dict[str, Any]:
    """Return the function of a call or a tool: its member ``function``, or the call or the tool itself."""
    function = item.get("function", item) if isinstance(item, dict) else item
    name = function.get("name") if isinstance(function, dict) else None
    other = isinstance(item, dict) and item.get("type", "function") != "function"
    if other or not isinstance(name, str) or not name.strip():
        nameless = f"{kind} whose function has no name" if isinstance(function, dict) else kind_of(function)
        got = f"{kind} of type {shown(item['type'])}" if other else nameless
        raise InputError(
            f"expected {what} to be {kind} of a named function, got {got}. Write it as an object of type function, "
            f"whose function has {members}"
        )
    return function


def _require_call(call: Any, i: int) -> None:
    function = _named_function(call, f"each of tool_calls of message {i}", "a call", "a name and arguments")
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
