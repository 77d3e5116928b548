"""Checks of a row's fields, and normalisation of equivalent forms. A check returns the problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hsx_dist.connector.request_params import MAX_METADATA_BYTES, MAX_METADATA_DEPTH
from hsx_dist.errors import InputError
from hsx_dist.inputs.row_cost import cost_of_json, most_cost
from hsx_dist.inputs.row_values import chat_value, is_unicode, kind_of, metadata_value, row_json, shown
from hsx_dist.json_limits import json_text

#: vLLM's token ids are int32 in its batches.
_MAX_TOKEN_ID = (1 << 31) - 1
#: A chat may have as many texts, calls and tools, so this refuses no other chat. It does so before they are copied.
_MOST_MESSAGES = 1 << 16
#: Names of ShareGPT's roles → those of chat templates.
_SHAREGPT = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def as_messages(value: Any, name: str, most: int) -> Any:
    """Return messages in the form of chat templates: a list of mappings with ``role`` and ``content``.

    Parses a JSON text, as tables often contain. Renames ShareGPT's ``from`` and ``value``. Leaves out null members,
    because a table has every member in every row. Gives calls and thoughts the form that vLLM's server gives them
    before it renders a chat. Returns a value that is not a list unchanged.

    A row's hash is of this form. So a resume finds stored samples whose prompt was rendered from another form.

    Args:
        most: ``input.max_row_bytes``, the limit of a JSON text.

    Raises:
        InputError: a value is no JSON, or is nested too deeply; there are too many
            messages; a JSON text is too large; the arguments of a call are no object.
    """
    if isinstance(value, str):
        value = _parsed(value, name, most)
    if not isinstance(value, list):
        return value
    if len(value) > _MOST_MESSAGES:
        raise InputError(f"{name}: expected at most {_MOST_MESSAGES} messages, got {len(value)}. Split the row")
    messages = [_message(m) if isinstance(m, dict) else m for m in chat_value(value, name)]
    functions = list(_called(messages))
    texts = [f["arguments"] for f in functions if isinstance(f.get("arguments"), str)]
    _require_bounded(texts, f"{name}: arguments of calls", most)
    for function in functions:
        function["arguments"] = _arguments(function, name, most)
    return chat_value(messages, name) if texts else messages


def _message(message: dict[str, Any]) -> dict[str, Any]:
    message = {k: _without_null(v) for k, v in message.items() if k == "content" or v is not None}
    if "role" not in message and isinstance(message.get("from"), str):
        role = message.pop("from")
        content = message.pop("content", None)
        content = message.pop("value", None) if content is None else content
        message = {"role": _SHAREGPT.get(role, role), "content": content, **message}
    if message.get("content") == []:
        message["content"] = ""  # templates for text alone print an empty list as []
    if not message.get("tool_calls", True):
        del message["tool_calls"]  # templates take an empty list for calls
    thoughts = [message[name] for name in ("reasoning", "reasoning_content") if name in message]
    told = [t for t in thoughts if not isinstance(t, str) or t.strip()] or thoughts
    if told and told[0] == told[-1] and message.get("role") == "assistant":
        message |= {"reasoning": told[0], "reasoning_content": told[0]}  # each template knows one of these names
    return message


def _called(messages: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the functions of calls: mappings that have, or should have, ``name`` and ``arguments``."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict):
                yield function


def _arguments(function: dict[str, Any], name: str, most: int) -> dict[str, Any]:
    """Return a call's arguments as an object. OpenAI's calls have them as a JSON text, which templates encode again."""
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{name}: arguments of a call", most)
    if not isinstance(arguments, dict):
        got = "a text that is not JSON" if isinstance(arguments, str) else kind_of(arguments)
        raise InputError(
            f"{name}: expected the arguments of a call as an object, or as its JSON text, got {got} in a call of "
            f"{shown(function.get('name'))}. Correct the call"
        )
    return arguments


def _without_null(value: Any) -> Any:
    """Remove null members in place, at every level: a second copy of a large row takes as much memory as the row."""
    if isinstance(value, dict):
        for name in [name for name, item in value.items() if item is None]:
            del value[name]
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _without_null(item)
    return value


def given_tools(value: Any, name: str, most: int) -> Any:
    """Return the value of a row's tools, parsed if it is a JSON text of at most ``most`` bytes.

    Returns None if they are no tools: null, a blank text, or an empty list or object, each also as a JSON text.

    Raises:
        InputError: the text is too large, or has a member twice.
    """
    found = _parsed(value, name, most) if isinstance(value, str) else value
    is_blank = not found.strip() if isinstance(found, str) else isinstance(found, (list, dict)) and not found
    return None if is_blank else found


def as_tools(value: Any, name: str) -> list[Any]:
    """Return tools as a list of mappings.

    Raises:
        InputError: ``value`` is no such list, or a member has no JSON form or is nested too deeply.
    """
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise InputError(f"{name}: expected a list of tools (objects), got {kind_of(value)}")
    return [_without_null(tool) for tool in chat_value(value, name)]


def _parsed(text: str, name: str, most: int) -> Any:
    _require_bounded([text], name, most)
    try:
        return row_json(text)
    except InputError as e:
        raise InputError(f"{name}: {e}") from None
    except (ValueError, RecursionError):
        return text


def _require_bounded(texts: list[str], name: str, most: int) -> None:
    size = sum(map(len, texts))
    if size > most or sum(map(cost_of_json, texts)) > most_cost(most):
        raise InputError(
            f"{name}: expected a JSON text of at most {most} bytes (input.max_row_bytes), got {size} characters "
            "or too many values. Split the row"
        )


def mask_of(value: Any, name: str) -> list[int]:
    """Return a loss mask as zeros and ones.

    Raises:
        InputError: ``value`` is not a list of 0 and 1 (or false and true), or is empty.
    """
    if not isinstance(value, list) or not value:
        raise InputError(f"{name}: expected a list of 0 and 1, got {kind_of(value)}")
    for i, item in enumerate(value):
        if type(item) not in (int, bool) or item not in (0, 1):
            raise InputError(f"{name}: expected 0 or 1, got {shown(item)} at position {i}")
    return [int(item) for item in value]


def json_metadata(values: dict[str, Any]) -> dict[str, Any]:
    """Return columns as JSON values: see ``metadata_value``.

    Raises:
        InputError: a value has no such form or is nested too deeply, or all values together are too large.
    """
    # Every value takes at least a byte. So the limit of their number stops a far too large column before it is encoded.
    found = {name: metadata_value(value, name, MAX_METADATA_BYTES) for name, value in values.items()}
    try:
        json_text(found, max_bytes=MAX_METADATA_BYTES, max_depth=MAX_METADATA_DEPTH)
    except ValueError as e:
        raise InputError(f"metadata: {e}, or name fewer columns") from e
    return found


def _text_problem(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"expected a string, got {kind_of(value)}"
    if not value.strip():
        return "expected text, got an empty string"
    return None if is_unicode(value) else "expected valid Unicode, got half of a surrogate pair"


def _messages_problem(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"expected a list of messages, got {kind_of(value)}"
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"expected message {i} to be an object with a role, got {kind_of(message)} without it"
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            return f"expected the content of message {i} to be a string or a list, got {kind_of(content)}"
    return None


def _token_ids_problem(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"expected a list of token ids, got {kind_of(value)}"
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID:
            return f"expected token ids (integers from 0), got {shown(token)} at position {i}"
    return None


#: Kind of content → a check that returns a value's problem, or None.
CONTENT_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "text": _text_problem,
    "messages": _messages_problem,
    "token_ids": _token_ids_problem,
}
