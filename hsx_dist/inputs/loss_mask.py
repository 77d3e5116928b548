"""Finds the tokens of a chat's messages by role, by rendering prefixes of the chat with the model's own template.

Few chat templates mark the assistant's text, so transformers' ``return_assistant_tokens_mask`` gives nothing for the
others. But every template can render the chat up to a message, with the header of the answer, and the chat including
the message. A prefix may be rendered differently alone than within the whole chat (Qwen3 drops the thoughts of earlier
turns). Then the message ends where the whole chat no longer matches the end of that prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from hsx_dist.errors import InputError
from hsx_dist.inputs.rendered import has_end_of, marks_in, texts_of, with_marks
from hsx_dist.inputs.row_values import shown

#: Characters of Unicode's private area, which no template changes. A character that the chat lacks replaces a message's
#: text to find where the text begins.
_MARKS = [chr(code) for code in range(0xE000, 0xF900)]
#: Members with which files for training leave a message out: OpenAI's, axolotl's (two), ms-swift's, and a common one.
_FLAGS = ("weight", "train", "training", "loss", "trainable")
#: Characters of the end of a message's last line that must be found.
_TAIL = 20


class Render(Protocol):
    def __call__(self, messages: list[dict[str, Any]], header: bool, tools: list[Any] | None = None, /) -> str:
        """Render ``messages``, and the header of an answer after them. ``tools`` replace the row's."""


def spans_of_roles(
    whole: str,
    messages: list[dict[str, Any]],
    roles: Sequence[str],
    render: Render,
    tools: list[Any] | None = None,
) -> list[tuple[int, int]]:
    """Return the characters ``[start, stop)`` of ``whole`` of each message with one of ``roles``, in order.

    An assistant's message begins after the header with which the template asks the model to answer. Another role's
    message begins with its header. It begins with its text if the template writes text of another message, or the
    tools, behind that header: templates of Gemma 3, Llama 2 and Mistral join the system's text with the first user
    message. The chat's first message begins with its text, unless it is a system message: the template may write a
    default system message before it.

    A message with 0 in one of ``_FLAGS`` is left out.

    Raises:
        InputError: the template renders a prefix in a way that cannot be found in the whole chat. It writes text of
            another message into or behind a message's text. A flag is not 0 or 1.
    """
    found = []
    for i, message in enumerate(messages):
        if message["role"] not in roles or not _is_trained(message, i):
            continue
        before = render(messages[:i], False) if i else ""
        if not whole.startswith(before):
            raise InputError(
                f"loss_roles: expected a chat template that renders the messages before message {i} as it renders them "
                "within the whole, got another text: some templates add a text at the end of each chat, as Phi-3's "
                "adds <|endoftext|>. Give the row a loss_mask"
            )
        if message["role"] == "assistant" and i:
            start = _after_header(whole, messages[:i], len(before), render)
        elif _begins_with_header(messages[: i + 1], tools, render):
            start = len(before)
        else:
            start = _start_of_text(whole, messages, i, render)
        through = render(messages[: i + 1], False)
        length = _length(through, whole, start, first=not i)
        if not _is_whole(message, whole[start : start + length], through[start:]):
            raise InputError(
                f"loss_roles: expected to find message {i} in the rendered chat, got a template that renders it "
                "differently there: some templates end only the chat's last answer in another way, as gpt-oss's with "
                "<|return|>. Give the row a loss_mask, or end the chat with this message"
            )
        found.append((start, start + length))
    return found


def _is_trained(message: dict[str, Any], i: int) -> bool:
    """Whether the flags of the message leave it in the loss."""
    flags = {name: message[name] for name in _FLAGS if name in message}
    for name, flag in flags.items():
        if not isinstance(flag, (bool, int, float)) or flag not in (0, 1):
            raise InputError(
                f"loss_roles: expected {name} of message {i} to be 0 or 1, got {shown(flag)}. A loss mask has no other "
                f"weights. Correct {name}, or give the row a loss_mask"
            )
    return all(flags.values())


def _begins_with_header(messages: list[dict[str, Any]], tools: list[Any] | None, render: Render) -> bool:
    """Whether the last message begins with its header. False: what precedes its text is not its own."""
    *earlier, message = messages
    i = len(earlier)
    if not earlier:
        return message["role"] == "system"
    marked = with_marks(messages, tools)
    others = {mark for marks in (*marked.texts[:i], *marked.calls[:i], marked.tool_names) for mark in marks}
    try:
        before = marks_in(render(marked.messages[:i], False, marked.tools))
        through = marks_in(render(marked.messages, False, marked.tools))
    except (InputError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - the template needs the texts themselves
        joined, first = _adds_text_of(earlier, message, render), False
    else:
        last = dict(through)
        added = Counter(mark for mark, _ in through) - Counter(mark for mark, _ in before)
        places = [last[mark] for mark in added if mark in others]
        own = [at for mark, at in through if mark in marked.texts[i]]
        joined, first = bool(places), bool(own) and max(places, default=-1) < min(own)
    if joined and not first:
        raise InputError(
            f"loss_roles: expected a chat template that renders message {i} (role {shown(message['role'])}) "
            "behind all others, got text of another message, or a tool, in it or behind it. Give the row a loss_mask"
        )
    return not joined


def _adds_text_of(earlier: list[dict[str, Any]], message: dict[str, Any], render: Render) -> bool:
    """Whether the template writes a text of ``earlier`` with ``message``."""
    before, through = render(earlier, False), render([*earlier, message], False)
    own = "\n".join(texts_of(message.get("content")))
    texts = {text.strip() for other in earlier for text in texts_of(other.get("content"))}
    return any(through.count(text) > before.count(text) + own.count(text) for text in texts)


def _start_of_text(whole: str, messages: list[dict[str, Any]], i: int, render: Render) -> int:
    """Return where the text of message ``i`` begins in ``whole``."""
    mark = _mark(whole)
    marked = render([*messages[:i], {**messages[i], "content": mark}, *messages[i + 1 :]], False)
    start = marked.find(mark)
    if start < 0 or not whole.startswith(marked[:start]):
        raise InputError(
            f"loss_roles: expected to find the text of message {i} in the rendered chat, got a template that renders "
            "it differently. Give the row a loss_mask"
        )
    return start


def _mark(whole: str) -> str:
    used = set(whole)
    for mark in _MARKS:
        if mark not in used:
            return mark
    raise InputError("loss_roles: expected a chat that lacks a private character of Unicode, got one with all of them")


def _after_header(whole: str, before: list[dict[str, Any]], start: int, render: Render) -> int:
    """Return where the assistant's answer to ``before`` begins in ``whole``, not before ``start``.

    The header may end with the beginning of a thought, which an answer without thoughts lacks. An answer such as
    ``<tool_call>`` begins with the same letter as ``<think>``.
    """
    header = render(before, True)
    if whole.startswith(header):  # nearly always true
        return max(start, len(header))
    mark = _mark(whole)
    marked = render([*before, {"role": "assistant", "content": mark}], False)
    plain = marked[: max(marked.find(mark), 0)]
    if len(plain) > start and whole.startswith(plain):
        return len(plain)
    line = whole.rfind("\n", start, _common(whole, header)) + 1
    if not line:
        raise InputError(
            f"loss_roles: expected to find the header of message {len(before)} in the rendered chat, got a template "
            "that renders it differently there. Give the row a loss_mask"
        )
    return line


def _is_whole(message: dict[str, Any], found: str, through: str) -> bool:
    """Whether ``found`` is the message up to its end, and not a few characters at the end of ``through``.

    A template may drop the beginning of a text, such as thoughts, and the whole text next to a call.
    """
    if not found.strip():
        return found == through != ""
    if message.get("tool_calls"):
        return len(found) >= min(_TAIL, len(through))
    texts = texts_of(message.get("content"))
    return not texts or has_end_of(texts[-1], found, _TAIL)


def _common(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _length(through: str, whole: str, start: int, *, first: bool) -> int:
    """Return the length of the message that begins at ``start`` in ``whole`` and ends with ``through``; 0: not found.

    Text before the message must not match, because a chat may repeat its turns. Before the first message the template
    may write something else, such as tools.
    """
    if through.startswith(whole[:start]):
        return _agreement(through[start:], whole, start)
    return _agreement(through, whole, start) if first else 0


def _agreement(through: str, whole: str, start: int) -> int:
    """Return the length of the longest prefix of ``whole[start:]`` with which ``through`` ends."""
    if whole.startswith(through, start):
        return len(through)
    # Knuth, Morris and Pratt: linear in the text's length. A row may be megabytes of one letter.
    wanted = whole[start : start + len(through)]
    borders = [0] * len(wanted)
    length = 0
    for i in range(1, len(wanted)):
        while length and wanted[i] != wanted[length]:
            length = borders[length - 1]
        length += wanted[i] == wanted[length]
        borders[i] = length
    length = 0
    for letter in through[len(through) - len(wanted) :]:
        while length and (length == len(wanted) or letter != wanted[length]):
            length = borders[length - 1]
        length += bool(wanted) and letter == wanted[length]
    return length


def mask_of_spans(
    whole: str,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    spans: Sequence[tuple[int, int]],
    special: frozenset[int],
) -> bytes:
    """Return a byte, 0 or 1, for each token: 1 if the token begins within a span, or with blanks before it.

    A header may end with a blank, which is one token with the first word of the text.

    Args:
        offsets: characters ``[start, stop)`` of each token in ``whole``.
        special: ids of special tokens. Blanks after a special token at a span's end are left out: the template adds
            them, and no model generates them.

    Raises:
        InputError: a token has text of a span and other text.
    """
    mask = bytearray(len(ids))

    def begin(t: int) -> int:
        return offsets[t][0]

    # A tokenizer may give tokens without text, and others, another order than the text's.
    order = sorted((t for t, (a, b) in enumerate(offsets) if a < b), key=begin)
    for start, stop in spans:
        first, last = (bisect_left(order, at, key=begin) for at in (start, stop))
        while first and whole[start : min(offsets[order[first - 1]][1], stop)].strip():
            first -= 1
            if whole[begin(order[first]) : start].strip():
                raise _shared_token(whole[slice(*offsets[order[first]])])
        if first < last and whole[stop : offsets[order[last - 1]][1]].strip():
            raise _shared_token(whole[slice(*offsets[order[last - 1]])])
        inside = sorted(order[first:last])
        said = len(inside)
        while said and not whole[slice(*offsets[inside[said - 1]])].strip():
            said -= 1
        if said and ids[inside[said - 1]] in special:
            inside = inside[:said]
        for t in inside:
            mask[t] = 1
    return bytes(mask)


def _shared_token(text: str) -> InputError:
    return InputError(
        f"loss_roles: expected tokens of a message alone, got one token of the template's text and the message, "
        f"{shown(text)}. Give the row a loss_mask"
    )
